"""Names of gluon's Parameters on the wire, the same on all workers."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from bpsx.plugin.names import Names

_lock = threading.Lock()
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
#: Parameters' numbers, in the order in which this process has made them.
_created: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_given = Names()


def name_of(parameter: Any) -> str:
    """Return the Parameter's name on the wire.

    Two blocks with one prefix have Parameters of the same name. All but the first get a number
    appended, in the order in which this function first sees them. Thread-safe.
    """
    with _lock:
        if parameter not in _names:
            _names[parameter] = _given.give(str(parameter.name), _created.get(parameter, 0))
        return _names[parameter]


def meaning_of_all(parameters: Sequence[Any], continued: bool) -> int:
    """Return the digest of what the names of Parameters mean; see :meth:`Names.meaning`."""
    return _given.meaning(
        ((name_of(p), str(p.name), _created.get(p, 0)) for p in parameters), continued
    )


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
