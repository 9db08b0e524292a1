from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from bpsx.plugin.adapter import Item, Streams
from bpsx.torch._gradients import Managed, Pushed

class Bucket:
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
        bucket: Bucket,
        accumulated: Callable[[Any, Any], None],
    ) -> None: ...
    def rival(self) -> None: ...
    def __call__(self, _: torch.Tensor) -> None: ...
