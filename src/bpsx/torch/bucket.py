"""Start of gradient exchanges, one by one or in buckets."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bpsx.plugin import adapter
from bpsx.plugin.adapter import Item, Streams
from bpsx.session.refusals import counted
from bpsx.torch._bucket import Bucket
from bpsx.torch._gradients import Pushed, is_shared
from bpsx.torch.compression import Compressor, NoneCompressor
from bpsx.torch.ops import Handle
from bpsx.torch.profiling import followed, followed_together, profiled
from bpsx.torch.submit import submit
from bpsx.torch.tensors import check_tensor, check_writable


class GradientInfo(NamedTuple):
    """Names of a gradient, on the wire and in messages. A larger ``priority`` goes first."""

    wire: str
    what: str
    priority: int


@counted("gradient", argument="info")
def push(
    gradient: torch.Tensor,
    info: GradientInfo,
    average: bool,
    compression: type[Compressor] = NoneCompressor,
    rate: float = -1.0,
) -> Pushed:
    """Begin to sum a gradient over all workers.

    Raises as :func:`bpsx.torch.submit.submit`, and :class:`UnsupportedTensor` for a tensor that
    cannot hold a result.
    """
    check_tensor(gradient, info.what)
    check_writable(gradient, info.what)
    own = not is_shared(gradient)
    # our own tensor object: `grad.data` may be set to other memory meanwhile
    plain = gradient.detach()
    wire, ctx = compression.compress(plain if own else plain.clone())

    def begin() -> Handle:
        return submit(wire, wire, info.wire, average=average, priority=info.priority, rate=rate)

    return Pushed(
        gradient, ctx, own, followed(info.wire, gradient, begin) if profiled() else begin()
    )


def bucket_of(average: bool) -> Bucket:
    """Create the bucket of one optimizer.

    ``average``: average gradients over the workers instead of summing them.
    """

    def begin(items: list[Item], gpu: int, streams: Streams, stream: int) -> None:
        def begin_all() -> None:
            adapter.session().push_pull_all(items, gpu, streams, stream, average=average)

        if profiled():
            followed_together(items, begin_all)
        else:
            begin_all()

    def begin_alone(gradient: torch.Tensor, info: GradientInfo) -> Pushed:
        return push(gradient, info, average)

    def begin_here(item: Item) -> bool:
        return not profiled() and adapter.session().push_pull_known(item, average)

    return Bucket(begin, begin_alone, begin_here, lambda: adapter.session().devices.batch_bytes)
