"""randomk against its oracle, byte for byte; the indices it chooses; and corrupt bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.kernels.codecs import ALIKE
from bpsx.kernels.reference import (
    GAMMA,
    Reference,
    amount,
    randomk_decode,
    randomk_encode,
    randomk_places,
    splitmix64,
)
from support.codec_tools import (
    Coder,
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
seeds = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("residual", [False, True], ids=["", "ef"])
@pytest.mark.parametrize("momentum", [False, True], ids=["", "nesterov"])
@settings(max_examples=40, deadline=None)
@given(
    n=sizes,
    k=ks,
    wide=wides,
    kind=st.lists(kinds, min_size=1, max_size=3),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
    seed=seeds,
)
def test_bytes_residual_and_momentum_are_the_oracles(
    residual, momentum, n, k, wide, kind, factor, seed
):
    coder = Coder("randomk", {"k": k}, n, wide, residual, momentum, seed)
    slow = Reference(
        lambda p, counter: randomk_encode(p, counter, seed, k, residual or momentum),
        lambda wire, size: randomk_decode(wire, size, seed, k, wide),
        n,
        wide,
    )
    for i, what in enumerate(kind):
        g = gradient(what, n, wide, seed % 1000 + i)
        wire = coder.encode(g, factor, 0.9)
        with np.errstate(all="ignore"):
            want = slow.encode(g, residual=residual, momentum=momentum, factor=factor, mu=0.9)
            decoded = slow.decode(want, n)
            total = g + decoded
        assert wire[:8] == want[:8] and len(wire) == len(want)
        assert same(np.frombuffer(wire[8:], wide), np.frombuffer(want[8:], wide))
        assert not residual or same(coder.residual, slow.residual)
        assert not momentum or same(coder.momentum, slow.momentum)
        assert same(coder.decode(wire), decoded)
        assert np.array_equal(coder.decode(wire, add_to=g), total, equal_nan=True)


@pytest.mark.parametrize("momentum", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "ef"])
@pytest.mark.parametrize("at", [0, 1500, 2999])
def test_an_overflow_that_is_not_sent(residual, momentum, at):
    """An infinite element that is not sent.

    If residual or momentum would remember it, the first value is sent as NaN. Otherwise the codec
    does not look at it.
    """
    coder = Coder("randomk", {"k": 10}, 3000, "float32", residual, momentum)
    g = gradient("normal", 3000, "float32", 1)
    coder.encode(g)
    g[at] = np.inf
    while at in (places := randomk_places(1, coder.counter + 1, 3000, 10)):
        coder.counter += 1
    values = np.frombuffer(coder.encode(g)[8:], np.float32)
    assert np.isnan(values[0]) == (residual or momentum) and np.isfinite(values[1:]).all()
    assert not coder.residual.any() and not coder.momentum.any()
    assert at not in places


def _servers(n: int, k: float, wide: str, seed: int) -> list[Coder]:
    """Encoders of two servers, with vanilla and sparse residuals; counters are equal."""
    vanilla, sparse = (
        Coder("randomk", {"k": k}, n, wide, residual=True, seed=seed) for _ in range(2)
    )
    sparse.options[ALIKE] = 1
    return [vanilla, sparse]


@settings(max_examples=60, deadline=None)
@given(n=sizes, k=ks, wide=wides, kind=st.lists(kinds, min_size=1, max_size=4), seed=seeds)
def test_sparse_is_vanilla_where_all_push_the_same_places(n, k, wide, kind, seed):
    """With equal counters, sparse gives the same bytes and residual as vanilla and as the oracle.

    An earlier round with different counters has left non-zero residuals.
    """
    vanilla, sparse = _servers(n, k, wide, seed)
    slow = Reference(
        lambda p, counter: randomk_encode(p, counter, seed, k, True),
        lambda wire, n: randomk_decode(wire, n, seed, k, wide),
        n,
        wide,
    )
    rest = gradient("normal", n, wide, seed % 1000)
    vanilla.residual[:] = sparse.residual[:] = slow.residual = rest.copy()
    workers = [Coder("randomk", {"k": k}, n, wide, seed=seed) for _ in range(2)]
    for i, what in enumerate(kind):
        total = np.zeros(n, wide)
        for rank, worker in enumerate(workers):
            total = worker.decode(
                worker.encode(gradient(what, n, wide, seed % 1000 + 2 * i + rank)), add_to=total
            )
        with np.errstate(all="ignore"):
            want = slow.encode(
                total, residual=True, only=randomk_places(seed, i + 1, n, amount(n, k))
            )
        wires = [coder.encode(total) for coder in (vanilla, sparse)]
        assert all(
            wire[:8] == want[:8]
            and same(np.frombuffer(wire[8:], wide), np.frombuffer(want[8:], wide))
            for wire in wires
        )
        assert np.array_equal(vanilla.residual, sparse.residual) and same(
            sparse.residual, slow.residual
        )


def test_sparse_reads_only_its_positions():
    """Other elements of sum and residual are neither added nor changed, even if infinite."""
    n, k = 5000, 50
    _, sparse = _servers(n, k, "float32", 3)
    g, before = gradient("normal", n, "float32", 1), gradient("normal", n, "float32", 2)
    places = randomk_places(3, 1, n, k)
    g[min(set(range(n)) - set(places))] = np.inf
    sparse.residual[:] = before
    values = np.frombuffer(sparse.encode(g)[8:], np.float32)
    assert (values == g[places] + before[places]).all()
    before[places] = 0
    assert same(sparse.residual, before)
    # but an overflow at a chosen index resets the whole residual, as in other codecs
    g[places[7]] = np.nan
    sparse.counter = 0
    sparse.encode(g)
    assert not sparse.residual.any()


def test_the_generator_is_splitmix64():
    """The first numbers for seed 1234567 equal those of the C program by splitmix64's author."""
    from bpsx.kernels.cpu.randomk import mixed

    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + i * GAMMA) % 2**64 for i in range(1, 6)]
    assert [splitmix64(state) for state in states] == known
    assert [int(mixed(np.uint64(state))) for state in states] == known


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 3000), k=ks, seed=seeds, counter=st.integers(0, 2**64 - 1))
def test_positions_are_distinct(n, k, seed, counter):
    count = amount(n, k)
    places = randomk_places(seed, counter, n, count)
    assert len(set(places)) == count and min(places) >= 0 and max(places) < n


@pytest.mark.parametrize(("n", "k"), [(10, 3), (10, 9), (7, 7), (64, 5), (97, 13)])
def test_all_elements_are_as_likely(n, k):
    """Bound: 5 standard deviations of a binomial.

    Decoded values, n / k times as large, have the gradient as mean.
    """
    rounds = 4000
    coder = Coder("randomk", {"k": k}, n)
    g = np.arange(1, n + 1, dtype=np.float32)
    total = np.zeros(n)
    for _ in range(rounds):
        total += coder.decode(coder.encode(g))
    likely = total / g / rounds
    assert (abs(likely - k / n) <= 5 * np.sqrt(k / n * (1 - k / n) / rounds) + 1e-12).all()


def test_rounds_and_seeds_differ():
    rounds = {
        tuple(randomk_places(seed, counter, 1000, 10))
        for seed in range(-5, 5)
        for counter in range(50)
    }
    assert len(rounds) == 500


def test_the_counter_is_the_senders():
    """A receiver with a wrong counter decodes correctly, since the message carries the sender's."""
    sender, receiver = (Coder("randomk", {"k": 0.1}, 500, seed=7) for _ in range(2))
    g = gradient("normal", 500, "float32", 2)
    for _ in range(3):
        wire = sender.encode(g)
    decoded = receiver.decode(wire)
    assert same(decoded, randomk_decode(wire, 500, 7, 0.1)) and np.count_nonzero(decoded) == 50
    assert (decoded[decoded != 0] == g[decoded != 0]).all()


@pytest.mark.parametrize("residual", ["", "vanilla", "sparse"])
@settings(max_examples=80, deadline=None)
@given(
    n=sizes,
    k=ks,
    wide=wides,
    rounds=st.lists(st.lists(kinds, min_size=1, max_size=5), min_size=1, max_size=3),
    divisor=st.integers(1, 7),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
    seed=seeds,
)
def test_a_sum_in_one_pass_has_the_bits_of_one_push_after_the_other(
    residual, n, k, wide, rounds, divisor, factor, seed
):
    sparse = residual == "sparse"
    assert_sum_is_that_of_single_pushes(
        "randomk", {"k": k}, n, wide, residual != "", rounds, divisor, factor, seed, sparse
    )


@settings(max_examples=30, deadline=None)
@given(n=sizes, k=ks, wide=wides, seed=st.integers(0, 99))
def test_nothing_is_lost(n, k, wide, seed):
    assert_nothing_is_lost("randomk", {"k": k}, n, wide, seed)


@settings(max_examples=200, deadline=None)
@given(n=sizes, k=ks, wide=wides, seed=st.integers(0, 9999), add=st.booleans())
def test_corrupt_bytes(n, k, wide, seed, add):
    """Any bytes of the right size are valid, with any counter; all other sizes are refused."""
    coder = Coder("randomk", {"k": k}, n, wide)
    g = gradient("normal", n, wide, seed)
    wire = corrupt(coder.encode(g), seed)
    got = coder.decode(wire, add_to=g if add else None)
    try:
        with np.errstate(all="ignore"):
            want = randomk_decode(wire, n, 1, k, wide)
            want = g + want if add else want
    except ValueError:
        assert got is None
    else:
        assert got is not None and (
            np.array_equal(got, want, equal_nan=True) if add else same(got, want)
        )
