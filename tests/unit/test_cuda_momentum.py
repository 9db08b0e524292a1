"""The CUDA kernel of Nesterov's momentum against the CPU's, over several rounds."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.kernels.codecs import load_momentum
from bpsx.kernels.reference import bfloat16_to_float32, float32_to_bfloat16
from support.codec_tools import gradient, kinds, same
from support.cuda_tools import DEVICES, Worker, workers

NAMES = ["float16", "bfloat16", "float32", "float64"]
#: Sizes around a warp's and a block's tile in the simulator (128) and on a GPU (256 and 2048).
SIZES = {
    "simulator": [0, 1, 33, 127, 128, 257],
    "gpu": [0, 1, 2, 33, 127, 255, 256, 257, 2047, 2048, 2049, 8191, 40_001, 1_000_003],
}
_NESTEROV = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_void_p, C.c_int64, C.c_double)


@pytest.fixture(scope="module", params=DEVICES)
def worker(request):
    yield from workers(request.param)


def stored(values: np.ndarray, name: str) -> np.ndarray:
    """Return values as elements of dtype ``name``; bfloat16 as uint16."""
    with np.errstate(all="ignore"):
        return (
            float32_to_bfloat16(values.astype(np.float32))
            if name == "bfloat16"
            else values.astype(name)
        )


def numbers(elements: np.ndarray) -> np.ndarray:
    return bfloat16_to_float32(elements) if elements.dtype == np.uint16 else elements


class Tensor:
    """Momentum on the device and on the CPU, which get the same gradients and must stay equal."""

    def __init__(self, worker: Worker, name: str, n: int) -> None:
        self.worker, self.name, self.n = worker, name, n
        self.momentum = np.zeros(n, "float64" if name == "float64" else "float32")
        self.state = np.zeros(2, np.int32)
        self._other, self._run = self.momentum.copy(), _NESTEROV(load_momentum(name))

    def add(self, g: np.ndarray, mu: float, blocks: int, in_place: bool = False) -> np.ndarray:
        """Return the device's result for g, as numbers."""
        want = np.empty_like(g)
        self._run(want.ctypes.data, g.ctypes.data, self._other.ctypes.data, self.n, mu)
        memories = [g, self.momentum, 0 if in_place else np.zeros_like(g), self.state]
        after, self.momentum, *out, self.state = self.worker.launch(
            "momentum", "nesterov", self.name, blocks, memories, self.n, mu
        )
        assert in_place or after.tobytes() == g.tobytes(), "the gradient was written to"
        got = after if in_place else out[0]
        assert same(numbers(got), numbers(want))
        assert self.momentum.tobytes() == self._other.tobytes()
        assert not self.state.any()
        return numbers(got)


@pytest.mark.parametrize("name", NAMES)
def test_as_on_the_cpu(worker, name):
    rng = np.random.default_rng(1)
    for i, n in enumerate(SIZES[worker.kind]):
        tensor = Tensor(worker, name, n)
        for turn in range(2):
            tensor.add(
                stored(rng.standard_normal(n), name),
                [0.9, 1 / 3][turn],
                [1, 2, 3, 7][(i + turn) % (3 if n < 1000 else 4)],
                turn == 1,
            )


@pytest.mark.parametrize("name", NAMES)
def test_nesterovs_formula(worker, name):
    tensor = Tensor(worker, name, 4)
    g = stored(np.array([1, -2, 0.5, 4]), name)
    assert tensor.add(g, 0.5, 1).tolist() == [1.5, -3, 0.75, 6]
    assert tensor.add(g, 0.5, 1).tolist() == [1.75, -3.5, 0.875, 7]
    assert tensor.momentum.tolist() == [1.5, -3, 0.75, 6]


@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_passes_and_is_forgotten(worker, name):
    n = {"simulator": 300, "gpu": 5000}[worker.kind]  # three tiles, each of a different block
    tensor, ones = Tensor(worker, name, n), stored(np.ones(n), name)
    tensor.add(ones, 0.9, 3)
    for where, bad in ((0, np.inf), (n // 2, -np.inf), (n - 1, np.nan)):
        assert (tensor.momentum == 1).all()
        g = ones.copy()
        g[where] = stored(np.array([bad]), name)[0]
        got = tensor.add(g, 0.9, 3)
        assert not np.isfinite(got[where]) and np.isfinite(np.delete(got, where)).all()
        assert not tensor.momentum.any()
        tensor.add(ones, 0.9, 3)
        assert (tensor.momentum == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_that_overflows(worker, name):
    """A sum that overflows although all inputs are finite.

    In float16 the sum is finite, too, but no element can hold it; the overflow must be recorded.
    """
    tensor = Tensor(worker, name, 40)
    g = np.ones(40)
    g[7] = {"float16": 65504, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": 1.7e308}[name]
    got = tensor.add(stored(g, name), 0.9, 2)
    assert np.isinf(got[7]) and np.isfinite(np.delete(got, 7)).all()
    assert tensor.momentum.any() == (name == "float16")
    tensor.add(stored(np.ones(40), name), 0.9, 2)


def test_threads_beyond_the_last_element_change_nothing(worker):
    """Threads without an element must not change the last one.

    They read the last element after it has been replaced; with momentum added again it would
    overflow.
    """
    for n in (1, 7, 40):
        tensor = Tensor(worker, "float32", n)
        for _ in range(4):
            tensor.momentum[:] = tensor._other[:] = 0
            tensor.add(np.full(n, 1e38, np.float32), 0.9, 1, in_place=True)
            assert (tensor.momentum == np.float32(1e38)).all()


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    blocks=st.integers(1, 3),
    n=st.integers(0, 140),
    mu=st.floats(0, 1),
    in_place=st.booleans(),
    rounds=st.lists(st.tuples(kinds, st.integers(0, 1000)), min_size=1, max_size=3),
)
def test_any_rounds(worker, name, blocks, n, mu, in_place, rounds):
    tensor = Tensor(worker, name, n)
    for kind, seed in rounds:
        with np.errstate(all="ignore"):
            g = gradient(kind, max(n, 1), "float64", seed)[:n]
        tensor.add(stored(g, name), mu, blocks, in_place)


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(["float16", "bfloat16"]),
    mu=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    halves=st.lists(
        st.tuples(st.integers(0, 65535), st.integers(0, 65535)), min_size=1, max_size=70
    ),
)
def test_any_halves(worker, name, mu, halves):
    tensor = Tensor(worker, name, len(halves))
    for g in np.array(halves, np.uint16).T:
        tensor.add(
            np.ascontiguousarray(g).view("float16" if name == "float16" else "uint16"), mu, 1
        )
