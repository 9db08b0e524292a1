"""all_gather: one broadcast per worker, all in flight at once.

Each worker's bytes leave it once and arrive once on every worker, which is the minimum. Where the
number of rows differs, the numbers travel first. Then rows follow, padded to a capacity. So a name
has few shapes instead of one for every number of rows.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from bpsx.api.staged import Handle
from bpsx.errors import MismatchError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import check_name, padded_length
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import public_methods
from bpsx.torch.dense import push_pull_dense
from bpsx.torch.dynamo import eager
from bpsx.torch.tensors import (
    bytes_view,
    check_rows,
    check_tensor,
    dtype_name,
    is_plain,
    mark_written,
    unnamed,
)

#: Bytes of the header that workers exchange about their rows, and bytes of the row count at its
#: start. The rest is a description that must be the same on all workers.
_HEADER, _COUNT = 192, 8


@public_methods
class AllGatherHandle:
    """An all_gather in flight.

    It is a :class:`~bpsx.torch.ops.Handle` whose result is the list of tensors, by rank.
    """

    def __init__(
        self, handles: list[Handle], outputs: Sequence[torch.Tensor], stages: Sequence[torch.Tensor]
    ) -> None:
        self._handles, self._outputs, self._stages = handles, outputs, stages

    def done(self) -> bool:
        """Return whether all parts have ended, successfully or not, without blocking."""
        return all(h.done() for h in self._handles)

    def wait(self, timeout: float | None = None) -> Sequence[torch.Tensor]:
        """Return the tensors, by rank.

        Raises the error that made the first part fail, or :class:`TimeoutError` after ``timeout``
        seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for handle in self._handles:
            handle.wait(None if end is None else max(0.0, end - time.monotonic()))
        for output, stage in zip(self._outputs, self._stages, strict=True):
            if stage is not output:
                with torch.no_grad():
                    output.detach().copy_(stage)
        return self._outputs


def all_gather_async(
    outputs: Sequence[torch.Tensor], mine: torch.Tensor, name: str, needs_all: bool = True
) -> AllGatherHandle:
    """Begin to fill ``outputs[r]`` with worker r's ``mine``.

    ``outputs``: ``size()`` dense tensors of one shape and any dtype. ``mine``: a tensor of that
    shape and dtype, which may be ``outputs[rank()]``. Any other tensor is copied, and may change at
    once. ``name``: the parts' wire names are ``name.0``, ``name.1``, … Workers must agree on name,
    shape and dtype; calls of one name are matched in order. ``needs_all``: the script cannot go on
    without any of the workers.
    """
    ours = adapter.session()
    if needs_all:
        ours.require_all("all_gather")
    stages = [
        o if is_plain(o) else torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outputs
    ]
    if mine is not stages[ours.rank]:
        with torch.no_grad():
            stages[ours.rank].detach().copy_(mine)
    handles: list[Handle] = [
        ours.broadcast(f"{name}.{root}", bytes_view(stage), root)
        for root, stage in enumerate(stages)
    ]
    for output in outputs:
        mark_written(output)
    return AllGatherHandle(handles, outputs, stages)


def _gather_headers(count: int, kind: str, name: str, needs_all: bool = True) -> AllGatherHandle:
    header = _header(count, kind)
    outputs = [torch.empty_like(header) for _ in range(adapter.session().size)]
    return all_gather_async(outputs, header, name, needs_all)


def check_alike(kind: str, name: str, what: str) -> None:
    """Raise :class:`~bpsx.errors.MismatchError` on all workers unless ``kind`` is the same on all.

    ``name``: wire name of the exchange. ``what``: start of the error's message.
    """
    told = [_read(h)[1] for h in _gather_headers(0, kind, name, needs_all=False).wait()]
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise MismatchError(f"{what}: worker 0 has {told[0]}, worker {rank} has {theirs}")


class RowGathering:
    """An all_gather of rows in flight.

    It consists of two exchanges, one after the other. :meth:`advance` starts the second;
    :meth:`done` does so once the first has ended.

    ``tensors``: dense CPU tensors with the same length of dimension 0 within a worker. Apart from
    that length, workers must agree on shapes and dtypes. ``kind``: text that must be the same on
    all workers as well. Raises :class:`~bpsx.torch.UnsupportedTensor`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], name: str, kind: str = "") -> None:
        adapter.session().require_all("all_gather")
        self._name = name
        self._mine = [t.detach() for t in tensors]
        for tensor in self._mine:
            check_tensor(tensor, f"all_gather of {name!r}")
        trailing = ", ".join(
            f"{dtype_name(t)} rows of shape {tuple(t.shape[1:])}" for t in self._mine
        )
        self._headers = _gather_headers(
            len(self._mine[0]), f"{kind} {trailing}".strip(), f"{name}.counts"
        )
        self._counts: list[int] = []
        self._failure: Exception | None = None
        self._stages: list[list[torch.Tensor]] = []  # by tensor, by worker
        self._handles: list[Handle] = []

    def done(self) -> bool:
        """Return whether both exchanges have ended, successfully or not, without blocking.

        Starts the second exchange if the first has ended.
        """
        if self._headers.done():
            self.advance()
        return (
            self._failure is not None or bool(self._counts) and all(h.done() for h in self._handles)
        )

    def advance(self) -> None:
        """Wait for the numbers of rows and start to move the rows.

        :meth:`wait` raises the failure, if any.
        """
        if self._counts or self._failure is not None:
            return
        try:
            self._counts = self._agreed([_read(h) for h in self._headers.wait()])
            for i, mine in enumerate(self._mine):
                self._stages.append(
                    [
                        self._begin(mine, f"{self._name}.{i}.{root}", root)
                        for root in range(len(self._counts))
                    ]
                )
        except Exception as e:
            if not self._headers.done():  # only the wait has been interrupted
                raise
            self._failure = e

    def wait(self) -> list[list[torch.Tensor]]:
        """Return for each tensor the workers' rows, by rank.

        Raises :class:`~bpsx.errors.MismatchError` on all workers if anything but the number of rows
        differs.
        """
        self.advance()
        if self._failure is not None:
            raise self._failure
        for handle in self._handles:
            handle.wait()
        return [
            [stage[:n] for stage, n in zip(stages, self._counts, strict=True)]
            for stages in self._stages
        ]

    def _agreed(self, told: list[tuple[int, str]]) -> list[int]:
        for rank, (_, kind) in enumerate(told):
            if kind != told[0][1]:
                raise MismatchError(
                    f"{self._name!r}: worker 0 gave {told[0][1]}, worker {rank} gave {kind}; only"
                    " the number of rows may differ"
                )
        return [n for n, _ in told]

    def _begin(self, mine: torch.Tensor, name: str, root: int) -> torch.Tensor:
        n = self._counts[root]
        stage = torch.empty(
            (padded_length(n), *mine.shape[1:]), dtype=mine.dtype, device=mine.device
        )
        ours = adapter.session()
        if root == ours.rank:
            with torch.no_grad():
                stage[:n].copy_(mine)
                # Do not send the contents of uninitialized memory. Zeroed as bytes: PyTorch before
                # 2.3 cannot fill 8-bit floats.
                stage[n:].view(torch.uint8).zero_()
        if n:
            self._handles.append(ours.broadcast(name, bytes_view(stage), root))
        return stage


def _header(count: int, kind: str) -> torch.Tensor:
    text = kind.encode()
    if len(text) > _HEADER - _COUNT:
        text = text[:100] + b"... " + hashlib.sha256(text).hexdigest().encode()
    return torch.frombuffer(
        bytearray(count.to_bytes(_COUNT, "little") + text.ljust(_HEADER - _COUNT, b"\0")),
        dtype=torch.uint8,
    )


def _read(header: torch.Tensor) -> tuple[int, str]:
    raw = header.numpy().tobytes()
    return int.from_bytes(raw[:_COUNT], "little"), raw[_COUNT:].rstrip(b"\0").decode(
        errors="replace"
    )


#: For the backward pass, which autograd calls: no verb is around it.
_push_pull_gradient = eager(counted("push_pull")(push_pull_dense))


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    """See :func:`all_gather`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, average: bool) -> torch.Tensor:
        """Return all workers' rows."""
        (parts,) = RowGathering([tensor], name).wait()
        begins = [0, *itertools.accumulate(len(p) for p in parts)]
        rank = adapter.session().rank
        ctx.name, ctx.average, ctx.mine = name, average, slice(begins[rank], begins[rank + 1])
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return this worker's rows of the gradient's sum or average over workers."""
        padding = gradient.new_zeros(
            (padded_length(len(gradient)) - len(gradient), *gradient.shape[1:])
        )
        return (
            _push_pull_gradient(
                torch.cat([gradient, padding]), average=ctx.average, name=f"{ctx.name}.grad"
            )[ctx.mine],
            None,
            None,
        )


@eager
@counted("all_gather", several=True)
def all_gather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the rows of all workers' ``tensor``, in the order of ranks, as a new tensor.

    ``tensor``: dense, on the CPU, of any dtype, with at least one dimension. Workers may have
    different numbers of rows (lengths of dimension 0), including none. They must agree on the other
    dimensions, the dtype and ``name``. Calls without a name are matched by row shape and dtype, in
    the order in which each worker makes them.

    Differentiable (floating point). Every worker's loss counts, so backward sums the gradients of
    all workers and keeps this worker's rows. Either all workers run it or none.

    Raises :class:`~bpsx.errors.MismatchError` on all workers if rows differ in shape or dtype,
    :class:`UnsupportedTensor`, :class:`~bpsx.errors.ConfigError`, and as
    :func:`bpsx.torch.synchronize`.
    """
    check_name(name, "all_gather")
    check_tensor(tensor, f"all_gather of {name!r}" if name else "all_gather")
    check_rows(tensor, "all_gather")
    return gathered_rows(tensor, name or unnamed("all_gather", tensor, rows=True))


def gathered_rows(tensor: torch.Tensor, name: str, average: bool = False) -> torch.Tensor:
    """Same as :func:`all_gather`, with checked arguments.

    ``average``: backward averages the gradients instead of summing them.
    """
    result: torch.Tensor = _AllGather.apply(tensor, name, average)
    return result
