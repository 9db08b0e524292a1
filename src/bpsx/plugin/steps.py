"""Steps whose push_pulls count as a whole, in jobs that go on without lost workers.

The sums of one call of an engine are a step of their own. Where an engine begins a step's calls one
by one, their :class:`Step` knows which of them is the last. Calls that cannot be given a step when
they are made, as in a graph, find it by a key.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from bpsx.plugin import adapter

#: By session: groups that no step uses now. A core keeps its groups, so steps share them.
_free: weakref.WeakKeyDictionary[Any, list[adapter.CommitGroup]] = weakref.WeakKeyDictionary()

#: By key: steps whose last call has not come, and the names of their sums.
_open: dict[int, tuple[Step, set[str]]] = {}
os.register_at_fork(after_in_child=_open.clear)


class Step:
    """Calls that an engine begins one by one, in any order; a context around making them.

    The last one that begins seals the group, so all of them are committed together. A call that
    will never begin is counted, too: none of the others may wait for it. Steps under way at the
    same time have groups of their own, since a later one may use the same names. Thread-safe.
    """

    def __init__(self, session: Any) -> None:
        self._session, self._lock = weakref.ref(session), threading.Lock()
        # Calls that have not begun, and calls that have not ended; the context counts as one.
        self._left = self._under_way = 1
        self._complete = True
        free = _free.setdefault(session, [])
        try:
            self.group = free.pop()
        except IndexError:
            self.group = session.group_of(())

    @classmethod
    def of_one(cls, session: Any) -> Step:
        """Return the step of a single call."""
        with cls(session) as step:
            step.add()
        return step

    @classmethod
    def of_key(cls, session: Any, key: int, name: str) -> Step:
        """Return the step that :meth:`last_of` ends, which a sum of ``name`` joins.

        Without an end before a name's second sum, as after an error elsewhere, it begins anew. Only
        the thread that begins calls may use keys.
        """
        step, names = _open.get(key, (None, set()))
        if step is None or step._session() is not session or name in names:
            if step is not None:
                step._complete = False
                step.count()
                step.end()
            step, names = _open[key] = cls(session), set()
        names.add(name)
        step.add()
        return step

    @staticmethod
    def last_of(key: int) -> Step | None:
        """Return the step of that key, which no other sum joins; the caller counts and ends it."""
        return _open.pop(key, (None,))[0]

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._complete = kind is None
        self.count()
        self.end()

    def add(self) -> None:
        """Expect one more call."""
        with self._lock:
            self._left += 1
            self._under_way += 1

    def count(self) -> None:
        """Note that a call has begun, or never will."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        # After an error in the context calls are missing, and the others must not wait for them.
        session = self._session()
        if session is not None and (last or not self._complete):
            session.seal(self.group)

    def end(self) -> None:
        """Note that a counted call has ended."""
        with self._lock:
            self._under_way -= 1
            last = self._under_way == 0
        session = self._session()
        if last and session is not None:
            _free[session].append(self.group)
