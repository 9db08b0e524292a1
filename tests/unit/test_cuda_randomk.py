"""randomk's CUDA kernels against the CPU's: equal bytes, residual and momentum."""

from __future__ import annotations

import pytest

from support.codec_tools import corrupt, gradient
from support.cuda_tools import DEVICES, SIZES, Pair, rounds, workers


class RandomK(Pair):
    """Layout of randomk's state."""

    def layout(self, size: int) -> tuple[int, str]:
        return 8, self.wide


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
    for i, n in enumerate(SIZES[worker.kind]):
        pair = RandomK(
            worker,
            "randomk",
            {"k": AMOUNTS[(i + residual + 2 * momentum) % 5]},
            n,
            wide,
            residual,
            momentum,
            seed=7 * i - 3,
        )
        for turn, (kind, factor) in enumerate(rounds(worker)):
            g = gradient(kind, n, wide, turn)
            wire = pair.encode(g, factor)
            pair.decode(wire, add_to=g if turn % 2 else None)
        pair.close()


@pytest.mark.parametrize("kind", ["minus zero", "denormal", "huge", "infinity", "nan"])
def test_special_values(worker, kind):
    for wide, k, residual in [
        ("float32", 0.05, True),
        ("float64", 70, False),
        ("float32", 0.999, True),
    ]:
        pair = RandomK(worker, "randomk", {"k": k}, 300, wide, residual, True)
        for turn, one in enumerate([kind, "normal"]):
            pair.decode(pair.encode(gradient(one, 300, wide, turn)))
        pair.close()


def test_corrupt_bytes_are_decoded_as_on_the_cpu(worker):
    """With any counter, the chosen indices are in range."""
    for seed in range(20):
        n = [1, 33, 300][seed % 3]
        pair = RandomK(worker, "randomk", {"k": 0.2}, n, ["float32", "float64"][seed % 2])
        g = gradient("normal", n, pair.wide, seed)
        pair.decode(corrupt(pair.cpu.encode(g), seed), add_to=g if seed % 2 else None)
        pair.close()
