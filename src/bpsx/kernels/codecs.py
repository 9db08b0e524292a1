"""Compressors: their registry, and compiled codecs per element type.

:mod:`bpsx.kernels.codec` has the interface. CONTRIBUTING.md shows how to add a codec.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bpsx.errors import ConfigError
from bpsx.kernels.cache import compiled, identity
from bpsx.kernels.codec import ALIKE as ALIKE
from bpsx.kernels.codec import MOST_PUSHES as MOST_PUSHES
from bpsx.kernels.codec import N_OPTIONS as N_OPTIONS
from bpsx.kernels.codec import N_STATE as N_STATE
from bpsx.kernels.codec import SEED as SEED
from bpsx.kernels.codec import SLACK as SLACK
from bpsx.kernels.codec import Checker as Checker
from bpsx.kernels.codec import Codec as Codec
from bpsx.kernels.codec import Compiled as Compiled
from bpsx.kernels.codec import Compressor as Compressor
from bpsx.kernels.codec import Decoder as Decoder
from bpsx.kernels.codec import DeviceCodec as DeviceCodec
from bpsx.kernels.codec import Encoder as Encoder
from bpsx.kernels.codec import Summer as Summer
from bpsx.kernels.codec import Summing as Summing

#: Built-in compressors that users can name, and all built-in ones.
COMPRESSORS = ("onebit", "topk", "randomk", "dithering", "powersgd")
_BUILT_IN = (*COMPRESSORS, "half")
_ON_GPUS = tuple(name for name in _BUILT_IN if name != "powersgd")
#: Keys of ``compression_params`` that are common to all codecs.
COMMON = ("compressor", "ef", "momentum", "mu", "seed", "fp16")
_lock = threading.RLock()
_codecs: dict[str, Compressor] = {}
_device_codecs: dict[str, DeviceCodec] = {}
_conversions: dict[str, tuple[int, int, tuple[object, ...]]] = {}
_momenta: dict[str, tuple[int, object]] = {}
_loaded: dict[tuple[str, str, bool, bool], Compiled] = {}
_summing: dict[tuple[str, str, bool], Summing] = {}


def register(codec: Compressor) -> None:
    """Register a compressor in this process.

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
                f"compressor {name!r} of {kind.__module__}: the name is taken by {other.__module__}"
            )
        if name in _BUILT_IN and kind.__module__ != f"bpsx.kernels.cpu.{name}":
            raise ConfigError(
                f"compressor {name!r} of {kind.__module__}: the name is taken by one of bpsx's own"
                " compressors"
            )
        if taken := sorted({*codec.keys} & {*COMMON}):
            raise ConfigError(
                f"compressor {name!r} of {kind.__module__}: its key {taken[0]!r} is taken: all"
                " compressors have it"
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
        if name in _ON_GPUS and name not in _device_codecs:
            importlib.import_module(f"bpsx.kernels.cuda.{name}")  # registers itself
        if name not in _device_codecs:
            known = dict.fromkeys((*_ON_GPUS[:-1], *_device_codecs))
            raise ConfigError(
                f"compressor={name!r} has no kernels for GPUs; expected one of {', '.join(known)}"
            )
        return _device_codecs[name]


def codec(name: str) -> Codec:
    """Return the codec called ``name``. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError` if there is none.
    """
    found = compressor(name)
    if not isinstance(found, Codec):
        raise ConfigError(
            f"compressor={name!r} has no codec: workers exchange factors, which are not encoded"
        )
    return found


def compressor(name: str) -> Compressor:
    """Return the compressor called ``name``. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError`, which lists the known compressors.
    """
    with _lock:
        if name in _BUILT_IN and name not in _codecs:
            importlib.import_module(f"bpsx.kernels.cpu.{name}")  # registers itself
        if name not in _codecs:
            known = [n for n in (*COMPRESSORS, *_codecs) if n != "half"]
            raise ConfigError(
                f"compressor={name!r}: expected one of {', '.join(dict.fromkeys(known))}, or a"
                " compressor of the modules in BPSX_COMPRESSORS"
            )
        return _codecs[name]


def import_all() -> None:
    """Import all modules that loading a built-in codec or a conversion needs.

    Thread-safe.
    """
    importlib.import_module("bpsx.kernels.cpu.jit")
    importlib.import_module("bpsx.kernels.cpu.convert")
    # Numba imports as much again for the first function, and this for functions that call others.
    importlib.import_module("numba").cfunc("void()")(lambda: None)
    importlib.import_module("numba.core.boxing")
    for name in _BUILT_IN:
        compressor(name)


def load_codec(name: str, wide: str, residual: bool, momentum: bool) -> Compiled:
    """Compile a codec for ``wide`` (float32 or float64), or load it from the cache.

    Each process does so once. Thread-safe.
    """
    key = name, wide, residual, momentum
    with _lock:
        if key not in _loaded:
            used = codec(name)
            bodies = ("encode", used.encoder(residual, momentum)), ("decode", used.decoder())
            made = [
                _function(name, kind, wide, (residual, momentum), body) for kind, body in bodies
            ]
            _loaded[key] = Compiled(made[0].address, made[1].address, tuple(made))
        return _loaded[key]


def load_summer(name: str, wide: str, residual: bool) -> Summing:
    """Compile a codec's summer and checker, if it has them, or load them from the cache.

    Thread-safe. ``wide``: float32 or float64.
    """
    key = name, wide, residual
    with _lock:
        if key not in _summing:
            used = codec(name)
            sums = used.summer(residual) if _sums_itself(type(used)) else None
            checks = used.checker() if sums is not None else None
            made = [
                None if body is None else _function(name, kind, wide, parts, body)
                for kind, parts, body in (("sum", (residual,), sums), ("check", (), checks))
            ]
            addresses = [0 if function is None else function.address for function in made]
            _summing[key] = Summing(addresses[0], addresses[1], tuple(made))
        return _summing[key]


def _sums_itself(kind: type[Codec]) -> bool:
    """Whether a class's summer belongs to its encoder and decoder.

    Not if it inherits the summer, but has an encoder or decoder of its own.
    """
    order = kind.__mro__
    summer, *others = (
        next(place for place, one in enumerate(order) if name in vars(one))
        for name in ("summer", "encoder", "decoder")
    )
    return summer <= min(others)


def _function(
    name: str, kind: str, wide: str, parts: tuple[bool, ...], body: Callable[..., int]
) -> Any:
    return compiled(
        f"{body.__name__}-{name}",
        itertools.chain((wide, *parts), identity(body)),
        functools.partial(_compile_codec, wide, kind, body),
    )


def _compile_codec(wide: str, kind: str, body: Callable[..., int]) -> tuple[Any, Any]:
    from bpsx.kernels.cpu import jit

    return jit.compile_codec(wide, kind, body)


def load_conversion(dtype: str) -> tuple[int, int, tuple[object, ...]]:
    """Return the addresses of the functions that widen elements of ``dtype`` and narrow them again.

    The third item keeps them alive. Both addresses are 0 if ``dtype`` is a wide type. Thread-safe.
    """
    with _lock:
        if dtype not in _conversions:
            halves = dtype in ("float16", "bfloat16")
            made = tuple(
                compiled(name, (dtype,), functools.partial(_compile_conversion, dtype, widens))
                for name, widens in (("widen", True), ("narrow", False))
                if halves
            )
            widen, narrow = (function.address for function in made) if made else (0, 0)
            _conversions[dtype] = widen, narrow, made
        return _conversions[dtype]


def _compile_conversion(dtype: str, widens: bool) -> tuple[Any, Any]:
    from bpsx.kernels.cpu import convert

    return convert.compile_conversion(dtype, widens)


def load_momentum(dtype: str) -> int:
    """Return the address of f(out, g, m, n, mu): m = mu m + g, out = g + mu m.

    m is of the wide type, out and g of ``dtype``. Thread-safe.
    """
    with _lock:
        if dtype not in _momenta:
            made = compiled("nesterov", (dtype,), functools.partial(_compile_momentum, dtype))
            _momenta[dtype] = made.address, made
        return _momenta[dtype][0]


def _compile_momentum(dtype: str) -> tuple[Any, Any]:
    from bpsx.kernels.cpu import momentum

    return momentum.compile_momentum(dtype)


def checked_flag(key: str, value: Any) -> bool:
    """Return ``value``, a bool. Raises :class:`~bpsx.errors.ConfigError` for anything else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: expected True or False")
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
        raise ConfigError(f"{key}={value!r}: expected one of {', '.join(map(repr, allowed))}")
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
        f"{wrong}: expected an integer >= 1 (number of elements of each partition) or a"
        f" fraction, 0 < {key} < 1"
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
