"""Names of variables on the wire: the same on all workers, and unique in a process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from bpsx.plugin.names import Names

#: Attribute of a variable that holds the id of its owner and its name.
_NAME = "_bpsx_name"
_lock = threading.Lock()
_names = Names()


def names_of(sources: Sequence[Any]) -> list[str]:
    """Return a name for each source.

    A variable is called by its own name (Keras: path). A number is appended if an earlier variable
    has that name. A variable keeps its name for as long as it lives. Variables of one name that are
    first met together are numbered in the order of creation, so the order of ``sources`` does not
    matter. Any other source, and one that occurs twice, is identified by its place. Thread-safe.
    """
    known = [_known_name(source, f"source.{i}") for i, source in enumerate(sources)]
    if None in known:
        new = [source for source, name in zip(sources, known, strict=True) if name is None]
        for source in sorted(new, key=_creation):
            _give_name(source)
        known = [_known_name(source, f"source.{i}") for i, source in enumerate(sources)]
    seen: Counter[str] = Counter()
    found = []
    for source, name in zip(sources, known, strict=True):
        name = name or str(_own_name_of(source))
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def own_names_of(sources: Sequence[Any]) -> list[str]:
    """Return the names that users know: as :func:`names_of`, without numbers."""
    return [_own_name_of(source) or f"source.{i}" for i, source in enumerate(sources)]


def meaning_of_all(named: Mapping[str, Any], continued: bool) -> int:
    """Return the digest of what the names of sources mean; see :meth:`Names.meaning`."""
    return _names.meaning(
        ((name, _own_name_of(s) or "", _creation(s)) for name, s in sorted(named.items())),
        continued,
    )


def _own_name_of(source: Any) -> str | None:
    return getattr(source, "path", None) or (
        source.name if isinstance(source, tf.Variable) else None
    )


def _known_name(source: Any, otherwise: str) -> str | None:
    """Return the source's name. None: it has a name of its own, and has not been met yet."""
    own = _own_name_of(source)
    if own is None:
        return otherwise
    if isinstance(source, tf.Variable) and getattr(source, "_in_graph_mode", True):
        return own  # in a TensorFlow 1 graph names are unique
    return _kept_by(source)


def _kept_by(source: Any) -> str | None:
    """Return the name that the variable was given.

    None: it has none yet, or only that of the variable of which it is a copy.
    """
    whose, name = getattr(source, _NAME, (None, ""))
    return str(name) if whose == id(source) else None


def _give_name(source: Any) -> None:
    own = str(_own_name_of(source))
    with _lock:
        if _kept_by(source) is not None:  # by another thread, or it occurs twice
            return
        try:
            setattr(source, _NAME, (None, ""))
        except AttributeError:  # no variable, but an object with a path, which is its name
            return
        setattr(source, _NAME, (id(source), _names.give(own, _creation(source))))


def _creation(source: Any) -> int:
    """Return TensorFlow's number of the variable, which rises with each new one; 0: none."""
    variable = getattr(source, "_value", source)  # a Keras variable holds a TensorFlow variable
    number = str(getattr(variable, "_unique_id", "")).rpartition("_")[2]
    return int(number) if number.isdigit() else 0
