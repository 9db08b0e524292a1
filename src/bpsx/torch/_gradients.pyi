"""Gradients of a backward pass in flight; see ``_gradients.pyx``."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from bpsx.plugin.adapter import Item, Streams

#: Test hook: if set, all memory counts as the first GPU's. It is called for each gradient with the
#: address, the size in bytes and PyTorch's storage.
ALL_ON_GPU: Callable[[int, int, Any], None] | None

def is_dense_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is dense and on a GPU that bpsx supports."""

def is_shared(gradient: torch.Tensor) -> bool:
    """Return whether other tensors have their elements in the same memory."""

def is_alone(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor can share the memory, and so the version counter."""

def version(tensor: torch.Tensor) -> int | None:
    """Return the version counter of ``tensor``'s memory; None if the memory has no counter."""

class Managed:
    """A trained parameter: its wire name, urgency, remaining backward passes, and push."""

    #: A :class:`Pushed`, a :class:`bpsx.torch.sparse.SparseSum` or None.
    pushed: Any
    hook: Any
    #: None: the workers have not agreed yet.
    kind: Any
    #: The gradient that an implicit wait has left in grad, and its version.
    averaged: tuple[torch.Tensor, int | None] | None
    passes_left: int
    sparse_dim: int
    #: A sparse gradient is complete and waits until the workers have agreed on its kind.
    deferred: bool
    #: This worker has no gradient and has pushed zeros.
    stands_in: bool
    sparse_here: bool
    #: Dense and uncompressed: hooks need only look at the gradient's memory.
    quick: bool
    #: Another optimizer sums the same gradient too.
    rivalled: bool
    #: False: as far as is known, no worker has a gradient in this step.
    wanted: bool

    def __init__(self, name: str, parameter: torch.Tensor, named: Any, passes: int) -> None: ...
    @property
    def parameter(self) -> torch.Tensor: ...
    @property
    def named(self) -> Any: ...
    @property
    def name(self) -> str: ...
    def is_sparse(self) -> bool:
        """Return whether the current gradient is sparse."""

class Pushed(Item):
    """A gradient in flight, possibly waiting in a bucket.

    ``gradient``: receives the average. ``ctx``: the compressor's context. ``own``: no other tensor
    has elements in its memory. Then the gradient is sent from its own memory, and a write to it
    before the wait is noticed.
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
        """Whether there was such a write. Valid after :meth:`wait`."""
    def done(self) -> bool:
        """Return whether the push has ended, successfully or not, without blocking."""
    def wait(self) -> torch.Tensor:
        """Return the sum. Raises the error that made the push fail."""

class Failed:
    """Handle of a push that could not start."""

    def __init__(self, failure: Exception) -> None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...

class Batch:
    """Bucket: gradients that one optimizer's hooks have added and that have not started yet.

    Thread-safe.

    Arguments:
    - ``begin``: starts items, as :meth:`bpsx.session.session.Session.push_pull_all` does. It takes
      the items, their GPU, a function that returns its current stream, and the stream that made
      them.
    - ``begin_alone``: takes a gradient and its names, and returns a :class:`Pushed`.
    - ``begin_here``: starts an item on the host, as
      :meth:`bpsx.session.session.Session.push_pull_known` does.
    - ``worth``: returns the bucket size in bytes at which the bucket starts.
    """

    #: Hooks may skip the checks of :meth:`bpsx.torch.exchange.Exchange.accumulated`.
    quick: bool
    def __init__(
        self,
        begin: Callable[[list[Item], int, Streams, int], None],
        begin_alone: Callable[[torch.Tensor, Any], Pushed],
        begin_here: Callable[[Item], bool],
        worth: Callable[[], int],
    ) -> None: ...
    def add(self, managed: Managed, gradient: torch.Tensor) -> None:
        """Add a dense gradient on the GPU, and set the parameter's ``pushed``.

        Raises the error of a gradient that has to start alone and cannot.
        """
    def take(self, managed: Managed, gradient: torch.Tensor) -> bool:
        """Add a dense gradient and set the parameter's ``pushed``; on the GPU as :meth:`add`.

        Returns False if the gradient needs the slow path.
        """
    def submit(self) -> None:
        """Start all gradients in the bucket.

        Raises the first failure; the wait for that gradient raises it too.
        """

class Hook:
    """Gradient hook: autograd calls it after it has added to a parameter's gradient.

    ``exchange`` and ``managed``: weak references to the arguments of ``accumulated``.
    :attr:`Batch.quick` lets the hook skip that call.
    """

    def __init__(
        self,
        exchange: ref[Any],
        managed: ref[Any],
        batch: Batch,
        accumulated: Callable[[Any, Any], None],
    ) -> None: ...
    def rival(self) -> None:
        """Note that another hook sums the same gradient."""
    def __call__(self, _: torch.Tensor) -> None: ...
