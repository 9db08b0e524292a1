"""onebit against its oracle: equal sign bits, equal magnitude up to rounding; and corrupt bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.errors import ConfigError
from bpsx.kernels.codecs import codec
from bpsx.kernels.reference import Reference, onebit_decode, onebit_encode
from support.codec_tools import (
    Coder,
    assert_sum_is_that_of_single_pushes,
    corrupt,
    gradient,
    kinds,
    same,
    sizes,
    wides,
)

#: Tolerance of float32 sums of blocks of 1024 that are then added in float64; the order of
#: additions depends on the processor.
ROUNDING = {"float32": 1e-5, "float64": 1e-13}


class Step:
    """The oracle, which takes over the kernel's magnitude if that equals its own up to rounding.

    So both stay equal over many rounds.
    """

    def __init__(self, n: int, wide: str, scaling: bool) -> None:
        self.wide, self.scaling = wide, scaling
        self.head = b""
        self.reference = Reference(
            self._encode, lambda wire, size: onebit_decode(wire, size, wide), n, wide
        )

    def _encode(self, p: np.ndarray, counter: int) -> bytes:
        wire = onebit_encode(p, self.scaling)
        got, want = (np.frombuffer(head[:8], np.float64)[0] for head in (self.head, wire))
        assert (
            np.isnan(got) if np.isnan(want) else abs(got - want) <= abs(want) * ROUNDING[self.wide]
        ), (got, want)
        return self.head + wire[8:]


@pytest.mark.parametrize("residual", [False, True], ids=["", "ef"])
@pytest.mark.parametrize("momentum", [False, True], ids=["", "nesterov"])
@settings(max_examples=80, deadline=None)
@given(
    n=sizes,
    scaling=st.booleans(),
    wide=wides,
    kind=st.lists(kinds, min_size=1, max_size=4),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
    seed=st.integers(0, 99),
)
def test_bytes_residual_and_momentum_are_the_oracles(
    residual, momentum, n, scaling, wide, kind, factor, seed
):
    coder, step = (
        Coder("onebit", {"scaling": scaling}, n, wide, residual, momentum),
        Step(n, wide, scaling),
    )
    for i, what in enumerate(kind):
        g = gradient(what, n, wide, 10 * seed + i)
        wire = coder.encode(g, factor, 0.9)
        step.head = wire[:8]
        with np.errstate(all="ignore"):
            want = step.reference.encode(
                g, residual=residual, momentum=momentum, factor=factor, mu=0.9
            )
            decoded = onebit_decode(want, n, wide)
            total = g + decoded
        assert wire == want
        assert same(coder.decode(wire), decoded)
        assert np.array_equal(coder.decode(wire, add_to=g), total, equal_nan=True)
        assert not momentum or same(coder.momentum, step.reference.momentum)
        assert not residual or same(left_of(coder, wire), step.reference.residual)


def left_of(coder: Coder, wire: bytes) -> np.ndarray:
    """Return the residual.

    The kernel keeps what it has sent, and subtracts what decodes from it in the next round.
    """
    return coder.residual - np.copysign(coder.state[0], coder.residual).astype(coder.wide)


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 31, 32, 1023, 1024, 1055, 1056, 1059])
def test_an_overflow_passes_and_is_not_remembered(scaling, wide, value, at):
    coder = Coder("onebit", {"scaling": scaling}, 1060, wide, residual=True, momentum=True)
    g = gradient("normal", 1060, wide, 1)
    coder.encode(g)
    bad = g.copy()
    bad[at] = value
    assert np.isnan(coder.decode(coder.encode(bad))).all()
    assert not coder.residual.any() and not coder.momentum.any() and not coder.state.any()
    new = Coder("onebit", {"scaling": scaling}, 1060, wide, residual=True, momentum=True)
    assert coder.encode(g) == new.encode(g)


@pytest.mark.parametrize("residual", [False, True], ids=["", "ef"])
@pytest.mark.parametrize("momentum", [False, True], ids=["", "nesterov"])
@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaled"])
def test_large_numbers_are_no_overflow(scaling, momentum, residual):
    """Sums of a block that would overflow in float32 do not overflow."""
    coder = Coder("onebit", {"scaling": scaling}, 3000, "float32", residual, momentum)
    g = np.full(3000, 1e38, np.float32)
    decoded = coder.decode(coder.encode(g, mu=0.5))
    assert np.allclose(decoded, (1.5e38 if momentum else 1e38) if scaling else 1.0, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(n=sizes, wide=wides, scaling=st.booleans(), seed=st.integers(0, 99))
def test_nothing_is_lost(n, wide, scaling, seed):
    """The sum of all gradients equals what was sent plus the residual."""
    coder = Coder("onebit", {"scaling": scaling}, n, wide, residual=True)
    sent, given_ = np.zeros(n), np.zeros(n)
    for i in range(5):
        g = gradient("normal", n, wide, 100 * seed + i)
        given_ += g
        wire = coder.encode(g)
        sent += coder.decode(wire)
    assert np.allclose(
        sent + left_of(coder, wire), given_, rtol=0, atol=1e-5 if wide == "float32" else 1e-13
    )


@settings(max_examples=150, deadline=None)
@given(n=sizes, wide=wides, seed=st.integers(0, 9999), add=st.booleans())
def test_corrupt_bytes(n, wide, seed, add):
    """Any bytes of the right size are valid; all other sizes are refused."""
    coder = Coder("onebit", {"scaling": True}, n, wide)
    g = gradient("normal", n, wide, seed)
    size = 8 + 4 * (-(-n // 32))
    wire = corrupt(coder.encode(g), seed)
    got = coder.decode(wire, add_to=g if add else None)
    if len(wire) != size:
        assert got is None
        return
    with np.errstate(all="ignore"):
        want = onebit_decode(wire, n, wide)
        assert np.array_equal(got, g + want if add else want, equal_nan=True)


@pytest.mark.parametrize("scaling", [1, 0, "True", 2.0, [True]])
def test_a_wrong_scaling(scaling):
    with pytest.raises(ConfigError, match="scaling=.*expected True or False"):
        codec("onebit").options({"scaling": scaling})


@pytest.mark.parametrize("residual", [False, True], ids=["", "ef"])
def test_a_sum_beyond_float64_is_an_overflow(residual):
    coder = Coder("onebit", {"scaling": True}, 3000, "float64", residual)
    assert np.isnan(coder.decode(coder.encode(np.full(3000, 1e306)))).all()
    assert not coder.residual.any() and not coder.state.any()


@pytest.mark.parametrize("residual", [False, True], ids=["", "ef"])
@settings(max_examples=80, deadline=None)
@given(
    n=sizes,
    scaling=st.booleans(),
    wide=wides,
    rounds=st.lists(st.lists(kinds, min_size=1, max_size=5), min_size=1, max_size=3),
    divisor=st.integers(1, 7),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
    seed=st.integers(0, 99),
)
def test_a_sum_in_one_pass_has_the_bits_of_one_push_after_the_other(
    residual, n, scaling, wide, rounds, divisor, factor, seed
):
    assert_sum_is_that_of_single_pushes(
        "onebit",
        {"scaling": scaling},
        n,
        wide,
        residual,
        rounds,
        divisor,
        factor,
        seed,
        nan_bits=True,
    )
