"""CompressionSpec settings: checks ``compression_params`` and makes the line that servers get.

Workers and servers must agree on that line. Only this module interprets the keys common to all
compressors; each codec (:mod:`bpsx.kernels.codecs`) interprets its own. Pure except for loading
kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bpsx.dtypes import BY_NAME
from bpsx.errors import ConfigError
from bpsx.kernels.codecs import (
    ALIKE,
    COMMON,
    COMPRESSORS,
    Compressor,
    Summing,
    checked_choice,
    checked_flag,
    checked_number,
    codec,
    compressor,
    load_codec,
    load_conversion,
    load_momentum,
    load_summer,
)

log = logging.getLogger("bpsx.compression.spec")
_MASK = 2**64 - 1
#: Ignored keys already warned about, each with the compressor that ignores it.
_told: set[tuple[str, str]] = set()
DEFAULT_MU = 0.9
#: Element types that can be compressed.
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class CompressionSpec:
    """Compression of one name.

    ``compressor`` "": no compressor; then only ``fp16`` and ``momentum`` have an effect. ``mu``:
    the momentum's factor.
    """

    compressor: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    ef: str = ""
    momentum: str = ""
    mu: float = DEFAULT_MU
    seed: int = 0
    fp16: bool = False

    def text(self) -> str:
        """Return one line of JSON, equal for equal compressions; :func:`parse` reads it."""
        said = {
            "compressor": self.compressor,
            **dict(self.options),
            "ef": self.ef,
            "momentum": self.momentum,
            "seed": self.seed,
            "fp16": self.fp16,
        }
        if self.momentum:
            said["mu"] = self.mu
        if self.seed == 0:
            del said["seed"]
        return json.dumps(
            {k: v for k, v in said.items() if not (v is False or isinstance(v, str) and v == "")},
            sort_keys=True,
        )


NONE = CompressionSpec()


def compression(
    params: Mapping[str, Any] | None, what: str = "compression_params"
) -> CompressionSpec:
    """Return users' ``params`` checked and completed; ``what`` names their origin in errors.

    Values of None, "" and False count as not given. Raises :class:`~bpsx.errors.ConfigError` (a
    :class:`ValueError`), which names key, value and the allowed values.
    """
    if params is None:
        return NONE
    if not isinstance(params, Mapping):
        raise ConfigError(f"{what}: expected a mapping, not {type(params).__name__}")
    given = {
        k: v
        for k, v in params.items()
        if v is not None and v is not False and not (isinstance(v, str) and v == "")
    }
    try:
        return _checked(given)
    except ConfigError as e:
        raise ConfigError(f"{what}: {e}") from None


def _checked(given: dict[str, Any]) -> CompressionSpec:
    name = given.get("compressor", "")
    if not isinstance(name, str):
        raise ConfigError(f"compressor={name!r}: must be a name")
    known = compressor(name) if name else None
    given = _without_others(given, known)
    _check_keys(given, known)
    ef = (
        checked_choice("ef", given["ef"], *(known.feedback if known else ()))
        if "ef" in given
        else ""
    )
    momentum = (
        checked_choice("momentum", given["momentum"], "nesterov") if "momentum" in given else ""
    )
    options = known.options({k: v for k, v in given.items() if k in known.keys}) if known else {}
    return CompressionSpec(
        name,
        tuple(sorted(options.items())),
        ef,
        momentum,
        _factor(given.get("mu", DEFAULT_MU)),
        _seed(given.get("seed", 0)),
        checked_flag("fp16", given.get("fp16", False)),
    )


def _without_others(given: dict[str, Any], known: Compressor | None) -> dict[str, Any]:
    """Return ``given`` without options that belong to other compressors only.

    BytePS ignores such options, and its scripts always pass ``k``. Warns once about each. Raises
    :class:`~bpsx.errors.ConfigError` for a value that the other compressor would not accept either.
    """
    taken = {*COMMON, *(known.keys if known else ())}
    kept = dict(given)
    for key, value in given.items():
        every = map(compressor, COMPRESSORS) if key not in taken else ()
        owners = [other for other in every if key in other.keys]
        if not owners:
            continue
        _check_for_any(owners, key, value)
        del kept[key]
        place = f"compressor={known.name!r}" if known else "no compressor"
        if (key, place) not in _told:
            _told.add((key, place))
            log.warning(
                "compression_params: %s=%r is ignored: it has no meaning with %s, only with %s",
                key,
                value,
                place,
                ", ".join(repr(c.name) for c in owners),
            )
    return kept


def _check_for_any(owners: list[Compressor], key: str, value: Any) -> None:
    """Check that one of ``owners`` accepts ``value`` for ``key``; if not, raise the first error."""
    refused: ConfigError | None = None
    for owner in owners:
        needed = {"k": 2} if "k" in owner.keys else {}
        try:
            owner.options({**needed, key: value})
            return
        except ConfigError as e:
            refused = refused or e
    assert refused is not None
    raise refused


def _check_keys(given: dict[str, Any], known: Compressor | None) -> None:
    every = {*COMMON, *(known.keys if known else ())}
    for key, value in given.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r} is not a key; expected one of {', '.join(sorted(every))}")
        if key in every:
            continue
        raise ConfigError(
            f"{key}={value!r}: there is no such key; expected one of {', '.join(sorted(every))}"
        )
    if known is None:
        for key in ("ef", "momentum", "mu"):
            if key in given:
                raise ConfigError(
                    f"{key}={given[key]!r} needs a compressor; give one or omit {key}"
                )
    if "mu" in given and "momentum" not in given:
        raise ConfigError(f"mu={given['mu']!r} needs momentum; give momentum='nesterov' or omit mu")


def _factor(mu: Any) -> float:
    number = checked_number(mu)
    if number is None or not 0 < number < 1:
        raise ConfigError(f"mu={mu!r}: expected a number between 0 and 1")
    return float(number)


def _seed(seed: Any) -> int:
    number = checked_number(seed)
    if not isinstance(number, int) or not 0 <= number <= _MASK:
        raise ConfigError(f"seed={seed!r}: expected an integer from 0 to {_MASK}")
    return number


def warm(given: CompressionSpec, dtype: str) -> None:
    """Compile the kernels that ``given`` needs for ``dtype`` on first use. Thread-safe."""
    make(given, dtype, BY_NAME[dtype].itemsize, 0, 0)


def parse(text: str) -> CompressionSpec:
    """Return the compression that :meth:`CompressionSpec.text` has written.

    Raises :class:`~bpsx.errors.ConfigError` for anything else.
    """
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ConfigError("a compression must be a JSON object")
    return compression(said, "compression")


def effective(
    given: CompressionSpec, dtype: str, nbytes: int, least: int, pays: bool = True
) -> CompressionSpec | None:
    """Return the compression of a tensor of ``nbytes`` bytes: ``given``, halves, or None.

    Tensors of less than ``least`` bytes are not compressed, nor those for which ``given`` does not
    pay. The result is the same object for the
    same ``given``, so callers can compare it by identity.
    """
    if given.compressor and nbytes >= least and pays:
        return given
    return _HALF if given.fp16 and dtype in ("float32", "float64") else None


_HALF = CompressionSpec("half")


def is_halved(used: CompressionSpec) -> bool:
    """Whether a tensor with this compression is sent in halves, and nothing else is done to it."""
    return used == _HALF


def check_dtype(given: CompressionSpec, dtype: str, what: str) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` unless elements of ``dtype`` can be compressed."""
    if dtype not in FLOATS:
        raise ConfigError(
            f"{what}: compressor={given.compressor!r}: elements of {dtype} cannot be compressed;"
            f" allowed: {', '.join(FLOATS)}"
        )


def check_fits(
    given: CompressionSpec, dtype: str, nbytes: int, what: str, partition_bytes: int
) -> None:
    """Check that a tensor of ``nbytes`` bytes of ``dtype`` can be compressed as ``given`` says.

    ``partition_bytes``: most bytes of its partitions. ``what`` names the tensor in errors. Raises
    :class:`~bpsx.errors.ConfigError` if it cannot be.
    """
    check_dtype(given, dtype, what)
    n, k = nbytes // BY_NAME[dtype].itemsize, dict(given.options).get("k")
    if isinstance(k, int) and given.compressor in ("topk", "randomk") and k > n:
        raise ConfigError(f"{what}: k={k} is more than the {n} elements of the tensor")
    try:
        _check_count(given, min(nbytes, partition_bytes) // BY_NAME[dtype].itemsize)
    except ConfigError as e:
        raise ConfigError(
            f"{what}: {e}; reduce BYTEPS_PARTITION_BYTES: compressed partitions have"
            f" {partition_bytes} bytes"
        ) from None


def _check_count(given: CompressionSpec, n: int) -> None:
    """Raise :class:`~bpsx.errors.ConfigError` if a partition cannot have ``n`` elements."""
    too_many = codec(given.compressor).too_many
    if n >= too_many:
        raise ConfigError(
            f"compressor={given.compressor!r}: a partition has {n} elements; at most"
            f" {too_many - 1} are possible"
        )


class Made(NamedTuple):
    """One partition's compression, in the form that the core takes (core/codec/state.pxd)."""

    encode: int
    decode: int
    sum: int
    check: int
    pushed: int
    widen: int
    narrow: int
    wide_itemsize: int
    n: int
    capacity: int
    scratch: int
    options: list[int]
    residual: bool
    momentum: bool
    mu: float
    corrected: bool
    counted: bool
    light: bool
    sparse: bool
    owners: tuple[object, ...]


def stream(name: bytes, part: int) -> int:
    """Return 64 bits that identify a partition, the same in every job.

    Together with the seed they start the partition's random numbers.
    """
    return mix(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"), part)


class MomentumSpec:
    """Nesterov's momentum of one tensor that has no encoder to add it.

    Rounds must not overlap: the caller waits for each.
    """

    def __init__(self, dtype: str, n: int) -> None:
        self._run = _NESTEROV(load_momentum(dtype))
        self._itemsize, self._n = BY_NAME[dtype].itemsize, n
        self.kept = np.zeros(n, "float64" if dtype == "float64" else "float32")

    def taken(self) -> np.ndarray:
        """Return a copy of the momentum."""
        return self.kept.copy()

    def put(self, kept: np.ndarray | float) -> None:
        """Set the momentum."""
        self.kept[:] = kept

    def add(self, address: int, mu: float) -> np.ndarray:
        """Update the momentum with the gradient at ``address``.

        Returns new memory that holds the elements to send.
        """
        out = np.empty(self._n * self._itemsize, np.uint8)
        self._run(out.ctypes.data, address, self.kept.ctypes.data, self._n, mu)
        return out


_NESTEROV = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
)


def make(given: CompressionSpec, dtype: str, nbytes: int, which: int, sender: int | None) -> Made:
    """Return the compression of a partition of ``nbytes`` bytes of ``dtype``; loads its kernels.

    ``which``: the partition's :func:`stream`. ``sender``: the number by which servers know this
    process, or None on the server's side, which has no momentum and whose elements are wide.

    Raises :class:`~bpsx.errors.ConfigError` for element types that cannot be compressed.
    """
    if dtype not in FLOATS:
        raise ConfigError(f"elements of {dtype} cannot be compressed; allowed: {', '.join(FLOATS)}")
    used, n = codec(given.compressor), nbytes // BY_NAME[dtype].itemsize
    wide = "float64" if dtype == "float64" else "float32"
    residual, momentum = bool(given.ef), bool(given.momentum) and sender is not None
    _check_count(given, n)
    compiled = load_codec(given.compressor, wide, residual, momentum)
    summing = load_summer(given.compressor, wide, residual) if sender is None else Summing(0, 0, ())
    conversion = load_conversion(dtype if sender is not None else wide)
    numbers = used.numbers(dict(given.options))
    if len(numbers) > ALIKE:
        raise ConfigError(
            f"compressor={given.compressor!r} computes {len(numbers)} numbers from its options; at"
            f" most {ALIKE} are possible"
        )
    seed = mix(
        given.seed, which, *([0 if sender is None else sender + 1] if used.own_noise else [])
    )
    options = [*numbers, *[0] * (ALIKE - len(numbers)), 0, seed - 2**64 if seed >= 2**63 else seed]
    return Made(
        compiled.encode,
        compiled.decode,
        summing.sum,
        summing.check,
        used.size(n, numbers, BY_NAME[wide].itemsize) if summing.sum else 0,
        conversion[0],
        conversion[1],
        BY_NAME[wide].itemsize,
        n,
        used.capacity(n, numbers),
        used.scratch(n, numbers),
        options,
        residual,
        momentum,
        given.mu,
        given.ef == "corrected",
        used.counted,
        not residual and not used.remembers,
        given.ef == "sparse" and sender is None,
        (compiled, summing, conversion),
    )


def make_for_server(text: str, dtype: str, nbytes: int, which: int) -> Made:
    """Return what :func:`make` does, on the server's side, for a compression that came as text."""
    return make(parse(text), dtype, nbytes, which, None)


def mix(*numbers: int) -> int:
    """Return 64 bits that depend on all bits of ``numbers``.

    Applies the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) to them in turn.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state
