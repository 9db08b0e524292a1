"""Compressors: what one must have, the table of those there are, and loading one for an element
type.

A *codec* turns the n elements of a partition into fewer bytes (encode) and those into elements
again (decode). It is one module in ``cpu/`` with a subclass of :class:`Codec`, one in ``cuda/``,
and an oracle in :mod:`bpsx.kernels.reference`. Its functions are Python that Numba compiles; the
core and the servers call them by address, without the GIL, so they must neither allocate nor raise.
CONTRIBUTING.md shows how to add one.

What an encoder does, with g the gradient, e the residual and m the momentum of the partition:

    m = mu * m + g;  g = g + mu * m     if there is momentum (Nesterov's)
    p = g + factor * e                  if there is a residual (error feedback, arXiv 1905.10936)
    wire = encode(p); e = p - decode(wire)

g is not written to. Elements are float32 or float64, the *wide* type of all that can be compressed.
An encoder that meets infinities or NaN sends what makes a decoder give some, and forgets residual
and momentum: an overflow passes, as it does without compression, and is not remembered.
"""

from __future__ import annotations

import importlib
import operator
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bpsx.errors import ConfigError

#: Slots of a codec's options and of its state between rounds. The options' last is the seed; the
#: one before it tells the encoder of a lane that error feedback is "sparse" and that all pushes of
#: this round began with the same counter.
N_OPTIONS, N_STATE = 8, 4
ALIKE, SEED = N_OPTIONS - 2, N_OPTIONS - 1
#: Bytes that an encoder may touch behind the capacity it has asked for, and a decoder behind its
#: input: whole words.
SLACK = 64
#: Those for users, and what they need not name.
COMPRESSORS = ("onebit", "topk", "randomk", "dithering")
_BUILT_IN = (*COMPRESSORS, "half")
#: Keys of ``compression_params`` that are no codec's own.
COMMON = ("compressor", "ef", "momentum", "mu", "seed", "fp16")
_lock = threading.RLock()
_codecs: dict[str, Codec] = {}
_device_codecs: dict[str, DeviceCodec] = {}
_conversions: dict[str, tuple[int, int, tuple[object, ...]]] = {}
_momenta: dict[str, tuple[int, object]] = {}
_loaded: dict[tuple[str, str, bool, bool], Compiled] = {}

#: encode(g, e, m, wire, scratch, state, options, n, counter, factor, mu) -> bytes written. g, e, m:
#: n wide elements; e and m only where the encoder was asked for with them. wire: uint8, of the
#: codec's capacity + SLACK. scratch: uint8, 64-byte aligned. state: N_STATE float64, zero at first
#: and kept from round to round. options: N_OPTIONS int64. counter: of this partition's pushes.
Encoder = Callable[..., int]
#: decode(wire, size, out, scratch, options, n, add) -> 0, or -1 if the bytes are none of this
#: codec's: any bytes must be survived. add: add to out. Who writes the wire need not be a friend:
#: nothing outside wire[:size + SLACK] is read, nothing outside out[:n] is written.
Decoder = Callable[..., int]


class Codec(ABC):
    """A compressor. Instances are stateless and shared."""

    name: str
    #: Keys of ``compression_params`` that are this codec's own.
    keys: tuple[str, ...] = ()
    #: Kinds of error feedback that go with it.
    feedback: tuple[str, ...] = ("vanilla", "corrected")
    #: Whether each sender draws numbers of its own; otherwise all draw the same ones.
    own_noise = False
    #: Whether its bytes begin with the counter (uint64). Then an answer takes the counter of the
    #: pushes, and workers that of the answer.
    counted = False
    #: More elements than a partition may have.
    too_many = 2**63

    @abstractmethod
    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``given`` (own keys only, without those that are None, "" or False), checked and
        completed.

        Raises :class:`~bpsx.errors.ConfigError`.
        """

    @abstractmethod
    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """The same as at most :data:`ALIKE` integers of 64 bits, for the compiled functions."""

    @abstractmethod
    def capacity(self, n: int, numbers: list[int]) -> int:
        """The most bytes that n elements can take."""

    def scratch(self, n: int, numbers: list[int]) -> int:
        """Bytes of scratch memory for n elements."""
        return 0

    def shrinks(self, options: Mapping[str, Any]) -> bool:
        """Whether p - decode(encode(p)) is always less than p: a residual that is not may grow from
        round to round, without end.
        """
        return True

    @abstractmethod
    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """A function for Numba, with or without residual and momentum."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """A function for Numba."""


class DeviceCodec(ABC):
    """The same compressor on a GPU: the same bytes, residual and momentum for the same input, seed
    and counter, but for sums in another order.

    Its functions queue kernels on the stream that they are given and return; they neither wait nor
    allocate. Memory is the device's: an array with ``__cuda_array_interface__``, or an address
    (int). wire and scratch are aligned to 16 bytes, state is as for an :data:`Encoder`. ``wide`` is
    float32 or float64; ``options`` are N_OPTIONS integers as for an :data:`Encoder`, on the host.
    ``stream`` is a raw handle, of the device that is current in the calling thread; a partition's
    calls come in order. n is below 2^31. Sizes and settings are :func:`codec`'s of the same name.
    """

    name: str

    @abstractmethod
    def size(self, wide: str, n: int, options: Sequence[int]) -> int | None:
        """The bytes that an encoder writes if the host knows that beforehand, else None."""

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """Bytes of scratch memory for n elements, for encoding and decoding; what lies there is
        nobody's.
        """
        return 0

    @abstractmethod
    def encode(
        self,
        wide: str,
        g: Any,
        e: Any,
        m: Any,
        wire: Any,
        written: Any,
        scratch: Any,
        state: Any,
        options: Sequence[int],
        n: int,
        counter: int,
        factor: float,
        mu: float,
        stream: int,
    ) -> None:
        """As an :data:`Encoder`; e and m are None without residual and momentum.

        The bytes written: :meth:`size`, or else in ``written`` (int64).
        """

    @abstractmethod
    def decode(
        self,
        wide: str,
        wire: Any,
        size: int,
        out: Any,
        scratch: Any,
        status: Any,
        options: Sequence[int],
        n: int,
        add: bool,
        stream: int,
    ) -> None:
        """As a :data:`Decoder`.

        ``status`` (int32) becomes -1 if the bytes are none of this codec's, else it stays: the
        caller has made it 0.
        """


class Compiled(NamedTuple):
    """Addresses of a codec's functions for one element type, and what keeps them alive."""

    encode: int
    decode: int
    owners: tuple[object, ...]


def register(codec: Codec) -> None:
    """Make a codec known to this process.

    Workers and servers import the modules in ``BPSX_COMPRESSORS`` for that. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError` if its name or one of its keys is taken; a class may be
    registered again.
    """
    kind, name = type(codec), codec.name
    with _lock:
        other = type(_codecs[name]) if name in _codecs else None
        if other is not None and (other.__module__, other.__qualname__) != (
            kind.__module__,
            kind.__qualname__,
        ):
            raise ConfigError(
                f"compressor {name!r} of {kind.__module__} is there already: {other.__module__}"
                " has it"
            )
        if name in _BUILT_IN and kind.__module__ != f"bpsx.kernels.cpu.{name}":
            raise ConfigError(
                f"compressor {name!r} of {kind.__module__} is there already: it is one of"
                " bpsx's own"
            )
        if taken := sorted({*codec.keys} & {*COMMON}):
            raise ConfigError(
                f"compressor {name!r} of {kind.__module__}: its key {taken[0]!r} is there already,"
                " for all compressors"
            )
        _codecs[name] = codec


def register_device(codec: DeviceCodec) -> None:
    """Make a codec's kernels for GPUs known to this process. Thread-safe."""
    with _lock:
        _device_codecs[codec.name] = codec


def device_codec(name: str) -> DeviceCodec:
    """The kernels for GPUs of the codec of that name, which compile when they are first used.

    They need the package numba-cuda.

    Raises :class:`~bpsx.errors.ConfigError` if there are none. Thread-safe.
    """
    with _lock:
        if name in _BUILT_IN and name not in _device_codecs:
            importlib.import_module(f"bpsx.kernels.cuda.{name}")  # registers itself
        if name not in _device_codecs:
            known = dict.fromkeys((*COMPRESSORS, *_device_codecs))
            raise ConfigError(
                f"compressor={name!r} has no kernels for GPUs; those that have are"
                f" {', '.join(known)}"
            )
        return _device_codecs[name]


def codec(name: str) -> Codec:
    """The codec of that name.

    Raises :class:`~bpsx.errors.ConfigError`, which names those there are. Thread-safe.
    """
    with _lock:
        if name in _BUILT_IN and name not in _codecs:
            importlib.import_module(f"bpsx.kernels.cpu.{name}")  # registers itself
        if name not in _codecs:
            known = [n for n in (*COMPRESSORS, *_codecs) if n != "half"]
            raise ConfigError(
                f"compressor={name!r}: allowed are {', '.join(dict.fromkeys(known))}, and what the"
                " modules in BPSX_COMPRESSORS have"
            )
        return _codecs[name]


def import_all() -> None:
    """Import all that :func:`load_codec` and :func:`load_conversion` import, for our own
    compressors.

    Thread-safe.
    """
    importlib.import_module("bpsx.kernels.cpu.jit")
    importlib.import_module("bpsx.kernels.cpu.convert")
    # Numba imports it when it compiles functions that call others
    importlib.import_module("numba.core.boxing")
    for name in _BUILT_IN:
        codec(name)


def load_codec(name: str, wide: str, residual: bool, momentum: bool) -> Compiled:
    """Compile a codec for ``wide`` (float32 or float64), once per process; later processes take it
    from the cache.

    Thread-safe.
    """
    key = name, wide, residual, momentum
    with _lock:
        if key not in _loaded:
            from bpsx.kernels.cpu import jit

            _loaded[key] = jit.load(codec(name), wide, residual, momentum)
        return _loaded[key]


def load_conversion(dtype: str) -> tuple[int, int, tuple[object, ...]]:
    """Addresses of what widens elements of ``dtype`` and narrows them again, 0 where they are wide
    already.

    Thread-safe.
    """
    with _lock:
        if dtype not in _conversions:
            from bpsx.kernels.cpu import convert

            _conversions[dtype] = convert.load(dtype)
        return _conversions[dtype]


def load_momentum(dtype: str) -> int:
    """The address of f(out, g, m, n, mu): m = mu m + g, out = g + mu m; m is of the wide type, out
    and g of ``dtype``.

    Thread-safe.
    """
    with _lock:
        if dtype not in _momenta:
            from bpsx.kernels.cpu import momentum

            _momenta[dtype] = momentum.load(dtype)
        return _momenta[dtype][0]


def checked_flag(key: str, value: Any) -> bool:
    """A bool. Raises :class:`~bpsx.errors.ConfigError` for anything else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: allowed are True and False")
    return value


def checked_number(value: Any) -> int | float | None:
    """An int or a float, of NumPy's kinds, too, as Python's; None for anything else.

    Flags are no numbers.
    """
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return operator.index(value)
    return float(value) if isinstance(value, float | np.floating) else None


def checked_choice(key: str, value: Any, *allowed: str) -> str:
    """One of ``allowed``. Raises :class:`~bpsx.errors.ConfigError` for anything else."""
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}: allowed are {', '.join(map(repr, allowed))}")
    return str(value)


def checked_amount(key: str, value: Any) -> int | float:
    """How many elements to send of each partition: an int >= 1, or a fraction.

    Raises :class:`~bpsx.errors.ConfigError` for anything else.
    """
    number = checked_number(value)
    if number is not None and 0 < number < 1:
        return float(number)
    if number is not None and 1 <= number < 2**63 and number == int(number):
        return int(number)
    wrong = f"{key} is missing" if value is None else f"{key}={value!r}"
    raise ConfigError(
        f"{wrong}: allowed are an integer >= 1 (so many elements of each partition) and a fraction,"
        f" 0 < {key} < 1"
    )


def amount_numbers(amount: int | float) -> list[int]:
    """What :func:`checked_amount` gave, as two integers: the number, or the bits of the fraction,
    and whether it is one.
    """
    if isinstance(amount, float):
        return [struct.unpack("<q", struct.pack("<d", amount))[0], 1]
    return [amount, 0]


def amount_of(n: int, numbers: list[int]) -> int:
    """So many of n elements; at least one.

    The kernels compute the same: a product of float64, truncated.
    """
    wanted = (
        int(struct.unpack("<d", struct.pack("<q", numbers[0]))[0] * n) if numbers[1] else numbers[0]
    )
    return min(max(wanted, 1), n)
