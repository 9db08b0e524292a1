"""What gluon's Parameters are called: by their names, alike on all workers."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

_lock = threading.Lock()
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_given: Counter[str] = Counter()


def name_of(parameter: Any) -> str:
    """Its name; another Parameter of the same name, as two blocks of one prefix have them, gets a number, in the order in which they come here."""
    with _lock:
        if parameter not in _names:
            own = str(parameter.name)
            _given[own] += 1
            _names[parameter] = own if _given[own] == 1 else f"{own}#{_given[own]}"
        return _names[parameter]
