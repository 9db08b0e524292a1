"""Dithering: bytes equal to its oracle's, unbiased, small, robust against corrupt bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.errors import ConfigError
from bpsx.kernels import reference_dithering as oracle
from bpsx.kernels.codecs import codec
from bpsx.kernels.reference import Reference
from support.codec_tools import SIZES, Coder, corrupt, gradient, kinds, same, sizes, wides

N = 1_024_000
chunked = st.one_of(sizes, st.sampled_from([8191, 8192, 8193, 16_384, 16_447]))
choices = st.one_of(
    st.fixed_dictionaries(
        {
            "k": st.sampled_from([1, 2, 3, 4, 5, 8, 9, 100, 128, 254, 255]),
            "normalize": st.sampled_from(["max", "l2"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "k": st.sampled_from([1, 2, 4, 15, 16, 31]),
            "normalize": st.sampled_from(["max", "l2"]),
            "partition": st.just("natural"),
        }
    ),
)


def flags(options: dict) -> tuple[int, bool, bool]:
    return options["k"], options.get("partition") == "natural", options.get("normalize") == "l2"


def norm_of(wire: bytes) -> float:
    return float(np.frombuffer(wire[:8], np.float64)[0])


class Compared:
    """A partition's codec and its oracle.

    The oracle is given the codec's l2 norm if that is close enough to its own.
    """

    def __init__(self, options: dict, n: int, wide: str, residual: bool, momentum: bool) -> None:
        self.k, self.natural, self.l2 = flags(options)
        self.wanted = {"residual": residual, "momentum": momentum}
        self.coder = Coder("dithering", options, n, wide, **self.wanted, seed=-5)
        self.reference = Reference(
            self._encode,
            lambda wire, m: oracle.decode(wire, m, self.k, self.natural, wide),
            n,
            wide,
        )
        self.norm = 0.0

    def _encode(self, p: np.ndarray, counter: int) -> bytes:
        mine = oracle.norm_of(p, self.l2)
        known = self.l2 and np.isfinite(self.norm)
        assert not known or abs(self.norm - mine) <= 2 * len(p) * 2.0**-53 * mine
        return oracle.encode(
            p, self.k, self.natural, self.l2, -5, counter, self.norm if known else mine
        )

    def round(self, g: np.ndarray, factor: float, mu: float) -> bytes:
        wire = self.coder.encode(g, factor, mu)
        self.norm = norm_of(wire)
        with np.errstate(all="ignore"):
            assert wire == self.reference.encode(g, factor=factor, mu=mu, **self.wanted)
        if np.isnan(self.norm):  # true also if only the norm overflows
            self.reference.residual[:] = self.reference.momentum[:] = 0
        if self.wanted["residual"]:
            assert np.array_equal(self.coder.residual, self.reference.residual)
        if self.wanted["momentum"]:
            assert np.array_equal(self.coder.momentum, self.reference.momentum)
        return wire


@settings(max_examples=120, deadline=None)
@given(
    n=chunked,
    wide=wides,
    options=choices,
    kind=kinds,
    residual=st.booleans(),
    momentum=st.booleans(),
    factor=st.sampled_from([1.0, 0.1, 3.0]),
    seed=st.integers(0, 999),
)
def test_the_oracle_makes_the_same_bytes(n, wide, options, kind, residual, momentum, factor, seed):
    compared = Compared(options, n, wide, residual, momentum)
    for step, what in enumerate([kind, "normal", kind]):
        wire = compared.round(gradient(what, n, wide, seed + step), factor, 0.9)
        decoded, before = compared.coder.decode(wire), gradient("normal", n, wide, seed + 7)
        assert same(decoded, oracle.decode(wire, n, *flags(options)[:2], wide))
        with np.errstate(all="ignore"):
            assert same(compared.coder.decode(wire, before), before + decoded)


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([1, 63, 64, 65, 4000, 8192, 8200]),
    k=st.integers(1, 255),
    seed=st.integers(0, 9999),
    density=st.sampled_from([1.0, 0.5, 0.1, 0.03, 0.01, 0.001]),
    shape=st.sampled_from(["even", "low", "high", "outlier", "clustered"]),
)
def test_any_levels_come_back_and_fit(size, k, seed, density, shape):
    # If the largest element equals k, the norm is k, a level is 1, and nothing is random.
    rng = np.random.default_rng(seed)
    levels = {
        "even": rng.integers(1, k + 1, size),
        "low": np.minimum(rng.geometric(0.5, size), k),
        "outlier": np.ones(size, int),
        "high": k + 1 - np.minimum(rng.geometric(0.5, size), k),
        "clustered": rng.integers(1, k + 1, size),
    }[shape]
    present = rng.random(size) < density
    if shape == "clustered":
        present = np.sort(present)
    g = (levels * present * rng.choice([-1, 1], size)).astype("float32")
    g[rng.integers(0, size)] = k
    coder = Coder("dithering", {"k": k}, size)
    wire = coder.encode(g)  # raises an error if the encoded bytes need more than the reserved room
    assert np.array_equal(coder.decode(wire), g / k * k) or np.allclose(
        coder.decode(wire), g, rtol=3e-7, atol=0
    )
    chunks = [
        oracle.chunk_bytes(abs(g[i : i + 8192]).astype(int), g[i : i + 8192] < 0, k)
        for i in range(0, size, 8192)
    ]
    assert wire[8 + 2 * len(chunks) :] == b"".join(chunks)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64, 128, 129, 255])
def test_the_longest_encoding_of_levels_fits(k):
    """All pairs of levels in all proportions, the worst case for Rice coding.

    All elements are sent.
    """
    rng, n = np.random.default_rng(k), 8192
    coder, most = Coder("dithering", {"k": k}, n), 0
    for high in {2, 3, k // 2, k - 1, k} & set(range(1, k + 1)):
        for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.99):
            g = np.where(rng.random(n) < share, high, 1).astype("float32")
            g[0] = k
            most = max(most, len(coder.encode(g)))
    assert most <= coder.capacity


def test_sent_values_plus_residual_equal_the_sum_of_gradients():
    for options in ({"k": 2}, {"k": 4, "partition": "natural"}, {"k": 200, "normalize": "l2"}):
        n, sent, total = 10_001, 0.0, 0.0
        coder = Coder("dithering", options, n, "float64", residual=True)
        for step in range(20):
            g = gradient("normal", n, "float64", step)
            sent, total = sent + coder.decode(coder.encode(g)), total + g
            assert np.abs(sent).max() > 0
        assert np.abs(coder.residual).max() > 0
        assert np.allclose(sent + coder.residual, total, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {"k": 2},
        {"k": 7},
        {"k": 255},
        {"k": 5, "normalize": "l2"},
        {"k": 4, "partition": "natural"},
        {"k": 3, "partition": "natural", "normalize": "l2"},
    ],
    ids=str,
)
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_the_mean_is_kept(options, wide):
    n, rounds, (k, natural, l2) = 2048, 800, flags(options)
    g = np.random.default_rng(3).uniform(-1, 1, n).astype(wide)
    if l2:
        g[::2] = 0.001
    coder, total = Coder("dithering", options, n, wide, seed=99), np.zeros(n)
    for _ in range(rounds):
        total += coder.decode(coder.encode(g))
    # Standard deviation, from the two levels between which an element lies.
    y = abs(g.astype(float)) / oracle.norm_of(g, l2)
    grid = np.append(0, 2.0 ** np.arange(1 - k, 1)) if natural else np.arange(k + 1) / k
    above = np.clip(np.searchsorted(grid, y, side="right"), 1, k)
    low, high = grid[above - 1], grid[above]
    deviation = np.sqrt(np.maximum((y - low) * (high - y), 0) / rounds) * oracle.norm_of(g, l2)
    error = total / rounds - g
    random = deviation > 1e-9
    z = error[random] / deviation[random]
    assert random.sum() > 0.9 * n
    assert abs(z.mean()) < 4 / np.sqrt(len(z)) and 0.85 < z.std() < 1.15
    share = ((y - low) / (high - low))[random]
    usual = (share > 0.03) & (
        share < 0.97
    )  # the others are rounded up or down too rarely for their means to be normally distributed
    assert abs(z[usual]).max() < 5.5
    assert abs(error[~random]).max(initial=0) < 1e-4


@pytest.mark.parametrize(
    ("k", "natural"), [(1, False), (2, False), (31, False), (1, True), (4, True), (31, True)]
)
def test_probabilities_are_exact_to_a_millionth_of_a_level(k, natural):
    """Checked over all 23-bit random numbers."""
    random = np.arange(2**23, dtype=np.uint32) << np.uint32(9)
    for y in (1e-7, 0.3, 0.77777, 0.999999):
        p = np.full(1, y, np.float32)
        mean = 0.0
        for part in np.split(random, 8):
            levels = oracle.levels_of(np.broadcast_to(p, len(part)), 1.0, k, natural, part)
            mean += oracle.values_of(levels, 1.0, k, natural, "float64").mean() / 8
        low = 0.0 if y < 2.0 ** (1 - k) else 2.0 ** np.floor(np.log2(y))
        step = max(low, 2.0 ** (1 - k)) if natural else 1 / k
        assert abs(mean - float(p[0])) < 2.0**-20 * step


def test_random_numbers_are_independent():
    n = 1 << 16
    streams = [
        oracle.noise(n, seed, counter)
        for seed, counter in ((1, 1), (1, 2), (2, 1), (-1, 1), (1 << 62, 1), (3, 0), (0, 0), (0, 3))
    ]
    for i, a in enumerate(streams):
        bits = np.unpackbits(a.view(np.uint8)).reshape(n, 32).mean(axis=0)
        assert abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(n)
        counts = np.bincount(a >> 24, minlength=256)
        assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 6 * np.sqrt(2 * 255)
        for b in [*streams[:i], np.roll(a, 1), np.roll(a, 64), np.roll(a, 8192)]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5.5 / np.sqrt(n)


def test_seeds_and_counters_make_different_choices():
    g = gradient("normal", 5000, "float32", 0)

    def wires(seed: int) -> list[bytes]:
        coder = Coder("dithering", {"k": 2}, 5000, seed=seed)
        return [coder.encode(g) for _ in range(3)]

    assert codec("dithering").own_noise
    assert wires(1) == wires(1)
    assert len({*wires(1), *wires(2)}) == 6


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"k": 2}, 0.054),
        ({"k": 4}, 0.083),
        ({"k": 8}, 0.121),
        ({"k": 4, "partition": "natural"}, 0.122),
        ({"k": 2, "normalize": "l2"}, 0.0008),
    ],
    ids=str,
)
def test_encodings_are_no_larger_than_upstreams(options, share):
    for seed in range(3):
        assert (
            len(Coder("dithering", options, N).encode(gradient("normal", N, "float32", seed)))
            <= share * 4 * N
        )


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("l2", [False, True], ids=["max", "l2"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_passes_and_is_forgotten(wide, l2, bad):
    n = 3000
    coder = Coder(
        "dithering",
        {"k": 3, "normalize": "l2" if l2 else "max"},
        n,
        wide,
        residual=True,
        momentum=True,
    )
    coder.encode(gradient("normal", n, wide, 1))
    assert coder.residual.any() and coder.momentum.any()
    g = gradient("normal", n, wide, 2)
    g[2222] = bad
    assert np.isnan(coder.decode(coder.encode(g))).all()
    assert not coder.residual.any() and not coder.momentum.any()
    assert np.isfinite(coder.decode(coder.encode(gradient("normal", n, wide, 3)))).all()


def test_values_at_the_edges():
    for wide in ("float32", "float64"):
        least, most = np.nextafter(np.zeros(1, wide), np.ones(1, wide))[0], np.finfo(wide).max
        for options in ({"k": 1}, {"k": 3}, {"k": 255}, {"k": 31, "partition": "natural"}):
            for value in (
                least,
                5 * least,
                np.finfo(wide).tiny,
                most / 2,
                np.dtype(wide).type(2.0) ** 41,
                np.dtype(wide).type(2.0) ** -41,
            ):
                g = np.full(100, value, wide) * np.where(np.arange(100) % 3, 1, -1).astype(wide)
                coder = Coder("dithering", options, 100, wide)
                # All are as large as the largest, so all are sent, up to the rounding of linear
                # steps by half a denormal each.
                assert np.allclose(
                    coder.decode(coder.encode(g)),
                    g,
                    rtol=1e-6,
                    atol=0 if options.get("partition") else options["k"] * least / 2,
                )
            assert (
                len(coder.encode(np.zeros(100, wide)))
                == len(coder.encode(np.full(100, -0.0, wide)))
                == 8
            )
            assert same(coder.decode(coder.encode(np.full(100, -0.0, wide))), np.zeros(100, wide))


@settings(max_examples=300, deadline=None)
@given(
    n=st.one_of(st.integers(1, 200), st.sampled_from([*SIZES[-3:], 8193])),
    options=choices,
    wide=wides,
    seed=st.integers(0, 10**6),
)
def test_corrupt_bytes_do_no_harm(n, options, wide, seed):
    coder = Coder("dithering", options, n, wide)
    wire = coder.encode(gradient("normal", n, wide, seed % 7))
    coder.decode(corrupt(wire, seed))
    coder.decode(corrupt(wire, seed), np.ones(n, wide))


@settings(max_examples=300, deadline=None)
@given(
    n=st.sampled_from([1, 64, 100, 8192, 8200]),
    options=choices,
    seed=st.integers(0, 10**6),
    first=st.integers(0, 255),
)
def test_chunks_of_chance_do_no_harm(n, options, seed, first):
    """Random chunks, also sparse and almost full ones, after a valid norm and table do no harm."""
    rng, chunks = np.random.default_rng(seed), -(-n // 8192)
    coder, bodies = Coder("dithering", options, n), []
    for _ in range(chunks):
        body = np.packbits(
            rng.random(8 * int(rng.choice([1, 2, 9, 40, 300, 1500, 5000])))
            < rng.choice([0.01, 0.1, 0.5, 0.99])
        )
        body[0] = first
        bodies.append(body.tobytes())
    wire = (
        np.float64(1.5).tobytes()
        + np.array([len(b) for b in bodies], np.uint16).tobytes()
        + b"".join(bodies)
    )
    coder.decode(wire)


@pytest.mark.parametrize(
    "options",
    [{"k": 1}, {"k": 2}, {"k": 100}, {"k": 2, "normalize": "l2"}, {"k": 4, "partition": "natural"}],
    ids=str,
)
def test_exactly_its_bytes_are_taken(options):
    for n in (1, 64, 100, 8192, 16_400):
        coder = Coder("dithering", options, n)
        wire = coder.encode(gradient("normal", n, "float32", 4))
        assert coder.decode(wire) is not None
        for size in {*range(min(len(wire), 40)), *range(max(0, len(wire) - 40), len(wire))}:
            if size != 8 or norm_of(wire):
                assert coder.decode(wire[:size]) is None, size
        for more in (b"\0", b"\0" * 8, b"\xff" * 50):
            assert coder.decode(wire + more) is None
        # A chunk that claims to be longer than its bits, with enough bytes present.
        lengths = np.frombuffer(wire[8:10], np.uint16)[0]
        assert coder.decode(wire[:8] + np.uint16(lengths + 1).tobytes() + wire[10:] + b"\0") is None


def test_chunks_that_end_too_early():
    """All elements are announced as present, but some or all signs and levels are missing."""
    for k, r, planes in ((2, 0, 2), (255, 0, 1), (255, 7, 1), (255, 7, 5), (255, 6, 8)):
        body = bytes([r]) + b"\xff" * (1024 * planes)
        wire = np.float64(1.0).tobytes() + np.uint16(len(body)).tobytes() + body
        assert Coder("dithering", {"k": k}, 8192).decode(wire) is None


def test_a_chunk_without_levels():
    """A chunk without levels takes only the bytes of its size, and adds nothing."""
    coder, g = Coder("dithering", {"k": 2}, 20_000), np.zeros(20_000, np.float32)
    g[10_000] = -3
    wire, before = coder.encode(g), gradient("normal", 20_000, "float32", 0)
    assert np.frombuffer(wire[8:14], np.uint16).tolist()[::2] == [0, 0] and len(wire) < 24
    assert same(coder.decode(wire), g)
    assert same(coder.decode(wire, before), before + g)


def test_an_impossible_first_byte_is_refused():
    """Refused are an r that no level up to k can use, and an s that is larger than any chunk."""
    for k, first in ((1, 1), (2, 1), (4, 2), (255, 8 * 14), (255, 8 * 31 + 7)):
        coder = Coder("dithering", {"k": k}, 64)
        for bits in (0, 255):
            for length in (1, 9, 17, 25, 500):
                wire = (
                    np.float64(1.0).tobytes()
                    + np.uint16(length).tobytes()
                    + bytes([first])
                    + bytes([bits]) * (length - 1)
                )
                assert coder.decode(wire) is None


@pytest.mark.parametrize("norm", [0.0, -1.0, np.inf, -np.inf, np.nan, 1e300])
def test_no_such_norm_with_chunks(norm):
    coder = Coder("dithering", {"k": 2}, 100)
    wire = coder.encode(gradient("normal", 100, "float32", 4))
    assert coder.decode(np.float64(norm).tobytes() + wire[8:]) is None
    alone = coder.decode(np.float64(norm).tobytes())
    assert (alone is None) == (not (norm == 0 or np.isnan(norm)))


@pytest.mark.parametrize(
    ("given_options", "said"),
    [
        ({}, ["k", "1", "255", "linear"]),
        ({"k": 0}, ["k=0", "255"]),
        ({"k": 256}, ["k=256", "255"]),
        ({"k": -1}, ["k=-1"]),
        ({"k": 2.0}, ["k=2.0"]),
        ({"k": True}, ["k=True"]),
        ({"k": "2"}, ["k='2'"]),
        ({"k": 32, "partition": "natural"}, ["k=32", "31", "natural"]),
        ({"partition": "natural"}, ["k", "31", "natural"]),
        ({"k": 2, "partition": "even"}, ["partition='even'", "linear", "natural"]),
        ({"k": 2, "normalize": "l1"}, ["normalize='l1'", "max", "l2"]),
    ],
    ids=str,
)
def test_wrong_options_are_named(given_options, said):
    with pytest.raises(ConfigError) as e:
        codec("dithering").options(given_options)
    assert all(word in str(e.value) for word in said), e.value


def test_options_are_completed():
    made = codec("dithering")
    assert made.options({"k": 255}) == {"k": 255, "partition": "linear", "normalize": "max"}
    assert made.numbers(made.options({"k": 31, "partition": "natural", "normalize": "l2"})) == [
        31,
        1,
        1,
    ]
