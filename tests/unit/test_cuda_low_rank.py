"""The CUDA kernels of PowerSGD's steps: their bits are those of the CPU's."""

from __future__ import annotations

import numpy as np
import pytest

from bpsx.kernels.low_rank import CHUNK, RANKS, ROWS, TALL
from support.codec_tools import same
from support.cuda_tools import DEVICES, workers
from support.low_rank_tools import Worker, gradient, to_bits, to_float

#: Rows, columns, rank: around warps, chunks, tiles and groups of columns.
SHAPES = {
    "simulator": [(TALL + 1, 33, 2), (1, CHUNK + 3, RANKS + 1), (ROWS + 1, 2, 1)],
    "gpu": [
        (1, 1, 1),
        (64, 27, 2),
        (513, 511, 3),
        (1000, CHUNK + 1, RANKS),
        (2 * ROWS + 1, 2 * CHUNK, RANKS + 1),
        (77, 5000, 9),
        (4096, 1025, RANKS),
    ],
}


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    yield from workers(request.param)


class OnGpu:
    """The steps of one worker's matrix by the kernels, each compared with the CPU's."""

    def __init__(self, device, n: int, m: int, rank: int, dtype: str, feedback: bool) -> None:
        self.device, self.sizes, self.feedback, self.dtype = device, (n, m, rank), feedback, dtype
        self.cpu = Worker(n, m, rank, dtype, feedback)

    def launch(self, path: str, given: list, *numbers: int) -> list[np.ndarray]:
        """Run a kernel; return all arrays, which it may have changed, as one row each."""
        kind = (self.dtype,) if path == "adder" else (self.dtype, self.feedback)
        blocks = 2 if self.device.kind == "simulator" else 300
        found = self.device.launch("low_rank", path, kind, blocks, given, *numbers)
        return [array.ravel() for array in found]

    def step(self, g: np.ndarray) -> np.ndarray:
        """Compare the steps with the gradient ``g``; return the result."""
        (n, m, rank), e = self.sizes, self.cpu.e.copy()
        own_p, q = self.cpu.project(g), self.cpu.q.copy()
        if n < ROWS or self.device.kind == "gpu":  # hundreds of rows take the simulator seconds
            found = self.launch("projector", [g, e, q, np.full_like(own_p, -7)], *self.sizes)
            assert all(map(same, found, (g.ravel(), e.ravel(), q.ravel(), own_p.ravel())))
        own_q = self.cpu.project_back(own_p * own_p.dtype.type(1.5))
        p, parts = self.cpu.p.copy(), np.full((-(-n // ROWS), rank, m), -7, own_q.dtype)
        *found, parts = self.launch("gatherer", [g, e, p, parts], *self.sizes)
        assert all(map(same, found, (g.ravel(), e.ravel(), p.ravel())))
        _, found = self.launch("adder", [parts, np.full_like(own_q, -7)], n, rank * m)
        assert same(found, own_q.ravel())
        out, sums = g.copy(), own_q * own_q.dtype.type(0.75)
        self.cpu.restore(sums, out)
        given = [g, e, p, sums, own_q, 0]  # the result replaces the gradient
        found = self.launch("restorer", given, *self.sizes, self.cpu.broken)
        wanted = (out.ravel(), self.cpu.e.ravel(), p.ravel(), sums.ravel(), own_q.ravel())
        assert all(map(same, found, wanted))
        return out


@pytest.mark.parametrize(
    ("dtype", "feedback"),
    [(dtype, True) for dtype in ("float32", "float64", "float16", "bfloat16")]
    + [("float32", False)],
)
def test_the_bits_are_those_of_the_cpu(device, dtype, feedback):
    rng, simulated = np.random.default_rng(4), device.kind == "simulator"
    for n, m, rank in SHAPES[device.kind][: 1 if simulated and dtype != "float32" else None]:
        matrix = OnGpu(device, n, m, rank, dtype, feedback)
        for _ in range(2):
            matrix.step(to_bits(gradient(rng, n, m), dtype))
        assert matrix.cpu.e.any() == feedback or min(n, m) <= rank


@pytest.mark.parametrize("what", [np.inf, np.nan])
def test_an_overflow_leaves_no_residual(device, what):
    matrix = OnGpu(device, 5, 40, 2, "float32", True)
    g = gradient(np.random.default_rng(1), 5, 40).astype(np.float32)
    matrix.step(g)
    spoilt = g.copy()
    spoilt[2, 3] = what
    with np.errstate(all="ignore"):
        assert np.isnan(matrix.step(spoilt)).all() and not matrix.cpu.e.any()
    assert np.isfinite(to_float(matrix.step(g), "float32")).all()
