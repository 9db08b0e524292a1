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
_given: Counter[str] = Counter()  # how many variables of the process have been met, by own name
#: Numbers of creation of the variables that have been met, by own name.
_created: dict[str, list[int]] = {}


def names_of(sources: Sequence[Any]) -> list[str]:
    """A name for each source: of a variable its own (Keras: path), with a number if another
    variable that was met before is called like that, for as long as it lives.

    Variables of one name that are met together are numbered as they were created, so that the order
    of ``sources`` does not matter. Anything else, and a source that is there twice, is known by its
    place. Thread-safe.
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
    """What users call them: as :func:`names_of`, without numbers."""
    return [_own_name_of(source) or f"source.{i}" for i, source in enumerate(sources)]


def created_before(source: Any) -> int:
    """How many of the variables of its own name that have been met were created before ``source``:
    what tells two of them apart that workers have met in different orders. Thread-safe."""
    number = _creation(source)
    with _lock:
        return sum(n < number for n in _created.get(_own_name_of(source) or "", ()))


def _own_name_of(source: Any) -> str | None:
    return getattr(source, "path", None) or (
        source.name if isinstance(source, tf.Variable) else None
    )


def _known_name(source: Any, otherwise: str) -> str | None:
    """None: it has a name of its own, and has not been met yet."""
    own = _own_name_of(source)
    if own is None:
        return otherwise
    if isinstance(source, tf.Variable) and getattr(source, "_in_graph_mode", True):
        return own  # of a graph of TensorFlow 1, which has no other one of that name
    return _kept_by(source)


def _kept_by(source: Any) -> str | None:
    """The name that it has been given. None: it has none yet, or that of the variable that it is a
    copy of."""
    whose, name = getattr(source, _NAME, (None, ""))
    return str(name) if whose == id(source) else None


def _give_name(source: Any) -> None:
    own = str(_own_name_of(source))
    with _lock:
        if _kept_by(source) is not None:  # another thread has been here, or it is there twice
            return
        name = own if not _given[own] else f"{own}#{_given[own] + 1}"
        try:
            setattr(source, _NAME, (id(source), name))
        except AttributeError:  # no variable, but something with a path: known by that alone
            return
        _given[own] += 1
        _created.setdefault(own, []).append(_creation(source))


def _creation(source: Any) -> int:
    """TensorFlow's number of the variable, which rises from one to the next of a process. 0: it has
    none."""
    variable = getattr(source, "_value", source)  # of Keras, whose variables have one of TensorFlow
    number = str(getattr(variable, "_unique_id", "")).rpartition("_")[2]
    return int(number) if number.isdigit() else 0
