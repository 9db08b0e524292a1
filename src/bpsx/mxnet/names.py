"""What gluon's Parameters are called: by their names, alike on all workers."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from typing import Any

import mxnet as mx

_lock = threading.Lock()
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
#: Parameters' numbers in the order in which this process has made them.
_created: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
#: Those numbers of the Parameters that have come here, by own name.
_given: dict[str, list[int]] = {}


def name_of(parameter: Any) -> str:
    """Its name; another Parameter of the same name, as two blocks of one prefix have them, gets a
    number, in the order in which they come here. Thread-safe."""
    with _lock:
        if parameter not in _names:
            own = str(parameter.name)
            given = _given.setdefault(own, [])
            given.append(_created.get(parameter, 0))
            _names[parameter] = own if len(given) == 1 else f"{own}#{len(given)}"
        return _names[parameter]


def created_before(parameter: Any) -> int:
    """How many of the Parameters of its own name that have come here were made before it: what
    tells two of them apart that come here in different orders on workers. Thread-safe."""
    with _lock:
        number = _created.get(parameter, 0)
        return sum(n < number for n in _given.get(str(parameter.name), ()))


def _number_parameters() -> None:
    """Have each Parameter that is made from now on numbered."""
    make = mx.gluon.Parameter.__init__

    @functools.wraps(make)
    def numbered(parameter: Any, *args: Any, **kwargs: Any) -> None:
        with _lock:
            _created[parameter] = next(_numbers)
        make(parameter, *args, **kwargs)

    mx.gluon.Parameter.__init__ = numbered


_number_parameters()
