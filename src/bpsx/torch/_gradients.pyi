from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from bpsx.plugin.adapter import Item, Streams

#: Test hook: if set, all memory counts as the first GPU's. It is called for each gradient with the
#: address, the size in bytes and PyTorch's storage.
ALL_ON_GPU: Callable[[int, int, Any], None] | None

def is_dense_on_gpu(tensor: torch.Tensor) -> bool: ...
def is_shared(gradient: torch.Tensor) -> bool: ...
def is_alone(tensor: torch.Tensor) -> bool: ...
def version(tensor: torch.Tensor) -> int | None: ...

class Managed:
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
    def is_sparse(self) -> bool: ...

class Pushed(Item):
    def __init__(self, gradient: torch.Tensor, ctx: Any, own: bool, handle: Any) -> None: ...
    @property
    def gradient(self) -> torch.Tensor: ...
    @property
    def ctx(self) -> Any: ...
    @property
    def own(self) -> bool: ...
    @property
    def written(self) -> bool: ...
    def done(self) -> bool: ...
    def wait(self) -> torch.Tensor: ...

class Failed:
    def __init__(self, failure: Exception) -> None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...

class Batch:
    #: Hooks may skip the checks of :meth:`bpsx.torch.exchange.Exchange.accumulated`.
    quick: bool
    def __init__(
        self,
        begin: Callable[[list[Item], int, Streams, int], None],
        begin_alone: Callable[[torch.Tensor, Any], Pushed],
        begin_here: Callable[[Item], bool],
        worth: Callable[[], int],
    ) -> None: ...
    def add(self, managed: Managed, gradient: torch.Tensor) -> None: ...
    def take(self, managed: Managed, gradient: torch.Tensor) -> bool: ...
    def submit(self) -> None: ...

class Hook:
    def __init__(
        self,
        exchange: ref[Any],
        managed: ref[Any],
        batch: Batch,
        accumulated: Callable[[Any, Any], None],
    ) -> None: ...
    def rival(self) -> None: ...
    def __call__(self, _: torch.Tensor) -> None: ...
