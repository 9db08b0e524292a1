"""Compressors: their interface, their registry, and compiled codecs per element type.

A *codec* encodes the n elements of a partition into fewer bytes and decodes them again. It is one
module in ``cpu/`` with a subclass of :class:`Codec`, one module in ``cuda/``, and an oracle in
:mod:`bpsx.kernels.reference`. Numba compiles its Python functions. The core and the servers call
them by address, without the GIL, so the functions must neither allocate nor raise. CONTRIBUTING.md
shows how to add a codec.

An encoder computes, with g the gradient, e the residual and m the momentum of the partition:

    m = mu * m + g;  g = g + mu * m     with momentum (Nesterov's)
    p = g + factor * e                  with a residual (error feedback, arXiv 1905.10936)
    wire = encode(p); e = p - decode(wire)

It does not write to g. Elements are float32 or float64, the *wide* types of all compressible types.
On infinities or NaN an encoder sends bytes that decode to infinities or NaN, and clears residual
and momentum: an overflow shows in the result, as without compression, but leaves no trace in the
state.
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

#: Lengths of a codec's options and of its state between rounds. The last option is the seed. The
#: option before it is a flag for a lane's encoder: error feedback is "sparse", and all pushes of
#: this round began with the same counter.
N_OPTIONS, N_STATE = 8, 4
ALIKE, SEED = N_OPTIONS - 2, N_OPTIONS - 1
#: Bytes that an encoder may touch beyond its capacity, and a decoder beyond its input, since both
#: work in whole words.
SLACK = 64
#: Built-in compressors that users can name, and all built-in ones.
COMPRESSORS = ("onebit", "topk", "randomk", "dithering")
_BUILT_IN = (*COMPRESSORS, "half")
#: Keys of ``compression_params`` that are common to all codecs.
COMMON = ("compressor", "ef", "momentum", "mu", "seed", "fp16")
_lock = threading.RLock()
_codecs: dict[str, Codec] = {}
_device_codecs: dict[str, DeviceCodec] = {}
_conversions: dict[str, tuple[int, int, tuple[object, ...]]] = {}
_momenta: dict[str, tuple[int, object]] = {}
_loaded: dict[tuple[str, str, bool, bool], Compiled] = {}

#: encode(g, e, m, wire, scratch, state, options, n, counter, factor, mu) -> bytes written. g, e, m:
#: n wide elements; e and m only if the encoder was requested with residual and momentum. wire:
#: uint8, codec's capacity + SLACK. scratch: uint8, 64-byte aligned. state: N_STATE float64, zero at
#: first and kept between rounds. options: N_OPTIONS int64. counter: number of this partition's
#: push.
Encoder = Callable[..., int]
#: decode(wire, size, out, scratch, options, n, add) -> 0, or -1 if this codec cannot have written
#: the bytes. add: add to out instead of setting it. The sender may be hostile: a decoder must
#: survive any bytes, reads only wire[:size + SLACK] and writes only out[:n].
Decoder = Callable[..., int]


class Codec(ABC):
    """Interface of a compressor. Instances are stateless and shared."""

    name: str
    #: This codec's own keys of ``compression_params``.
    keys: tuple[str, ...] = ()
    #: Kinds of error feedback that this codec supports.
    feedback: tuple[str, ...] = ("vanilla", "corrected")
    #: Whether each sender draws its own random numbers; otherwise all senders draw the same.
    own_noise = False
    #: Whether the wire begins with the counter (uint64). If so, a reply takes the pushes' counter,
    #: and workers take the reply's.
    counted = False
    #: A partition must have fewer elements than this.
    too_many = 2**63

    @abstractmethod
    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``given`` checked, with defaults filled in.

        ``given`` has this codec's own keys only, without values of None, "" or False. Raises
        :class:`~bpsx.errors.ConfigError`.
        """

    @abstractmethod
    def numbers(self, options: Mapping[str, Any]) -> list[int]:
        """Return the options as at most :data:`ALIKE` 64-bit integers, for compiled functions."""

    @abstractmethod
    def capacity(self, n: int, numbers: list[int]) -> int:
        """Return the most bytes that n elements can take."""

    def scratch(self, n: int, numbers: list[int]) -> int:
        """Return the bytes of scratch memory that n elements need."""
        return 0

    def shrinks(self, options: Mapping[str, Any]) -> bool:
        """Whether p - decode(encode(p)) is always less than p.

        If it is not, a residual may grow from round to round without bound.
        """
        return True

    @abstractmethod
    def encoder(self, residual: bool, momentum: bool) -> Encoder:
        """Return a function for Numba, with or without residual and momentum."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return a function for Numba."""


class DeviceCodec(ABC):
    """Interface of the same compressor on a GPU.

    For the same input, seed and counter it gives the same bytes, residual and momentum as the
    :class:`Codec`, except that sums may be in another order.

    Its functions queue kernels on the given stream and return; they neither wait nor allocate.
    Memory is the device's: an array with ``__cuda_array_interface__``, or an address (int). wire
    and scratch are aligned to 16 bytes; state is as for an :data:`Encoder`. ``wide`` is float32 or
    float64. ``options`` are N_OPTIONS integers on the host, as for an :data:`Encoder`. ``stream``
    is a raw handle of the calling thread's current device. Calls for one partition come in order. n
    is below 2^31. Sizes and settings are those of the :func:`codec` of the same name.
    """

    name: str

    @abstractmethod
    def size(self, wide: str, n: int, options: Sequence[int]) -> int | None:
        """Return the bytes that an encoder writes, or None if the host cannot know the number."""

    def scratch(self, n: int, options: Sequence[int]) -> int:
        """Return the bytes of scratch memory that encoding and decoding n elements need.

        Scratch memory keeps nothing between calls.
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
        """Queue the work of an :data:`Encoder`; e and m are None without residual and momentum.

        Where :meth:`size` is None, the kernel stores the number of bytes written in ``written``
        (int64).
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
        """Queue the work of a :data:`Decoder`.

        ``status`` (int32) becomes -1 if this codec cannot have written the bytes. Otherwise it is
        left alone: the caller sets it to 0 beforehand.
        """


class Compiled(NamedTuple):
    """Addresses of a codec's functions for one element type; ``owners`` keep them alive."""

    encode: int
    decode: int
    owners: tuple[object, ...]


def register(codec: Codec) -> None:
    """Register a codec in this process.

    The modules in ``BPSX_COMPRESSORS``, which workers and servers import, call this. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError` if its name is taken or one of its keys is in
    :data:`COMMON`. The same class may be registered again.
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
    """Register a codec's GPU kernels in this process. Thread-safe."""
    with _lock:
        _device_codecs[codec.name] = codec


def device_codec(name: str) -> DeviceCodec:
    """Return the GPU kernels of the codec called ``name``, which compile on first use.

    They need the package numba-cuda. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError` if the codec has no GPU kernels.
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
    """Return the codec called ``name``. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError`, which lists the known codecs.
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
    """Import all modules that loading a built-in codec or a conversion needs.

    Thread-safe.
    """
    importlib.import_module("bpsx.kernels.cpu.jit")
    importlib.import_module("bpsx.kernels.cpu.convert")
    # Numba imports it when it compiles functions that call others.
    importlib.import_module("numba.core.boxing")
    for name in _BUILT_IN:
        codec(name)


def load_codec(name: str, wide: str, residual: bool, momentum: bool) -> Compiled:
    """Compile a codec for ``wide`` (float32 or float64), or load it from the cache.

    Each process does so once. Thread-safe.
    """
    key = name, wide, residual, momentum
    with _lock:
        if key not in _loaded:
            from bpsx.kernels.cpu import jit

            _loaded[key] = jit.load(codec(name), wide, residual, momentum)
        return _loaded[key]


def load_conversion(dtype: str) -> tuple[int, int, tuple[object, ...]]:
    """Return the addresses of the functions that widen elements of ``dtype`` and narrow them again.

    The third item keeps them alive. Both addresses are 0 if ``dtype`` is a wide type. Thread-safe.
    """
    with _lock:
        if dtype not in _conversions:
            from bpsx.kernels.cpu import convert

            _conversions[dtype] = convert.load(dtype)
        return _conversions[dtype]


def load_momentum(dtype: str) -> int:
    """Return the address of f(out, g, m, n, mu): m = mu m + g, out = g + mu m.

    m is of the wide type, out and g of ``dtype``. Thread-safe.
    """
    with _lock:
        if dtype not in _momenta:
            from bpsx.kernels.cpu import momentum

            _momenta[dtype] = momentum.load(dtype)
        return _momenta[dtype][0]


def checked_flag(key: str, value: Any) -> bool:
    """Return ``value``, a bool. Raises :class:`~bpsx.errors.ConfigError` for anything else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: allowed are True and False")
    return value


def checked_number(value: Any) -> int | float | None:
    """Return an int or float, also one of NumPy's, as Python's; None for anything else.

    Bools do not count as numbers.
    """
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return operator.index(value)
    return float(value) if isinstance(value, float | np.floating) else None


def checked_choice(key: str, value: Any, *allowed: str) -> str:
    """Return ``value``, one of ``allowed``.

    Raises :class:`~bpsx.errors.ConfigError` for anything else.
    """
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}: allowed are {', '.join(map(repr, allowed))}")
    return str(value)


def checked_amount(key: str, value: Any) -> int | float:
    """Return how many elements to send of each partition: an int >= 1, or a fraction.

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
    """Return the result of :func:`checked_amount` as two integers.

    The first is the number, or the fraction's bits as a float64; the second is 1 for a fraction,
    else 0.
    """
    if isinstance(amount, float):
        return [struct.unpack("<q", struct.pack("<d", amount))[0], 1]
    return [amount, 0]


def amount_of(n: int, numbers: list[int]) -> int:
    """Return the number of elements out of n, at least 1, that :func:`amount_numbers` stands for.

    The kernels compute the same: a product of float64, truncated.
    """
    wanted = (
        int(struct.unpack("<d", struct.pack("<q", numbers[0]))[0] * n) if numbers[1] else numbers[0]
    )
    return min(max(wanted, 1), n)
