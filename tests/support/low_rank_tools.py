"""PowerSGD's steps, called in memory as the core calls them, and random matrices."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator

import numpy as np

from bpsx.kernels.low_rank import CHUNK, load_steps, scratch_bytes, wide_of
from bpsx.kernels.reference import bfloat16_to_float32, float32_to_bfloat16

_POINTER, _NUMBER = C.c_void_p, C.c_int64
_KINDS = {
    "project": C.CFUNCTYPE(None, *[_POINTER] * 5, *[_NUMBER] * 6),
    "project_back": C.CFUNCTYPE(None, *[_POINTER] * 5, *[_NUMBER] * 6),
    "restore": C.CFUNCTYPE(None, *[_POINTER] * 7, *[_NUMBER] * 7),
    "orthogonalise": C.CFUNCTYPE(None, _POINTER, *[_NUMBER] * 2),
    "refresh": C.CFUNCTYPE(_NUMBER, *[_POINTER] * 2, *[_NUMBER] * 3, C.c_uint64),
}


def ranges(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces of 0 to n that have ``size`` each."""
    return ((begin, min(begin + size, n)) for begin in range(0, n, size))


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``values`` in ``dtype``; bfloat16 as uint16."""
    if dtype == "bfloat16":
        return float32_to_bfloat16(values.astype(np.float32))
    return values.astype(dtype)


def to_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return what :func:`to_bits` has made as float64."""
    return (bfloat16_to_float32(values) if dtype == "bfloat16" else values).astype(np.float64)


class Worker:
    """One worker's matrix. ``rows``: rows of a piece of work."""

    def __init__(
        self, n: int, m: int, rank: int, dtype: str, feedback: bool, seed: int = 1, rows: int = 16
    ) -> None:
        self.n, self.m, self.rank, self.dtype, self.feedback = n, m, rank, dtype, feedback
        self.seed, self.rows, self.counter, self.broken = seed, rows, 0, 0
        wide = wide_of(dtype)
        self.p, self.q, self.own, self.sums = (
            np.zeros((rank, size), wide) for size in (n, m, m, m)
        )
        self.e = np.zeros((n, m), wide)
        self._scratch = np.empty(scratch_bytes(dtype, rank), np.uint8)
        self._steps = load_steps(dtype)
        self.sums[:] = 0
        assert self.call("refresh", self.q, self.sums, m, rank, seed, 0) == 0

    def call(self, step: str, *given: np.ndarray | int) -> int | None:
        """Call a step's C function."""
        made = _KINDS[step](getattr(self._steps, step))
        return made(*(g.ctypes.data if isinstance(g, np.ndarray) else g for g in given))

    def project(self, g: np.ndarray) -> np.ndarray:
        """Return this worker's P."""
        self.g, sizes = g, (self.n, self.m, self.rank)
        for span in ranges(self.n, self.rows):
            given = (g, self.e, self.q, self.p, self._scratch, *sizes, *span, self.feedback)
            self.call("project", *given)
        return self.p.copy()

    def project_back(self, p: np.ndarray) -> np.ndarray:
        """Take the summed P; return this worker's Q."""
        self.p[:] = p
        self.call("orthogonalise", self.p, self.n, self.rank)
        for span in ranges(self.m, CHUNK):
            given = (self.g, self.e, self.p, self.own, self._scratch, self.n, self.m, self.rank)
            self.call("project_back", *given, *span, self.feedback)
        return self.own.copy()

    def restore(self, q: np.ndarray, out: np.ndarray) -> None:
        """Take the summed Q; write the result."""
        self.sums[:] = q
        self.counter += 1
        broken = self.call("refresh", self.q, self.sums, self.m, self.rank, self.seed, self.counter)
        assert broken is not None
        self.broken = broken
        given = (self.g, self.e, self.p, self.sums, self.own, out, self._scratch)
        for span in ranges(self.n, self.rows):
            sizes = (self.n, self.m, self.rank, *span, self.feedback, broken)
            self.call("restore", *given, *sizes)


def step(workers: list[Worker], gradients: list[np.ndarray], divisor: int = 1) -> list[np.ndarray]:
    """Return each worker's result of one step; servers add as they do, from left to right."""
    kind = workers[0].p.dtype.type
    made = [g.copy() for g in gradients]
    with np.errstate(over="ignore", invalid="ignore"):
        p = sum(w.project(g) for w, g in zip(workers, made, strict=True)) / kind(divisor)
        q = sum([w.project_back(p) for w in workers]) / kind(divisor)
    for w, g in zip(workers, made, strict=True):
        w.restore(q, g)
    return made


def gradient(rng: np.random.Generator, n: int, m: int, scale: float = 1.0) -> np.ndarray:
    """Return a matrix whose singular values decay, as a gradient's do."""
    left, right = rng.standard_normal((n, min(n, m))), rng.standard_normal((min(n, m), m))
    return (left * 2.0 ** -np.arange(min(n, m))) @ right * scale
