"""What all workers hold, on every worker: one broadcast per worker, all under way at once.

Each worker's bytes leave it once and come home on every worker once, which is the least that can be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from bpsx import _adapter
from bpsx.torch.broadcast import bytes_view
from bpsx.torch.ops import Handle, is_plain, mark_written


class Gathering:
    """An all_gather under way; a :class:`~bpsx.torch.ops.Handle` whose result is the list of tensors, by rank."""

    def __init__(self, handles: list[Handle], outputs: Sequence[torch.Tensor], stages: Sequence[torch.Tensor]) -> None:
        self._handles, self._outputs, self._stages = handles, outputs, stages

    def done(self) -> bool:
        """Whether all parts have ended, well or not. Does not block."""
        return all(h.done() for h in self._handles)

    def wait(self, timeout: float | None = None) -> Sequence[torch.Tensor]:
        """The tensors, by rank. Raises what made the first part fail, or :class:`TimeoutError` after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        for handle in self._handles:
            handle.wait(None if end is None else max(0.0, end - time.monotonic()))
        for output, stage in zip(self._outputs, self._stages, strict=True):
            if stage is not output:
                with torch.no_grad():
                    output.detach().copy_(stage)
        return self._outputs


def all_gather_async(outputs: Sequence[torch.Tensor], mine: torch.Tensor, name: str) -> Gathering:
    """Begin to fill ``outputs[r]`` with worker r's ``mine``: dense CPU tensors of one shape and any dtype, ``size()`` of them.

    ``mine`` may be ``outputs[rank()]``; it is copied otherwise, and may change at once. On the wire the parts are called ``name.0``, ``name.1``, …
    Workers must agree on name, shape and dtype; calls of one name are matched in order.
    """
    ours = _adapter.session()
    stages = [o if is_plain(o) else torch.empty(o.shape, dtype=o.dtype) for o in outputs]
    if mine is not stages[ours.rank]:
        with torch.no_grad():
            stages[ours.rank].detach().copy_(mine)
    handles: list[Handle] = [ours.broadcast(f"{name}.{root}", bytes_view(stage), root) for root, stage in enumerate(stages)]
    for output in outputs:
        mark_written(output)
    return Gathering(handles, outputs, stages)
