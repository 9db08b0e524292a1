"""Helpers for tests of compressors: a codec's functions, called as the core calls them, in memory
with guarded edges; and test data.
"""

from __future__ import annotations

import ctypes as C
import mmap

import numpy as np
from hypothesis import strategies as st

from bpsx.kernels.codecs import ALIKE, N_STATE, SLACK, codec, load_codec, load_summer

_ENCODE = C.CFUNCTYPE(C.c_int64, *[C.c_void_p] * 7, C.c_int64, C.c_uint64, C.c_double, C.c_double)
_DECODE = C.CFUNCTYPE(C.c_int64, C.c_void_p, C.c_int64, *[C.c_void_p] * 3, C.c_int64, C.c_int64)
_SUM = C.CFUNCTYPE(
    C.c_int64, C.c_void_p, *[C.c_int64] * 3, *[C.c_void_p] * 5, C.c_int64, C.c_uint64, C.c_double
)
_CHECK = C.CFUNCTYPE(C.c_int64, *[C.c_void_p] * 2, C.c_int64)
GUARD = 64
#: Sizes around words, blocks and samples.
SIZES = [
    1,
    2,
    3,
    5,
    31,
    32,
    33,
    63,
    64,
    65,
    100,
    1000,
    1023,
    1024,
    1025,
    2047,
    2049,
    4095,
    16383,
    16385,
    40_001,
]
sizes = st.one_of(st.integers(1, 70), st.sampled_from(SIZES))
wides = st.sampled_from(["float32", "float64"])


class Edge:
    """Memory that ends at a page boundary: reading past the end is a segmentation fault."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.size + mmap.PAGESIZE)
        self.bytes = np.frombuffer(self._map, np.uint8)[: self.size]
        protect = C.CDLL(None, use_errno=True).mprotect
        assert (
            protect(C.c_void_p(self.bytes.ctypes.data + self.size), C.c_size_t(mmap.PAGESIZE), 0)
            == 0
        )

    def last(self, size: int) -> np.ndarray:
        """Return the last ``size`` bytes."""
        return self.bytes[self.size - size :]


def guarded(n: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a buffer full of a pattern, and a view of n elements in its middle."""
    whole = np.full((n + 2 * GUARD) * np.dtype(kind).itemsize, 0xA5, np.uint8).view(kind)
    return whole, whole[GUARD : GUARD + n]


def unharmed(whole: np.ndarray) -> bool:
    """Whether the pattern around the middle is unchanged."""
    edge = GUARD * whole.itemsize
    raw = whole.view(np.uint8)
    return bool((raw[:edge] == 0xA5).all() and (raw[-edge:] == 0xA5).all())


class Coder:
    """One partition's codec. ``residual`` and ``momentum``: the core's state, as arrays."""

    def __init__(
        self,
        name: str,
        options: dict,
        n: int,
        wide: str = "float32",
        residual: bool = False,
        momentum: bool = False,
        seed: int = 1,
    ) -> None:
        made = codec(name)
        numbers = made.numbers(made.options(options))
        assert len(numbers) <= ALIKE
        self.options = np.array([*numbers, *[0] * (ALIKE - len(numbers)), 0, seed], np.int64)
        self._compiled = load_codec(name, wide, residual, momentum)
        self._encode, self._decode = _ENCODE(self._compiled.encode), _DECODE(self._compiled.decode)
        self.n, self.wide, self.counter = n, wide, 0
        self.capacity = made.capacity(n, numbers)
        self._room = made.scratch(n, numbers)
        self._scratch = Edge(self._room + 64)
        self._wire = Edge(self.capacity + SLACK)
        self._kept = [guarded(n if used else 0, wide) for used in (residual, momentum)]
        self.residual, self.momentum = (kept[1] for kept in self._kept)
        self.residual[:] = self.momentum[:] = 0
        self.state = np.zeros(N_STATE)

    def _scratch_at(self) -> int:
        """Return the scratch address: aligned to 64 bytes, as near to the end as possible.

        Its content is arbitrary.
        """
        room = self._scratch.last(-(-self._room // 64) * 64)
        room[:] = 0xEE
        return room.ctypes.data

    def encode(self, g: np.ndarray, factor: float = 1.0, mu: float = 0.9) -> bytes:
        """Return the encoded bytes of ``g``."""
        before = g.tobytes()
        kept = [array.ctypes.data for array in (g, self.residual, self.momentum)]
        size = self._encode(*kept, *self._coding(factor), mu)
        assert 0 <= size <= self.capacity
        assert g.tobytes() == before, "the gradient was written to"
        return self._written(size)

    def _coding(self, factor: float) -> tuple:
        """Count an encoding; return the arguments that encoders and summers share, in order."""
        self.counter += 1
        wire = self._wire.last(self.capacity + SLACK)
        wire[:] = 0xEE
        at = wire.ctypes.data, self._scratch_at(), self.state.ctypes.data, self.options.ctypes.data
        return *at, self.n, self.counter, factor

    def _written(self, size: int) -> bytes:
        """Return what was encoded, if nothing else was written to."""
        assert all(unharmed(kept[0]) for kept in self._kept)
        return self._wire.last(self.capacity + SLACK)[:size].tobytes()

    def decode(self, wire: bytes, add_to: np.ndarray | None = None) -> np.ndarray | None:
        """Decode ``wire``, added to ``add_to`` if given; None if the codec refuses it."""
        whole, out = guarded(self.n, self.wide)
        if add_to is not None:
            out[:] = add_to
        edge = Edge(len(wire) + SLACK)
        room = edge.last(len(wire) + SLACK)
        room[: len(wire)] = np.frombuffer(wire, np.uint8)
        room[len(wire) :] = 0x77
        done = self._decode(
            room.ctypes.data,
            len(wire),
            out.ctypes.data,
            self._scratch_at(),
            self.options.ctypes.data,
            self.n,
            add_to is not None,
        )
        assert done in (0, -1)
        assert unharmed(whole), "written outside out"
        assert room[: len(wire)].tobytes() == wire, "the wire was written to"
        return None if done else out.copy()


class Summed(Coder):
    """A lane's codec of one partition, with the function that sums all pushes at once."""

    def __init__(
        self, name: str, options: dict, n: int, wide: str, residual: bool, seed: int = 1
    ) -> None:
        super().__init__(name, options, n, wide, residual, seed=seed)
        made = codec(name)
        self._summing = load_summer(name, wide, residual)
        self._sum, self._check = _SUM(self._summing.sum), None
        if self._summing.check:
            self._check = _CHECK(self._summing.check)
        self.size = made.size(n, made.numbers(made.options(options)), np.dtype(wide).itemsize)

    def accepts(self, push: bytes) -> bool:
        """Whether a lane keeps ``push`` for the sum."""
        if len(push) != self.size:
            return False
        edge = Edge(len(push))
        room = edge.last(len(push))
        room[:] = np.frombuffer(push, np.uint8)
        done = self._check(room.ctypes.data, self.options.ctypes.data, self.n) if self._check else 0
        assert done in (0, -1)
        return done == 0

    def sum(self, pushes: list[bytes], divisor: int, factor: float = 1.0) -> bytes:
        """Return the encoded sum of ``pushes``, by ``divisor``."""
        assert all(map(self.accepts, pushes))
        stride = (self.size + SLACK + 63) // 64 * 64
        edge = Edge(stride * len(pushes))
        room = edge.last(stride * len(pushes))
        room[:] = 0x77
        for i, push in enumerate(pushes):
            room[i * stride : i * stride + len(push)] = np.frombuffer(push, np.uint8)
        given, residual = room.tobytes(), self.residual.ctypes.data
        size = self._sum(
            room.ctypes.data, stride, len(pushes), divisor, residual, *self._coding(factor)
        )
        assert size == self.size
        assert room.tobytes() == given, "the pushes were written to"
        return self._written(size)


def assert_sum_is_that_of_single_pushes(
    name: str,
    options: dict,
    n: int,
    wide: str,
    residual: bool,
    rounds: list[list[str]],
    divisor: int,
    factor: float,
    seed: int,
    alike: bool = False,
    nan_bits: bool = False,
) -> None:
    """Compare a lane that sums all pushes at once with one that decodes them in turn, by bits.

    ``rounds``: the kinds of gradients that are pushed in each. ``nan_bits``: the bits of NaN count.
    """
    slow, fast = (
        Coder(name, options, n, wide, residual, seed=seed),
        Summed(name, options, n, wide, residual, seed=seed),
    )
    slow.options[ALIKE] = fast.options[ALIKE] = alike
    worker = Coder(name, options, n, wide, seed=seed)
    for i, what in enumerate(rounds):
        pushes = []
        for j, kind in enumerate(what):
            worker.counter = i
            pushes.append(worker.encode(gradient(kind, n, wide, seed % 1000 + j)))
        total = slow.decode(pushes[0])
        for push in pushes[1:]:
            total = slow.decode(push, total)
        with np.errstate(all="ignore"):
            total = total / total.dtype.type(divisor)
        want, got = slow.encode(total, factor), fast.sum(pushes, divisor, factor)
        assert same(fast.decode(got), slow.decode(want)) and len(got) == len(want)
        assert got == want or not nan_bits and np.isnan(slow.decode(want)).any()
        assert same(fast.residual, slow.residual) and same(fast.state, slow.state)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether all bits are equal; two NaN are equal whatever their bits."""
    nan = np.isnan(want)
    bits = f"u{want.itemsize}"
    return got.dtype == want.dtype and bool(
        (np.isnan(got) == nan).all() and (got.view(bits)[~nan] == want.view(bits)[~nan]).all()
    )


def _few(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0], n)


#: Kinds of gradients: name -> function of a random generator and n.
KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "wild": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.integers(-30, 30, n),
    "few": _few,
    "equal": lambda rng, n: np.full(n, -1.5),
    "zero": lambda rng, n: np.zeros(n),
    "minus zero": lambda rng, n: np.full(n, -0.0),
    "ascending": lambda rng, n: np.sort(rng.standard_normal(n) ** 2),
    "descending": lambda rng, n: -np.sort(-(rng.standard_normal(n) ** 2)),
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.01),
    "denormal": lambda rng, n: rng.integers(-9, 10, n) * 1e-45,
    "huge": lambda rng, n: np.full(n, 3e38) * rng.choice([-1, 1], n),
}
OVERFLOWS = {"infinity": np.inf, "minus infinity": -np.inf, "nan": np.nan}
kinds = st.sampled_from([*KINDS, *OVERFLOWS])


def gradient(kind: str, n: int, wide: str, seed: int) -> np.ndarray:
    """Return n elements of a kind; an overflow has one or two such elements among normal ones."""
    rng = np.random.default_rng(seed)
    if kind in KINDS:
        return KINDS[kind](rng, n).astype(wide)
    g = KINDS["normal"](rng, n).astype(wide)
    g[rng.integers(0, n, 2)] = OVERFLOWS[kind]
    return g


def corrupt(wire: bytes, seed: int) -> bytes:
    """Return a corrupt copy: shortened, lengthened, with changed bits or words, or random bytes."""
    rng = np.random.default_rng(seed)
    changed = bytearray(wire)
    for _ in range(int(rng.integers(1, 4))):
        what = int(rng.integers(0, 6))
        at = int(rng.integers(0, max(1, len(changed))))
        if what == 0:
            changed = changed[:at]
        elif what == 1:
            changed += rng.bytes(int(rng.integers(1, 40)))
        elif what == 2 and changed:
            changed[at] ^= 1 << int(rng.integers(0, 8))
        elif what == 3:
            changed[at : at + 4] = (
                rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF])
                .astype("<u4")
                .tobytes()[: len(changed) - at]
            )
        elif what == 4:
            changed[at:] = rng.bytes(len(changed) - at)
        elif what == 5:
            changed = bytearray(rng.bytes(len(changed)))
    return bytes(changed)


def assert_nothing_is_lost(name: str, options: dict, n: int, wide: str, seed: int) -> None:
    """Assert that the sent values and the final residual add up to the sum of all gradients."""
    coder = Coder(name, options, n, wide, residual=True)
    sent, given = np.zeros(n), np.zeros(n)
    for i in range(5):
        g = gradient("normal", n, wide, 100 * seed + i)
        given += g
        sent += coder.decode(coder.encode(g))
    assert np.allclose(
        sent + coder.residual, given, rtol=0, atol=1e-5 if wide == "float32" else 1e-13
    )
