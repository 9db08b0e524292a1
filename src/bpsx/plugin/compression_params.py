"""``compression_params`` of an optimizer: one mapping for all parameters, or one by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bpsx.errors import ConfigError
from bpsx.plugin import adapter

#: One mapping for all parameters, mappings by name, or a function of a name. None: not compressed.
Params = Mapping[str, Any] | Callable[[str], Mapping[str, Any] | None] | None


def choose(
    given: Params, names: Iterable[str], verb: str, momenta: Mapping[str, float]
) -> dict[str, adapter.CompressionSpec]:
    """Return the compression of each parameter that has one.

    ``momenta``: the optimizer's own momentum by name; it becomes ``mu`` where ``given`` has none.

    Raises :class:`ConfigError`, which names parameter, key and value.
    """
    known = list(names)
    if given is None:
        return {}
    if callable(given):
        said = {name: given(name) for name in known}
    elif _by_name(given, verb):
        check_names(given, known, verb)
        wrong = {
            name: value
            for name, value in given.items()
            if value is not None and not isinstance(value, Mapping)
        }
        if wrong:
            raise ConfigError(
                f"{verb}: compression_params maps parameters' names to mappings, but has"
                f" {wrong!r}: expected mappings or None"
            )
        said = dict(given)
    else:
        said = dict.fromkeys(known, given)
    found = {
        name: _compression(name, params, verb, momenta)
        for name, params in said.items()
        if params is not None
    }
    return {name: chosen for name, chosen in found.items() if chosen != adapter.NOT_COMPRESSED}


def check_params(given: Any, verb: str, momentum: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``given`` can be some parameters' ``compression_params``.

    ``momentum``: whether the optimizer has a momentum of its own that could become ``mu``.
    """
    if isinstance(given, type):
        raise ConfigError(
            f"{verb}: compression_params={given.__name__} is a class; expected a mapping or a"
            " function of a parameter's name. The classes of Compression convert tensors before"
            " the exchange"
        )
    if given is None or callable(given):
        return
    by_name = _by_name(given, verb)
    if not adapter.initialised():  # before that, other packages' compressors are unknown
        return
    for name, params in given.items() if by_name else [(None, given)]:
        if isinstance(params, Mapping):
            _compression(name, params, verb, {name: 0.5} if momentum else {})


def check_names(given: Params, known: Sequence[str], verb: str) -> None:
    """Raise :class:`ConfigError` if ``given`` has choices by name with a name not in ``known``."""
    if given is None or callable(given) or not _by_name(given, verb):
        return
    strange = [str(name) for name in given if name not in known]
    if strange:
        raise ConfigError(
            f"{verb}: compression_params names parameters that the optimizer does not have:"
            f" {', '.join(strange[:10])}; it has"
            f" {', '.join(known[:10])}{', …' * (len(known) > 10)}"
        )


def _by_name(given: Any, verb: str) -> bool:
    """Whether the keys of a mapping are parameters' names.

    Raises :class:`ConfigError` if ``given`` is no mapping.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{verb}: compression_params is a {type(given).__name__}; expected a mapping or a"
            " function of a parameter's name"
        )
    return any(isinstance(value, Mapping) for value in given.values())


def _missing(value: Any) -> bool:
    return value is None or value is False or isinstance(value, str) and value == ""


def _compression(
    name: str | None, params: Any, verb: str, momenta: Mapping[Any, float]
) -> adapter.CompressionSpec:
    what = f"{verb}: compression_params" + ("" if name is None else f" of {name!r}")
    if isinstance(params, Mapping) and params.get("momentum") and _missing(params.get("mu")):
        if name not in momenta:
            raise ConfigError(
                f"{what}: momentum={params['momentum']!r} needs mu, because there is no"
                " optimizer's momentum to take over: give mu, a number between 0 and 1, such as"
                " 0.9"
            )
        params = {**params, "mu": momenta[name]}
    return adapter.compression(params, what)
