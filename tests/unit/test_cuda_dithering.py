"""dithering's CUDA kernels against the CPU's: equal bytes, residual and momentum.

With the l2 norm they are compared to the oracle, which is given the device's norm.
"""

from __future__ import annotations

import numpy as np
import pytest

from bpsx.kernels import reference_dithering as oracle
from bpsx.kernels.reference import Reference
from support.codec_tools import corrupt, gradient, same
from support.cuda_tools import DEVICES, SIZES, Pair, rounds, workers

LINEAR, NATURAL = {"k": 2}, {"k": 4, "partition": "natural"}
OPTIONS = [LINEAR, NATURAL, {"k": 1}, {"k": 255}, {"k": 31, "partition": "natural"}, {"k": 5}]


class Dithering(Pair):
    """Layout of dithering's state."""

    def layout(self, size: int) -> tuple[int, str]:
        return (0, "float64") if size == 8 else (size, "")


@pytest.fixture(scope="module", params=DEVICES)
def worker(request):
    yield from workers(request.param)


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize(
    "residual,momentum",
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["", "ef", "nesterov", "ef-nesterov"],
)
def test_as_on_the_cpu(worker, wide, residual, momentum):
    for i, n in enumerate(SIZES[worker.kind]):
        pair = Dithering(
            worker,
            "dithering",
            OPTIONS[(i + residual + 2 * momentum) % 6],
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_tensor_of_more_than_one_chunk(worker, options):
    """More than one chunk: few and many non-zero elements, and chunks of zeros."""
    n = 8192 + 700
    for density in [0.001, 0.02, 0.1][: 1 if worker.kind == "simulator" else 3]:
        g = gradient("normal", n, "float32", 1)
        rng = np.random.default_rng(2)
        g[rng.random(n) > density] *= 1e-6
        g[2000:8192] = 0
        pair = Dithering(worker, "dithering", options, n, residual=worker.kind == "gpu")
        wire = pair.encode(g)
        pair.decode(wire)
        pair.close()


def test_rice_coded_places_are_as_on_the_cpu(worker):
    """Indices as Rice-coded numbers, short and long ones."""
    for n, density, seed in [(300, 0.01, 1), (1100, 0.05, 2), (1100, 0.003, 3)]:
        g = np.where(
            np.random.default_rng(seed).random(n) < density,
            gradient("normal", n, "float32", seed),
            0,
        ).astype(np.float32)
        g[7] = 1.0
        pair = Dithering(worker, "dithering", {"k": 255}, n)
        pair.decode(pair.encode(g), add_to=g)
        pair.close()


@pytest.mark.parametrize("kind", ["zero", "minus zero", "denormal", "huge", "infinity", "nan"])
def test_special_values(worker, kind):
    for wide, options in [
        ("float32", LINEAR),
        ("float64", NATURAL),
        ("float32", {"k": 2, "normalize": "l2"}),
    ]:
        if "normalize" in options and kind in ("denormal", "huge"):
            continue
        pair = Dithering(worker, "dithering", options, 100, wide, True, True)
        pair.decode(pair.encode(gradient(kind, 100, wide, 1)))
        if "normalize" not in options:
            pair.encode(gradient("normal", 100, wide, 2))
        pair.close()


def test_the_l2_norm_is_right_to_rounding_and_the_rest_to_the_bit(worker):
    """The norm equals the oracle's up to rounding; given that norm, all else is bitwise equal."""
    for n in SIZES[worker.kind][-2:]:
        if n > 50_000:
            continue
        for wide, options in [
            ("float32", {"k": 255, "normalize": "l2"}),
            ("float64", {"k": 20, "partition": "natural", "normalize": "l2"}),
        ]:
            pair = Dithering(worker, "dithering", options, n, wide, True, True)
            natural, norms = "partition" in options, []

            def encode(p, counter, k=options["k"], natural=natural, norms=norms):
                assert abs(norms[-1] / oracle.norm_of(p, True) - 1) < 1e-12
                return oracle.encode(p, k, natural, True, 1, counter, norms[-1])

            step = Reference(
                encode,
                lambda wire, n, k=options["k"], natural=natural, wide=wide: oracle.decode(
                    wire, n, k, natural, wide
                ),
                n,
                wide,
            )
            for turn in range(2):
                g = gradient("normal", n, wide, turn)
                got, e, m, _ = worker.call(pair.number, "encode", g, 0.5, 0.9)
                norms.append(np.frombuffer(got[:8], np.float64)[0])
                assert got == step.encode(g, residual=True, momentum=True, factor=0.5, mu=0.9)
                assert same(m, step.momentum) and np.array_equal(e, step.residual)
            pair.decode(got)
            pair.close()


def test_corrupt_bytes_are_decoded_as_on_the_cpu(worker):
    for seed in range(24 if worker.kind == "simulator" else 400):
        n = [1, 33, 300][seed % 3]
        pair = Dithering(
            worker, "dithering", OPTIONS[seed % 6], n, ["float32", "float64"][seed % 2]
        )
        g = gradient("normal", n, pair.wide, seed)
        if seed % 4 == 0:
            g[1:] *= 1e-4
        pair.decode(corrupt(pair.cpu.encode(g), seed), add_to=g if seed % 3 else None)
        pair.close()
