"""onebit's CUDA kernels against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest

from bpsx.errors import ConfigError
from bpsx.kernels.codecs import device_codec
from support.codec_tools import corrupt, gradient
from support.cuda_tools import DEVICES, SIZES, Pair, rounds, workers

#: Tolerances: both add up magnitudes, each in a different order; the CPU adds those of float32 in
#: float32 within a block of 1024.
ROUNDING = {"float32": 1e-5, "float64": 1e-13}


class OneBit(Pair):
    """The CPU takes over the device's magnitude if that equals its own up to rounding.

    So both stay equal over many rounds.
    """

    def assert_alike(self, got: bytes, want: bytes) -> None:
        found, other = (np.frombuffer(wire[:8], np.float64)[0] for wire in (got, want))
        assert (
            np.isnan(found)
            if np.isnan(other)
            else abs(found - other) <= abs(other) * ROUNDING[self.wide]
        ), (found, other)
        assert got[8:] == want[8:]
        assert self.state[0] == (0.0 if np.isnan(found) else found)
        self.cpu.state[0] = self.state[0]


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
        pair = OneBit(worker, "onebit", {"scaling": i % 2 == 0}, n, wide, residual, momentum)
        for turn, (kind, factor) in enumerate(rounds(worker)):
            g = gradient(kind, n, wide, turn)
            wire = pair.encode(g, factor)
            pair.decode(wire)
            pair.decode(wire, add_to=g)
        pair.close()


@pytest.mark.parametrize(
    "kind", ["zero", "minus zero", "equal", "denormal", "huge", "infinity", "minus infinity", "nan"]
)
def test_special_values(worker, kind):
    for wide in ("float32", "float64"):
        pair = OneBit(worker, "onebit", {"scaling": True}, 300, wide, True, True)
        for turn, one in enumerate([kind, "normal"]):
            wire = pair.encode(gradient(one, 300, wide, turn))
            if one == kind:
                pair.decode(wire)
        pair.close()


def test_a_compressor_without_gpu_kernels_is_refused():
    with pytest.raises(
        ConfigError,
        match=(
            "'nobody' has no kernels for GPUs; expected one of onebit, topk, randomk, dithering"
        ),
    ):
        device_codec("nobody")


def test_corrupt_bytes_are_decoded_as_on_the_cpu(worker):
    for seed in range(12):
        n = [1, 33, 300][seed % 3]
        pair = OneBit(worker, "onebit", {"scaling": True}, n, "float32")
        g = gradient("normal", n, "float32", seed)
        pair.decode(corrupt(pair.encode(g), seed), add_to=g if seed % 2 else None)
        pair.close()
