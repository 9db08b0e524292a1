"""What variables are called on the wire: alike on all workers, and no two of a process alike."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

#: The attribute of a variable that holds whose it is and its name.
_NAME = "_bpsx_name"
_lock = threading.Lock()
_given: Counter[str] = Counter()        # how many variables of the process have been met with a name of their own


def names_of(sources: Sequence[Any]) -> list[str]:
    """A name for each source: of a variable its own (Keras: path), with a number if another variable that was met before is called like that, for as
    long as it lives. Anything else, and a source that is there twice, is known by its place. Workers have to meet variables of one name in one order.
    Thread-safe."""
    seen: Counter[str] = Counter()
    found = []
    for i, source in enumerate(sources):
        name = _name_of(source, f"source.{i}")
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def own_names_of(sources: Sequence[Any]) -> list[str]:
    """What users call them: as :func:`names_of`, without numbers."""
    return [_own_name_of(source) or f"source.{i}" for i, source in enumerate(sources)]


def _own_name_of(source: Any) -> str | None:
    return getattr(source, "path", None) or (source.name if isinstance(source, tf.Variable) else None)


def _name_of(source: Any, otherwise: str) -> str:
    own = _own_name_of(source)
    if own is None:
        return otherwise
    if isinstance(source, tf.Variable) and getattr(source, "_in_graph_mode", True):
        return own              # of a graph of TensorFlow 1, which has no other one of that name
    return _kept_by(source) or _named(source, own)


def _kept_by(source: Any) -> str | None:
    """The name that it has been given. None: it has none yet, or that of the variable that it is a copy of."""
    whose, name = getattr(source, _NAME, (None, ""))
    return str(name) if whose == id(source) else None


def _named(source: Any, own: str) -> str:
    with _lock:
        name = _kept_by(source)         # another thread may have been here
        if name is not None:
            return name
        name = own if not _given[own] else f"{own}#{_given[own] + 1}"
        try:
            setattr(source, _NAME, (id(source), name))
        except AttributeError:          # no variable, but something with a path: known by that alone
            return own
        _given[own] += 1
        return name
