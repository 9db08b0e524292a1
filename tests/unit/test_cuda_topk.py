"""topk's and half's CUDA kernels against the CPU's: equal bytes, residual and momentum."""

from __future__ import annotations

import numpy as np
import pytest

from support.codec_tools import corrupt, gradient
from support.cuda_tools import DEVICES, SIZES, Pair, rounds, workers


class TopK(Pair):
    """Layout of topk's state."""

    def layout(self, size: int) -> tuple[int, str]:
        return size // (4 + np.dtype(self.wide).itemsize) * 4, self.wide


class Half(Pair):
    """Layout of half's state."""

    def layout(self, size: int) -> tuple[int, str]:
        return 0, "float16"


@pytest.fixture(scope="module", params=DEVICES)
def worker(request):
    yield from workers(request.param)


AMOUNTS = [0.01, 1, 0.3, 0.999, 10**6]


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize(
    "residual,momentum",
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["", "ef", "nesterov", "ef-nesterov"],
)
def test_as_on_the_cpu(worker, wide, residual, momentum):
    if worker.kind == "simulator" and wide == "float64" and not (residual and momentum):
        pytest.skip("the simulator is slow, and the type makes no difference to what is kept")
    for i, n in enumerate([*SIZES[worker.kind], *[1100] * (residual == momentum)]):
        pair = TopK(
            worker,
            "topk",
            {"k": AMOUNTS[(i + residual + 2 * momentum) % 5] if n != 1100 else 0.02},
            n,
            wide,
            residual,
            momentum,
        )
        for turn, (kind, factor) in enumerate(rounds(worker)):
            g = gradient(kind, n, wide, turn)
            wire = pair.encode(g, factor)
            pair.decode(wire, add_to=g if turn % 2 else None)
        pair.close()


@pytest.mark.parametrize(
    "kind",
    [
        "zero",
        "minus zero",
        "equal",
        "sparse",
        "ascending",
        "descending",
        "denormal",
        "huge",
        "infinity",
        "nan",
    ],
)
def test_special_values(worker, kind):
    for wide, n, k in [("float64", 300, 70)] + [("float32", 100_000, 0.01)] * (
        worker.kind != "simulator"
    ):
        pair = TopK(worker, "topk", {"k": k}, n, wide, True, True)
        for turn, one in enumerate([kind, "normal"]):
            wire = pair.encode(gradient(one, n, wide, turn))
            if one == kind:
                pair.decode(wire)
        pair.close()


def test_topk_is_exact_though_its_sample_misleads(worker):
    """All sampled elements are large and the others are not, so collecting has to start again."""
    n = 1100 if worker.kind == "simulator" else 50_000
    sample, run = (256, 4) if worker.kind == "simulator" else (4096, 4)
    stride = n // (sample // run)
    for residual, momentum in [(True, False)] + [(False, False), (False, True)] * (
        worker.kind != "simulator"
    ):
        g = gradient("normal", n, "float32", 1)
        for r in range(sample // run):
            first = r * stride + ((r * 2654435769 & 0xFFFFFFFF) * (stride - run + 1) >> 32)
            g[first : first + run] *= 100
        pair = TopK(worker, "topk", {"k": 0.4}, n, "float32", residual, momentum)
        pair.encode(g)
        pair.close()


def test_corrupt_bytes_are_decoded_as_on_the_cpu(worker):
    for seed in range(30):
        n = [1, 33, 300][seed % 3]
        pair = TopK(worker, "topk", {"k": 0.2}, n, ["float32", "float64"][seed % 2])
        g = gradient("normal", n, pair.wide, seed)
        pair.decode(corrupt(pair.cpu.encode(g), seed), add_to=g if seed % 2 else None)
        pair.close()


@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_half_writes_the_same_bytes_as_on_the_cpu(worker, wide):
    for n in SIZES[worker.kind]:
        pair = Half(worker, "half", {}, n, wide)
        for turn, kind in enumerate(["normal", "wild", "denormal", "infinity", "nan"]):
            g = gradient(kind, n, wide, turn)
            if kind == "denormal":
                g *= 1e37
            wire = pair.encode(g)
            pair.decode(wire)
            pair.decode(wire, add_to=g)
        pair.decode(wire[:-1])
        pair.close()
