"""How gradients begin their way."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bpsx import _adapter
from bpsx._adapter import Item, Streams
from bpsx.torch._gradients import Batch, Pushed, is_shared
from bpsx.torch.compression import Compressor, NoneCompressor
from bpsx.torch.ops import check_tensor, check_writable, submit


class Named(NamedTuple):
    """What a gradient is called: on the wire, and in messages. Larger ``priority`` goes first."""

    wire: str
    what: str
    priority: int


def push(gradient: torch.Tensor, named: Named, average: bool, compression: type[Compressor] = NoneCompressor, rate: float = -1.0) -> Pushed:
    """Begin to sum a gradient over all workers. Raises as :func:`bpsx.torch.ops.submit`, and for a tensor that cannot hold a result."""
    check_tensor(gradient, named.what)
    check_writable(gradient, named.what)
    own = not is_shared(gradient)
    plain = gradient.detach()       # ours: `grad.data` may be set to other memory meanwhile
    wire, ctx = compression.compress(plain if own else plain.clone())
    return Pushed(gradient, ctx, own, submit(wire, wire, named.wire, average=average, priority=named.priority, rate=rate))


def batch_of(average: bool) -> Batch:
    """For one optimizer. ``average``: whether gradients become averages, or sums."""
    def begin(items: list[Item], gpu: int, streams: Streams, stream: int) -> None:
        _adapter.session().push_pull_all(items, gpu, streams, stream, average=average)

    def begin_alone(gradient: torch.Tensor, named: Named) -> Pushed:
        return push(gradient, named, average)

    return Batch(begin, begin_alone, lambda: _adapter.session().devices.batch_bytes)
