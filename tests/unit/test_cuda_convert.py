"""The CUDA kernels that convert 16-bit floats, against the CPU's and NumPy's conversions."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.kernels.codecs import load_conversion
from bpsx.kernels.reference import bfloat16_to_float32, float32_to_bfloat16
from support.codec_tools import same
from support.cuda_tools import DEVICES, Worker, workers

HALVES = ["float16", "bfloat16"]
EVERY = np.arange(65536, dtype=np.uint16)
#: Sizes around a warp's and a block's tile in the simulator (128) and on a GPU (256 and 2048), with
#: fewer and more blocks than tiles.
SIZES = [0, 1, 2, 31, 33, 127, 128, 129, 255, 257]
LARGER = {"simulator": [], "gpu": [2047, 2048, 2049, 8191, 40_001, 1_000_003]}
BLOCKS = [1, 2, 3]
_CONVERT = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)


@pytest.fixture(scope="module", params=DEVICES)
def worker(request):
    yield from workers(request.param)


def on_the_cpu(name: str, which: int, source: np.ndarray) -> np.ndarray:
    made = load_conversion(name)
    out = np.empty(source.size, [np.float32, np.uint16][which])
    _CONVERT(made[which])(out.ctypes.data, source.ctypes.data, source.size)
    return out


def widened(bits: np.ndarray, name: str) -> np.ndarray:
    """Convert with NumPy."""
    return (
        bits.view(np.float16).astype(np.float32) if name == "float16" else bfloat16_to_float32(bits)
    )


def narrowed(values: np.ndarray, name: str) -> np.ndarray:
    """Convert with NumPy."""
    with np.errstate(all="ignore"):
        return (
            values.astype(np.float16).view(np.uint16)
            if name == "float16"
            else float32_to_bfloat16(values)
        )


def assert_widened(worker: Worker, name: str, bits: np.ndarray, blocks: int) -> None:
    source, out = worker.launch(
        "convert",
        "conversion.widen",
        name,
        blocks,
        [bits, np.zeros(bits.size, np.float32)],
        bits.size,
    )
    assert (source == bits).all(), "the source was written to"
    assert same(out, on_the_cpu(name, 0, bits)) and same(out, widened(bits, name))


def assert_narrowed(worker: Worker, name: str, values: np.ndarray, blocks: int) -> None:
    source, out = worker.launch(
        "convert",
        "conversion.narrow",
        name,
        blocks,
        [values, np.zeros(values.size, np.uint16)],
        values.size,
    )
    assert (source.view(np.uint32) == values.view(np.uint32)).all(), "the source was written to"
    nan = np.isnan(values)
    assert (out[~nan] == on_the_cpu(name, 1, values)[~nan]).all() and (
        out[~nan] == narrowed(values, name)[~nan]
    ).all()
    assert np.isnan(widened(out[nan], name)).all()


def borders(name: str, step: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float32 values around every ``step``-th finite 16-bit float and the last ones.

    For each, of both signs: the value, the midpoint to the next one, and the neighbours of both.
    """
    infinity = 0x7C00 if name == "float16" else 0x7F80
    halves = widened(EVERY[:infinity], name).astype(np.float64)
    between = (halves + np.append(halves[1:], 2 * halves[-1] - halves[-2])) / 2
    some = np.unique(np.append(np.arange(0, infinity, step), infinity - np.arange(1, 4)))
    exact, between = (
        np.concatenate([x[some], -x[some]]).astype(np.float32) for x in (halves, between)
    )
    bits = np.concatenate([exact, between]).view(np.uint32)
    return (
        exact,
        between,
        np.concatenate([bits - np.uint32(1), bits + np.uint32(1)]).view(np.float32),
    )


@pytest.mark.parametrize("name", HALVES)
def test_borders_are_where_rounding_changes(name):
    exact, between, near = borders(name)
    _, below, _, above = (narrowed(x, name) for x in np.split(near, 4))
    assert (below == narrowed(exact, name)).all() and (above == below + 1).all(), (
        "half-way, the last bit decides"
    )
    assert (narrowed(between, name) % 2 == 0).all(), "ties go to even"


@pytest.mark.parametrize("name", HALVES)
def test_every_half(worker, name):
    assert_widened(worker, name, EVERY, 2)


@pytest.mark.parametrize("name", HALVES)
def test_narrowing_rounds_as_numpy_does(worker, name):
    step = 1 if worker.kind == "gpu" else 8  # step 8 still covers some values of each exponent
    assert_narrowed(worker, name, np.concatenate(borders(name, step)), 3)


@pytest.mark.parametrize("name", HALVES)
def test_narrowing_keeps_infinities_nans_and_denormals(worker, name):
    bits = [
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x33000000,
        0x33000001,
        0x38800000,
        0x387FFFFF,
        0x477FEFFF,
        0x477FF000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7F80FFFF,
        0x7F810000,
        0x7FBFFFFF,
        0x7FC00000,
        0x7FFF7FFF,
        0x7FFF8000,
        0x7FFFFFFF,
    ]
    both = np.array([bit | sign for sign in (0, 0x80000000) for bit in bits], np.uint32)
    assert_narrowed(worker, name, both.view(np.float32), 1)


@pytest.mark.parametrize("name", HALVES)
def test_sizes_and_blocks(worker, name):
    rng = np.random.default_rng(1)
    for i, n in enumerate(SIZES + LARGER[worker.kind]):
        blocks = BLOCKS[i % 3] if n < 2000 else [1, 7, 300][i % 3]
        assert_widened(worker, name, rng.integers(0, 65536, n).astype(np.uint16), blocks)
        assert_narrowed(worker, name, rng.standard_normal(n).astype(np.float32), blocks)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(HALVES),
    blocks=st.sampled_from(BLOCKS),
    bits=st.lists(st.integers(0, 2**32 - 1), max_size=140),
)
def test_any_bits(worker, name, blocks, bits):
    given = np.array(bits, np.uint32)
    assert_narrowed(worker, name, given.view(np.float32), blocks)
    assert_widened(worker, name, (given >> np.uint32(16)).astype(np.uint16), blocks)


def test_wide_elements_have_no_conversion_kernel(worker):
    for name in ("float32", "float64"):
        with pytest.raises(AssertionError, match="NoneType"):
            worker.launch("convert", "conversion.widen", name, 1, [np.zeros(1, np.float32)] * 2, 1)
