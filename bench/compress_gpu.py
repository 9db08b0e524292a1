"""``bench compress --gpu``: the compressors' CUDA kernels on tensors of 64 MiB of normal float32.

The peer is a copy on the device in the same run. Tensors take turns, more than the cache holds.
Time is the device's, between events around many queued calls; a kernel that waits in front of them
lets the host queue them all first. Rates are the least bytes that a kernel must read and write,
over that time; the copy's rate is made in the same way. ``topk-torch`` is how many times as long
torch.topk takes for the magnitudes of the same tensor. ``powersgd-project``, ``-back`` and
``-restore`` are the three passes over a square matrix of that size, with rank 4 and error feedback.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.jobs import progress
from bench.report import BenchError, Case, median_case
from bpsx.kernels.codecs import N_OPTIONS, N_STATE, SLACK, amount_of, codec, device_codec

_N = 16 << 20
_BYTES = 4 * _N
#: Number of tensors that take turns; calls between two events.
_MANY, _CALLS = 4, 16
_MU = 0.9
#: Rows and columns of a matrix, and columns of its factors.
_SIDE, _RANK = 4096, 4
#: Least bytes that an access at a random position costs: memory moves that much at once.
_SECTOR = 32


class Row(NamedTuple):
    """One case: its codec and options, and its target as a multiple of the copy's rate, if any.

    ``compress.py`` uses it, too, with memcpy's rate.
    """

    case: str
    compressor: str
    options: Mapping[str, Any]
    residual: bool = False
    momentum: bool = False
    decode: bool = False
    target: str | None = None


_ONEBIT, _TOPK, _RANDOMK = {"scaling": True}, {"k": 0.01}, {"k": 0.01}
_LINEAR, _NATURAL = {"k": 2}, {"k": 4, "partition": "natural"}
_TARGETS = {
    "onebit": ">= 0.6",
    "topk": ">= 0.25",
    "randomk": ">= 0.5",
    "dithering-linear": ">= 0.3",
    "dithering-natural": ">= 0.3",
}
_KINDS = (
    ("onebit", "onebit", _ONEBIT),
    ("topk", "topk", _TOPK),
    ("randomk", "randomk", _RANDOMK),
    ("dithering-linear", "dithering", _LINEAR),
    ("dithering-natural", "dithering", _NATURAL),
    ("half", "half", {}),
)
ROWS = [
    Row(
        f"{case}{name}",
        compressor,
        options,
        residual,
        momentum,
        decode,
        None if decode or (compressor == "randomk" and not residual) else _TARGETS.get(case),
    )
    for case, compressor, options in _KINDS
    for name, residual, momentum, decode in (
        ("-compress", False, False, False),
        ("-ef-compress", True, False, False),
        ("-ef-nesterov-compress", True, True, False),
        ("-decompress", False, False, True),
    )
    if compressor != "half" or not residual
]


class _Tensor:
    """A gradient, and the state that is kept with it."""

    def __init__(self, row: Row, seed: int) -> None:
        import torch

        made, self._row = codec(row.compressor), row
        numbers = made.numbers(made.options(row.options))
        self.options = [*numbers, *[0] * (N_OPTIONS - 1 - len(numbers)), 1]
        self.codec = device_codec(row.compressor)
        torch.manual_seed(seed)
        self.gradient = torch.randn(_N, device="cuda")
        self.residual = torch.zeros(_N, device="cuda") if row.residual else None
        self.momentum = torch.zeros(_N, device="cuda") if row.momentum else None
        self.wire = torch.empty(
            made.capacity(_N, numbers) + SLACK, dtype=torch.uint8, device="cuda"
        )
        self.scratch = torch.empty(
            max(1, self.codec.scratch(_N, self.options)), dtype=torch.uint8, device="cuda"
        )
        self.state, self.written = (
            torch.zeros(N_STATE, dtype=torch.float64, device="cuda"),
            torch.zeros(1, dtype=torch.int64, device="cuda"),
        )
        self.status = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.counter = 0
        self.compress()
        size = self.codec.size("float32", _N, self.options)
        self.size = int(self.written.item()) if size is None else size

    def compress(self) -> None:
        """Queue an encoding of the gradient."""
        self.counter += 1
        self.codec.encode(
            "float32",
            self.gradient,
            self.residual,
            self.momentum,
            self.wire,
            self.written,
            self.scratch,
            self.state,
            self.options,
            _N,
            self.counter,
            1.0,
            _MU,
            _stream(),
        )

    def decompress(self) -> None:
        """Queue a decoding into the gradient's memory."""
        self.codec.decode(
            "float32",
            self.wire,
            self.size,
            self.gradient,
            self.scratch,
            self.status,
            self.options,
            _N,
            False,
            _stream(),
        )

    def moved(self) -> int:
        """Return the least bytes that the kernel must read and write."""
        row, sent = (
            self._row,
            amount_of(_N, self.options) if self._row.compressor in ("topk", "randomk") else 0,
        )
        if row.decode:
            return self.size + _BYTES
        if row.compressor == "randomk" and not row.residual:
            return self.size + _SECTOR * sent
        whole = _BYTES * (1 + 2 * row.residual + 2 * row.momentum)
        # A second pass reads the first one's values again: only then is the norm known.
        if row.compressor == "dithering":
            whole += _BYTES * (2 if row.residual else 1 + row.momentum)
        return whole + self.size


class _Matrix:
    """A square gradient with its residual and its factors, and the passes over it by name."""

    def __init__(self, seed: int) -> None:
        import torch

        from bpsx.kernels.cuda.low_rank import Steps
        from bpsx.kernels.low_rank import ROWS

        torch.manual_seed(seed)
        self._tensors = [
            torch.randn(*shape, device="cuda")
            for shape in ((_SIDE, _SIDE), (_SIDE, _SIDE), *[(_RANK, _SIDE)] * 4)
        ]
        self._tensors.append(torch.empty(-(-_SIDE // ROWS) * _RANK * _SIDE, device="cuda"))
        g, e, q, p, own, sums, parts = (one.data_ptr() for one in self._tensors)
        steps = Steps("float32", True, _SIDE, _SIDE, _RANK)
        self.passes: dict[str, Callable[[], None]] = {
            "project": lambda: steps.project(_stream(), g, e, q, p),
            "back": lambda: steps.project_back(_stream(), g, e, p, parts, own),
            "restore": lambda: steps.restore(_stream(), g, e, p, sums, own, g, False),
        }


def _matrices(turns: int, only: str, whole: float) -> list[Case]:
    """Return the cases of PowerSGD's passes. ``whole``: the copy's rate in GB/s."""
    cases = []
    for name, times in (("project", 2), ("back", 2), ("restore", 4)):
        if only not in (case := f"powersgd-{name}"):
            continue
        progress(case)
        seconds, host = _seconds([_Matrix(seed).passes[name] for seed in range(_MANY)], turns)
        moved = times * _BYTES
        note = f"{1e6 * statistics.median(seconds):.1f} us for {moved / 1e6:.0f} MB, host"
        note += f" {1e6 * host:.0f} us; copy"
        rates = [moved / s / 1e9 for s in seconds]
        cases.append(median_case(case, rates, "GB/s", peer=whole, target=">= 0.3", note=note))
    return cases


def run(quick: bool, only: str) -> list[Case]:
    """Return all cases whose name contains ``only``. Raises :class:`BenchError` without a GPU."""
    try:
        import torch
    except ImportError as e:
        raise BenchError(f"--gpu needs PyTorch: {e}") from e
    if not torch.cuda.is_available():
        raise BenchError("--gpu: PyTorch sees no GPU")
    turns = 3 if quick else 9
    copied = _copies(turns)
    whole = statistics.median(copied)
    cases = [
        median_case(
            "copy",
            copied,
            "GB/s",
            note=(
                f"{torch.cuda.get_device_name()}; {_MANY} tensors of {_BYTES:,} B in turn, read and"
                " written"
            ),
        )
    ]
    for row in (row for row in ROWS if only in row.case):
        progress(row.case)
        tensors = [_Tensor(row, seed) for seed in range(_MANY)]
        seconds, host = _seconds(
            [t.decompress if row.decode else t.compress for t in tensors], turns
        )
        if row.decode and int(tensors[0].status.item()) != 0:
            raise BenchError("a codec rejects its own encoded bytes")
        moved = tensors[0].moved()
        cases.append(
            median_case(
                row.case,
                [moved / s / 1e9 for s in seconds],
                "GB/s",
                peer=whole,
                target=row.target,
                note=(
                    f"{1e6 * statistics.median(seconds):.1f} us for {moved / 1e6:.0f} MB, host"
                    f" {1e6 * host:.0f} us; copy"
                ),
            )
        )
        if row.case == "topk-compress":
            cases.append(_against_torch(tensors, statistics.median(seconds), turns))
    return cases + _matrices(turns, only, whole)


def _against_torch(tensors: list[_Tensor], ours: float, turns: int) -> Case:
    import torch

    count = amount_of(_N, tensors[0].options)
    seconds, _ = _seconds([lambda t=t: torch.topk(t.gradient.abs(), count) for t in tensors], turns)  # type: ignore[misc]
    note = f"torch.topk(abs): {1e6 * statistics.median(seconds):.0f} us"
    return median_case("topk-torch", [s / ours for s in seconds], "x", target="> 1", note=note)


def _stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def _copies(turns: int) -> list[float]:
    import torch

    pairs = [(torch.empty(_N, device="cuda"), torch.randn(_N, device="cuda")) for _ in range(_MANY)]
    seconds, _ = _seconds([lambda to=to, of=of: to.copy_(of) for to, of in pairs], turns)  # type: ignore[misc]
    return [2 * _BYTES / s / 1e9 for s in seconds]


def _seconds(calls: list[Callable[[], object]], turns: int) -> tuple[list[float], float]:
    """Return the device's seconds of one call in each turn, and the host's seconds to queue one."""
    import torch

    found, host, in_turn = [], [], itertools.cycle(calls)
    for turn in range(turns + 1):
        torch.cuda.synchronize()
        torch.cuda._sleep(60_000_000)  # cycles: tens of milliseconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = time.perf_counter()
        begin.record()
        for _ in range(_CALLS):
            next(in_turn)()
        end.record()
        queued = time.perf_counter() - before
        torch.cuda.synchronize()
        if turn:
            found.append(begin.elapsed_time(end) / 1e3 / _CALLS)
            host.append(queued / _CALLS)
    return found, statistics.median(host)
