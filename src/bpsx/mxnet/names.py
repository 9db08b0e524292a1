"""Names of gluon's Parameters on the wire, the same on all workers."""

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
#: Parameters' numbers, in the order in which this process has made them.
_created: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
#: Numbers of creation of the Parameters that have been named, by own name.
_given: dict[str, list[int]] = {}


def name_of(parameter: Any) -> str:
    """Return the Parameter's name on the wire.

    Two blocks with one prefix have Parameters of the same name. All but the first get a number
    appended, in the order in which this function first sees them. Thread-safe.
    """
    with _lock:
        if parameter not in _names:
            own = str(parameter.name)
            given = _given.setdefault(own, [])
            given.append(_created.get(parameter, 0))
            _names[parameter] = own if len(given) == 1 else f"{own}#{len(given)}"
        return _names[parameter]


def created_before(parameter: Any) -> int:
    """Return how many named Parameters of the same own name were made before this one.

    This tells two of them apart that workers have named in different orders. Thread-safe.
    """
    with _lock:
        number = _created.get(parameter, 0)
        return sum(n < number for n in _given.get(str(parameter.name), ()))


def _number_parameters() -> None:
    """Number each Parameter that is made from now on."""
    make = mx.gluon.Parameter.__init__

    @functools.wraps(make)
    def numbered(parameter: Any, *args: Any, **kwargs: Any) -> None:
        with _lock:
            _created[parameter] = next(_numbers)
        make(parameter, *args, **kwargs)

    mx.gluon.Parameter.__init__ = numbered


_number_parameters()
