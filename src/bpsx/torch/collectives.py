"""Collectives of ``torch.distributed``, built from a sum and a broadcast over all workers.

Every function begins its collective and returns at once, except :func:`all_to_all`, which first
exchanges sizes. Tensors travel as one dimension. So shapes with the same number of elements match,
as elsewhere in ``torch.distributed``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bpsx.dtypes import BY_NAME
from bpsx.errors import BpsxError, ConfigError, MismatchError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root, padded_length
from bpsx.torch.all_gather import all_gather_async
from bpsx.torch.submit import submit
from bpsx.torch.tensors import (
    bytes_view,
    check_tensor,
    check_writable,
    dtype_name,
    is_plain,
    mark_written,
    plain_copy,
)
from bpsx.torch.work import Collective

_Op = dist.ReduceOp
_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    _Op.SUM: torch.add,
    _Op.AVG: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}


class UnsupportedCollective(BpsxError, RuntimeError):
    """The backend "bpsx" does not support this collective, reduction or group of workers.

    The message says what to use instead.
    """


class Group:
    """The workers of a process group: all of the job's, or this one alone.

    ``name``: prefix of the wire names.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size

    def all_reduce(
        self, tensor: torch.Tensor, op: Any, verb: str = "all_reduce", will_wait: bool = False
    ) -> Collective:
        """Replace ``tensor`` by its reduction over all workers.

        The servers compute sums; for other reductions every worker gathers the tensors and reduces
        them.
        """
        stage, home = self._in_place(tensor, verb)
        begun = self.reduce_into(stage, stage, op, verb, will_wait)
        if home is not None:
            begun.finish.append(home)
        mark_written(tensor)
        return begun

    def reduce_into(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        op: Any,
        verb: str,
        will_wait: bool = False,
    ) -> Collective:
        """Reduce ``source`` into ``output``.

        Both are flat, plain and of the same dtype and length, or the same tensor.
        """
        kind = _check_reduction(op, source.dtype, verb)
        if self.size == 1:
            return Collective(finish=lambda: output.copy_(source))
        if source.dtype.is_complex and kind in (_Op.SUM, _Op.AVG):
            source, output = (
                torch.view_as_real(source).view(-1),
                torch.view_as_real(output).view(-1),
            )
        if kind in (_Op.SUM, _Op.AVG) and dtype_name(source) in BY_NAME:
            return Collective(
                [
                    submit(
                        source,
                        output,
                        f"{self.name}.{verb}",
                        average=kind == _Op.AVG,
                        will_wait=will_wait,
                    )
                ]
            )
        parts = [torch.empty_like(source) for _ in range(self.size)]
        gathering = all_gather_async(parts, source, f"{self.name}.{verb}.gather")
        return Collective([gathering], lambda: output.copy_(_reduced(parts, kind)))

    def broadcast(self, tensor: torch.Tensor, root: int, verb: str = "broadcast") -> Collective:
        """Overwrite ``tensor`` with worker ``root``'s."""
        checked_root(root, verb, self.size)
        stage, home = self._in_place(tensor, verb, read=root == self.rank)
        mark_written(tensor)
        return self._broadcast(
            stage, root, verb, home if root != self.rank else None, f"{verb} from worker {root}"
        )

    def _broadcast(
        self,
        stage: torch.Tensor,
        root: int,
        wire: str,
        finish: Callable[[], object] | None,
        what: str,
    ) -> Collective:
        """Broadcast worker ``root``'s ``stage``, which is flat and plain.

        ``wire``: name on the wire. ``what``: name in errors.
        """
        begun = Collective()
        if self.size > 1:
            sent = stage
            if stage.dtype is torch.uint8:
                sent = _packed(stage if root == self.rank else None, stage.numel())
                begun.finish.append(functools.partial(_unpack, sent, stage, what))
            begun.handles.append(
                adapter.session().broadcast(f"{self.name}.{wire}", bytes_view(sent), root)
            )
        if finish is not None:
            begun.finish.append(finish)
        return begun

    def all_gather(
        self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, verb: str = "all_gather"
    ) -> Collective:
        """Fill ``outputs[r]`` with worker r's ``mine``.

        Lengths may differ between workers, if all workers know them.
        """
        self._check_parts(outputs, mine, verb)
        check_tensor(mine, f"{verb}: the input")
        stages = [
            self._in_place(output, f"{verb}: output {r}", read=False)
            for r, output in enumerate(outputs)
        ]
        for output in outputs:
            mark_written(output)
        stages[self.rank][0].copy_(plain_copy(mine).view(-1))
        begun = Collective()
        for r, (stage, home) in enumerate(stages):
            begun.add(self._broadcast(stage, r, f"{verb}.{r}", home, f"{verb}: worker {r}"))
        return begun

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor) -> Collective:
        """Fill ``output`` with all workers' ``mine``, one after the other."""
        if output.numel() != self.size * mine.numel():
            raise ConfigError(
                f"all_gather: the output has {output.numel()} elements; expected {self.size}"
                f" workers x {mine.numel()}"
            )
        stage, home = self._in_place(output, "all_gather", read=False)
        begun = self.all_gather(_equal_parts(stage, self.size), mine)
        if home is not None:
            begun.finish.append(home)
        mark_written(output)
        return begun

    def gather(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, root: int) -> Collective:
        """Fill ``outputs[r]`` on worker ``root`` with worker r's ``mine``.

        The bytes reach all workers, because it uses broadcasts.
        """
        checked_root(root, "gather", self.size)
        if root != self.rank:
            outputs = [
                torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
                for _ in range(self.size)
            ]
        return self.all_gather(outputs, mine, "gather")

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int
    ) -> Collective:
        """Overwrite ``output`` with worker ``root``'s ``inputs[rank]``."""
        checked_root(root, "scatter", self.size)
        check_tensor(output, "scatter: the output")
        everything = torch.empty(
            self.size * output.numel(), dtype=output.dtype, device=output.device
        )
        mine = _equal_parts(everything, self.size)
        if root == self.rank:
            self._check_parts(inputs, output, "scatter", equal=True)
            for part, given in zip(mine, inputs):
                part.copy_(plain_copy(given).view(-1))
        target, home = self._in_place(output, "scatter", read=False)
        begun = self._broadcast(
            everything,
            root,
            "scatter",
            lambda: target.copy_(mine[self.rank]),
            f"scatter from worker {root}",
        )
        if home is not None:
            begun.finish.append(home)
        mark_written(output)
        return begun

    def reduce(self, tensor: torch.Tensor, root: int, op: Any) -> Collective:
        """Replace ``tensor`` on worker ``root`` by the reduction over all workers.

        On other workers ``tensor`` is unchanged.
        """
        checked_root(root, "reduce", self.size)
        if root == self.rank:
            return self.all_reduce(tensor, op, "reduce")
        stage, _ = self._in_place(tensor, "reduce")
        return self.reduce_into(stage, torch.empty_like(stage), op, "reduce")

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any
    ) -> Collective:
        """Reduce every worker's ``inputs[r]`` and give the result to worker r.

        Lengths may differ by r, if all workers agree on them.
        """
        self._check_parts(inputs, output, "reduce_scatter")
        for r, given in enumerate(inputs):
            check_tensor(given, f"reduce_scatter: input {r}")
        everything = torch.cat([plain_copy(given).view(-1) for given in inputs])
        begin = sum(given.numel() for given in inputs[: self.rank])
        return self._keep_own(output, everything, begin, op)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, op: Any
    ) -> Collective:
        """Same as :meth:`reduce_scatter`, with the inputs one after the other in ``given``."""
        check_tensor(given, "reduce_scatter: the input")
        if given.numel() != self.size * output.numel() or given.dtype != output.dtype:
            raise ConfigError(
                f"reduce_scatter: the input is {given.numel()} x {dtype_name(given)}; expected"
                f" {self.size} workers x {output.numel()} {dtype_name(output)}"
            )
        return self._keep_own(output, plain_copy(given).view(-1), self.rank * output.numel(), op)

    def _keep_own(
        self, output: torch.Tensor, everything: torch.Tensor, begin: int, op: Any
    ) -> Collective:
        target, home = self._in_place(output, "reduce_scatter", read=False)
        result = torch.empty_like(everything)
        begun = self.reduce_into(everything, result, op, "reduce_scatter")
        begun.finish.append(lambda: target.copy_(result[begin : begin + target.numel()]))
        if home is not None:
            begun.finish.append(home)
        mark_written(output)
        return begun

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Collective:
        """Send ``inputs[r]`` to worker r, and receive ``outputs[r]`` from worker r.

        Lengths may differ. All bytes reach all workers, each of which keeps its own part. Blocks
        until all workers have exchanged their lengths.
        """
        for name, tensors in (("input", inputs), ("output", outputs)):
            if len(tensors) != self.size:
                raise ConfigError(
                    f"all_to_all: got {len(tensors)} {name}s; expected one for each of the"
                    f" {self.size} workers"
                )
            for r, tensor in enumerate(tensors):
                check_tensor(tensor, f"all_to_all: {name} {r}")
                if tensor.dtype != inputs[0].dtype:
                    raise ConfigError(
                        f"all_to_all: {name} {r} is {dtype_name(tensor)}, but input 0 is"
                        f" {dtype_name(inputs[0])}; dtypes must be equal"
                    )
        lengths = self._lengths([t.numel() for t in inputs])
        homes = []
        for r, output in enumerate(outputs):
            if lengths[r][self.rank] != output.numel():
                raise ConfigError(
                    f"all_to_all: output {r} has {output.numel()} elements, but worker {r} sends"
                    f" {lengths[r][self.rank]} to it"
                )
            check_writable(output, f"all_to_all: output {r}")
            mark_written(output)
        stages = [
            torch.empty(sum(row), dtype=inputs[0].dtype, device=inputs[0].device) for row in lengths
        ]
        stages[self.rank] = torch.cat([plain_copy(t).view(-1) for t in inputs])
        for stage, row, output in zip(stages, lengths, outputs):
            part = stage.split(row)[self.rank]
            homes.append(functools.partial(_copy_home, output, part))
        handles = (
            [all_gather_async(stages, stages[self.rank], f"{self.name}.all_to_all")]
            if self.size > 1
            else []
        )
        return Collective(handles, lambda: [home() for home in homes])

    def _lengths(self, mine: list[int]) -> list[list[int]]:
        """Return every worker's row of lengths."""
        rows = [torch.tensor(mine, device="cpu") for _ in range(self.size)]
        if self.size > 1:
            all_gather_async(rows, rows[self.rank], f"{self.name}.lengths").wait()
        return [row.tolist() for row in rows]

    def barrier(self) -> Collective:
        """Begin a collective that ends when every worker has begun it."""
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return self.reduce_into(nothing, nothing, _Op.SUM, "barrier", will_wait=True)

    def _check_parts(
        self, parts: Sequence[torch.Tensor], mine: torch.Tensor, verb: str, equal: bool = False
    ) -> None:
        """Raise :class:`ConfigError` unless ``parts`` has a matching tensor for each worker.

        All must have the dtype of ``mine``. This worker's part must have its length; with ``equal``
        all parts must.
        """
        if len(parts) != self.size:
            raise ConfigError(
                f"{verb}: got {len(parts)} tensors for {self.size} workers; expected one for each"
            )
        for r, part in enumerate(parts):
            if part.dtype != mine.dtype or (
                (r == self.rank or equal) and part.numel() != mine.numel()
            ):
                raise ConfigError(
                    f"{verb}: tensor {r} is {part.numel()} x {dtype_name(part)}, but this worker's"
                    f" own is {mine.numel()} x {dtype_name(mine)}; length and dtype must be equal"
                )

    @staticmethod
    def _in_place(
        tensor: torch.Tensor, what: str, read: bool = True
    ) -> tuple[torch.Tensor, Callable[[], object] | None]:
        """Return a flat tensor to send from and receive into, and a function that copies it back.

        If ``tensor`` is plain, that is its own memory, and the function is None. Otherwise it is a
        staging tensor, filled from ``tensor`` if ``read``.
        """
        check_tensor(tensor, what)
        check_writable(tensor, what)
        detached = tensor.detach()
        if is_plain(detached):
            return detached.view(-1), None
        stage = (
            plain_copy(tensor).view(-1)
            if read
            else torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        )
        return stage, functools.partial(_copy_home, tensor, stage)


#: Bytes of the length at the end of packed memory.
_LENGTH = 8


def _packed(stage: torch.Tensor | None, length: int) -> torch.Tensor:
    """Return memory for ``length`` bytes to travel in, padded, with the length at the end.

    ``stage``: the bytes, on the worker that has them; None elsewhere. PyTorch's object collectives
    send bytes, of a different length each time, and names are never forgotten. So lengths are
    rounded up to a capacity from a short series.
    """
    whole = torch.zeros(padded_length(length) + _LENGTH, dtype=torch.uint8, device="cpu")
    if stage is not None:
        whole[:length] = stage
        whole[-_LENGTH:] = torch.frombuffer(
            bytearray(length.to_bytes(_LENGTH, "little")), dtype=torch.uint8
        )
    return whole


def _unpack(whole: torch.Tensor, stage: torch.Tensor, what: str) -> None:
    """Copy the received bytes to ``stage``.

    Raises :class:`~bpsx.errors.MismatchError` if their number is not the length of ``stage``.
    """
    length = int.from_bytes(whole[-_LENGTH:].tolist(), "little")
    if length != stage.numel():
        raise MismatchError(
            f"{what}: received {length} bytes, expected {stage.numel()}; workers must agree on"
            " lengths"
        )
    stage.copy_(whole[:length])


def _copy_home(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.detach().copy_(flat.view(tensor.shape))


def _equal_parts(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    length = flat.numel() // count
    return [flat[i * length : (i + 1) * length] for i in range(count)]


def _reduced(parts: list[torch.Tensor], kind: Any) -> torch.Tensor:
    """Reduce the parts in the order of ranks, so that all workers get bitwise the same result."""
    total = functools.reduce(_REDUCTIONS[kind], parts)
    if kind != _Op.AVG:
        return total
    return (
        total / len(parts)
        if total.dtype.is_floating_point
        else torch.div(total, len(parts), rounding_mode="floor")
    )


def _check_reduction(op: Any, dtype: torch.dtype, verb: str) -> Any:
    """Return ``op`` as one of the plain reductions.

    Raises :class:`UnsupportedCollective`, before any other worker waits for this one.
    """
    kind = next((known for known in _REDUCTIONS if op == known), None)
    if kind is None:
        raise UnsupportedCollective(
            f'{verb}: the backend "bpsx" does not support {_name_of(op)}; scale the tensor before'
            ' a SUM, or use a group with backend="gloo"'
        )
    if kind == _Op.AVG and dtype == torch.bool:
        raise UnsupportedCollective(
            f"{verb}: bool has no average; use SUM (which is OR), MIN or MAX"
        )
    try:
        _REDUCTIONS[kind](
            torch.empty(0, dtype=dtype, device="cpu"), torch.empty(0, dtype=dtype, device="cpu")
        )
    except (RuntimeError, TypeError) as e:
        if (
            kind not in (_Op.SUM, _Op.AVG)
            or dtype_name(torch.empty(0, dtype=dtype, device="cpu")) not in BY_NAME
        ):
            raise UnsupportedCollective(
                f"{verb}: PyTorch does not support {_name_of(op)} of"
                f" {str(dtype).removeprefix('torch.')}: {e}"
            ) from e
    return kind


def _name_of(op: Any) -> str:
    known = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    return next((name for name in known if op == getattr(_Op, name, None)), str(op))
