"""topk against its oracle, byte for byte; its options; and corrupt bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.errors import ConfigError
from bpsx.kernels import codecs
from bpsx.kernels.codecs import amount_numbers, amount_of, codec
from bpsx.kernels.cpu.topk import TopK
from bpsx.kernels.reference import Reference, amount, topk_decode, topk_encode
from support.codec_tools import (
    Coder,
    Summed,
    assert_nothing_is_lost,
    assert_sum_is_that_of_single_pushes,
    corrupt,
    gradient,
    kinds,
    same,
    sizes,
    wides,
)

ks = st.one_of(
    st.sampled_from([1, 2, 7, 100, 10**6, 0.001, 0.01, 0.1, 0.5, 0.97, 1 - 2**-53]),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)


def oracle(k, n: int, wide: str) -> Reference:
    return Reference(
        lambda p, counter: topk_encode(p, k),
        lambda wire, size: topk_decode(wire, size, k, wide),
        n,
        wide,
    )


def parts(wire: bytes, n: int, k, wide: str) -> tuple[bytes, np.ndarray]:
    """Return indices and values."""
    count = amount(n, k)
    return wire[: 4 * count], np.frombuffer(wire[4 * count :], wide)


@pytest.mark.parametrize("residual", [False, True], ids=["", "ef"])
@pytest.mark.parametrize("momentum", [False, True], ids=["", "nesterov"])
@settings(max_examples=40, deadline=None)
@given(
    n=sizes,
    k=ks,
    wide=wides,
    kind=st.lists(kinds, min_size=1, max_size=3),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
    seed=st.integers(0, 99),
)
def test_bytes_residual_and_momentum_are_the_oracles(
    residual, momentum, n, k, wide, kind, factor, seed
):
    coder, slow = Coder("topk", {"k": k}, n, wide, residual, momentum), oracle(k, n, wide)
    for i, what in enumerate(kind):
        g = gradient(what, n, wide, 10 * seed + i)
        wire = coder.encode(g, factor, 0.9)
        with np.errstate(all="ignore"):
            want = slow.encode(g, residual=residual, momentum=momentum, factor=factor, mu=0.9)
            total = g + slow.decode(want, n)
        indices, values = parts(wire, n, k, wide)
        assert len(wire) == len(want)
        assert (indices, True) == (
            parts(want, n, k, wide)[0],
            same(values, parts(want, n, k, wide)[1]),
        )
        assert not residual or same(coder.residual, slow.residual)
        assert not momentum or same(coder.momentum, slow.momentum)
        assert same(coder.decode(wire), slow.decode(want, n))
        assert np.array_equal(coder.decode(wire, add_to=g), total, equal_nan=True)


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 2000, 4096, 16_000, 0.5])
def test_a_sample_of_nothing_but_the_largest(k, wide):
    """A gradient for which the sample misleads gives the same bytes."""
    from bpsx.kernels.cpu.topk import RUN, SAMPLE, sample_at

    n = 4 * SAMPLE
    rng = np.random.default_rng(3)
    g = rng.standard_normal(n).astype(wide)
    stride = n // (SAMPLE // RUN)
    sampled = np.array(
        [[sample_at(r, stride) + i for i in range(RUN)] for r in range(SAMPLE // RUN)]
    ).reshape(-1)
    assert sampled.min() >= 0 and sampled.max() < n and len(set(sampled.tolist())) == SAMPLE
    g[sampled] *= 1000
    for which in (g, 1 / g):
        for residual in (False, True):
            assert Coder("topk", {"k": k}, n, wide, residual).encode(which) == topk_encode(which, k)


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("n", [16_383, 40_001])
@pytest.mark.parametrize("k", [0.01, 0.1, 0.2, 0.5, 0.97])
def test_magnitudes_that_are_next_to_each_other(k, n, wide):
    """Magnitudes that differ in their last bits only, each many times.

    The threshold rises in single steps while they are collected.
    """
    rng = np.random.default_rng(5)
    one = np.ones(1, wide).view("u4" if wide == "float32" else "u8")[0]
    steps = np.minimum(np.arange(n) // 2048, rng.integers(0, 10, n)).astype(one.dtype)
    for order in (steps, steps[::-1], rng.integers(0, 10, n).astype(one.dtype)):
        for base in (one - one, one):
            g = (base + order).view(wide) * rng.choice(np.array([-1, 1], wide), n)
            assert Coder("topk", {"k": k}, n, wide).encode(g) == topk_encode(g, k)


@settings(max_examples=150, deadline=None)
@given(
    n=sizes,
    k=ks,
    wide=wides,
    rounds=st.lists(st.lists(kinds, min_size=1, max_size=5), min_size=1, max_size=3),
    divisor=st.integers(1, 7),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
    seed=st.integers(0, 99),
)
def test_a_sum_in_one_pass_has_the_bits_of_one_push_after_the_other(
    n, k, wide, rounds, divisor, factor, seed
):
    assert_sum_is_that_of_single_pushes(
        "topk", {"k": k}, n, wide, True, rounds, divisor, factor, seed
    )


@pytest.mark.parametrize("own", ["", "encoder", "decoder"])
def test_a_compressor_with_an_encoder_or_decoder_of_its_own_does_not_inherit_sums(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"other {own}"
    changed = {own: getattr(TopK, own)} if own else {}
    monkeypatch.setitem(codecs._codecs, name, type("Other", (TopK,), changed)())
    assert bool(codecs.load_summer(name, "float32", True).sum) == (not own)


@settings(max_examples=30, deadline=None)
@given(n=sizes, k=ks, wide=wides, seed=st.integers(0, 99))
def test_nothing_is_lost(n, k, wide, seed):
    assert_nothing_is_lost("topk", {"k": k}, n, wide, seed)


@settings(max_examples=200, deadline=None)
@given(n=sizes, k=ks, wide=wides, seed=st.integers(0, 9999), add=st.booleans())
def test_corrupt_bytes(n, k, wide, seed, add):
    coder = Coder("topk", {"k": k}, n, wide)
    g = gradient("normal", n, wide, seed)
    wire = corrupt(coder.encode(g), seed)
    got = coder.decode(wire, add_to=g if add else None)
    try:
        with np.errstate(all="ignore"):
            want = topk_decode(wire, n, k, wide)
            want = g + want if add else want
    except ValueError:
        assert got is None
    else:
        assert got is not None and (
            np.array_equal(got, want, equal_nan=True) if add else same(got, want)
        )
    assert Summed("topk", {"k": k}, n, wide, True).accepts(wire) == (got is not None)


@pytest.mark.parametrize(
    "indices", [[3, 3], [4, 3], [0, 10], [10, 11], [0, 2**31], [2**32 - 1, 0], [0, 2**32 - 1]]
)
def test_indices_out_of_order_or_range_are_rejected(indices):
    coder = Summed("topk", {"k": 2}, 10, "float32", True)
    values = np.ones(2, np.float32).tobytes()
    right = np.array([3, 9], np.uint32).tobytes() + values
    assert coder.decode(right) is not None and coder.accepts(right)
    wrong = np.array(indices, np.uint32).tobytes() + values
    assert coder.decode(wrong) is None and not coder.accepts(wrong)


@pytest.mark.parametrize("name", ["topk", "randomk"])
@pytest.mark.parametrize(
    "k",
    [
        None,
        0,
        0.0,
        -1,
        -0.5,
        True,
        False,
        float("nan"),
        float("inf"),
        2.5,
        1.0000001,
        "3",
        [1],
        2**63,
        1e30,
    ],
)
def test_an_invalid_k_is_refused(name, k):
    for given_ in ({"k": k}, {}) if k is None else ({"k": k},):
        with pytest.raises(ConfigError, match="expected") as error:
            codec(name).options(given_)
        assert str(error.value).startswith("k is missing: " if k is None else f"k={k!r}: ")


@pytest.mark.parametrize(
    ("k", "kept"), [(1, 1), (1.0, 1), (3.0, 3), (2**62, 2**62), (0.5, 0.5), (5e-324, 5e-324)]
)
def test_a_valid_k_keeps_its_value_and_type(k, kept):
    for name in ("topk", "randomk"):
        got = codec(name).options({"k": k})
        assert got == {"k": kept} and type(got["k"]) is type(kept)


@settings(max_examples=200, deadline=None)
@given(n=st.one_of(sizes, st.integers(1, 2**31)), k=st.one_of(ks, st.integers(1, 2**62)))
def test_the_number_of_kept_elements_is_the_oracles(n, k):
    assert amount_of(n, amount_numbers(k)) == amount(n, k)
    assert 1 <= amount(n, k) <= n
