"""Gradients of a backward pass on their way; see ``_gradients.pyx``."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from bpsx.plugin.adapter import Item, Streams

#: A test may take all memory for the first GPU's. Then it is called with that of each gradient:
#: address, bytes, PyTorch's storage.
ALL_ON_GPU: Callable[[int, int, Any], None] | None

def is_dense_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is dense, and on a GPU that bpsx knows."""

def is_shared(gradient: torch.Tensor) -> bool:
    """Whether other tensors have their elements in the same memory."""

def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor can live in the same memory, and so share its version counter."""

def version(tensor: torch.Tensor) -> int | None:
    """How often ``tensor``, or another one in the same memory, has been written to; None if nobody
    counts.
    """

class Managed:
    """A parameter that is trained: its name on the wire, its urgency, the backward passes left
    until it is pushed, and the push.
    """

    #: A :class:`Pushed`, a :class:`bpsx.torch.sparse.SparseSum` or None.
    pushed: Any
    hook: Any
    #: None: the workers have not agreed yet.
    kind: Any
    #: What an implicit wait has left in grad, and its version.
    averaged: tuple[torch.Tensor, int | None] | None
    passes_left: int
    sparse_dim: int
    #: A sparse gradient that is complete, and waits for that.
    deferred: bool
    #: What has been pushed are zeros for a gradient that this worker has not had.
    stands_in: bool
    sparse_here: bool
    #: It is dense and travels as it is: hooks need only look at its memory.
    quick: bool
    #: Another optimizer sums its gradient, too.
    rivalled: bool
    #: False: no worker has a gradient in this step, as far as is known.
    wanted: bool

    def __init__(self, name: str, parameter: torch.Tensor, named: Any, passes: int) -> None: ...
    @property
    def parameter(self) -> torch.Tensor: ...
    @property
    def named(self) -> Any: ...
    @property
    def name(self) -> str: ...
    def is_sparse(self) -> bool:
        """Whether the gradient is sparse as it stands."""

class Pushed(Item):
    """A gradient under way: ``gradient`` is what the average goes into, ``ctx`` the compressor's.

    It may have to wait for others of a batch.

    ``own``: nothing else is in its memory, and so it may travel as it lies, and a write to it from
    now on until the wait is noticed.
    """

    def __init__(self, gradient: torch.Tensor, ctx: Any, own: bool, handle: Any) -> None: ...
    @property
    def gradient(self) -> torch.Tensor: ...
    @property
    def ctx(self) -> Any: ...
    @property
    def own(self) -> bool: ...
    @property
    def written(self) -> bool:
        """Whether there was such a write. After :meth:`wait`."""
    def done(self) -> bool:
        """Whether it has ended, well or not. Does not block."""
    def wait(self) -> torch.Tensor:
        """The sum. Raises what has made it fail."""

class Failed:
    """The handle of a push that could not begin."""

    def __init__(self, failure: Exception) -> None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...

class Batch:
    """What one optimizer's hooks have been given and have not begun yet. Thread-safe.

    ``begin``: of items, their GPU, what gives its current stream, and the stream that made them,
    begins them as :meth:`bpsx.session.session.Session.push_pull_all` does; ``begin_alone``: of a
    gradient and its name gives a :class:`Pushed`; ``begin_here``: begins an item on the host as
    :meth:`bpsx.session.session.Session.push_pull_known` does; ``worth``: gives how many bytes are
    worth beginning.
    """

    #: Hooks may leave out what they check otherwise: see
    #: :meth:`bpsx.torch.exchange.Exchange.accumulated`.
    quick: bool
    def __init__(
        self,
        begin: Callable[[list[Item], int, Streams, int], None],
        begin_alone: Callable[[torch.Tensor, Any], Pushed],
        begin_here: Callable[[Item], bool],
        worth: Callable[[], int],
    ) -> None: ...
    def add(self, managed: Managed, gradient: torch.Tensor) -> None:
        """Sum a parameter's dense gradient on the GPU, and set its ``pushed``.

        Raises why one cannot begin that has to alone.
        """
    def take(self, managed: Managed, gradient: torch.Tensor) -> bool:
        """Sum a parameter's dense gradient and set its ``pushed``; on the GPU as :meth:`add` does.
        False: it has to go the long way."""
    def submit(self) -> None:
        """Begin what there is.

        Raises the first failure; whoever waits for that gradient is told, too.
        """

class Hook:
    """What autograd calls when it has added to a parameter's gradient.

    ``exchange`` and ``managed``: weak references to what ``accumulated`` is called with, but for
    what :attr:`Batch.quick` allows.
    """

    def __init__(
        self,
        exchange: ref[Any],
        managed: ref[Any],
        batch: Batch,
        accumulated: Callable[[Any, Any], None],
    ) -> None: ...
    def rival(self) -> None:
        """Another hook sums the same gradient."""
    def __call__(self, _: torch.Tensor) -> None: ...
