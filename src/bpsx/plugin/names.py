"""Names of variables on the wire: the same on all workers, and unique in a process."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from bpsx.plugin.startup import meaning_of


class Names:
    """Gives out names for variables that may share a name of their own.

    All but the first get a number appended, in the order in which they are named. Workers may name
    them in different orders. Therefore each is registered with a number of creation, which rises
    with each new variable, and :meth:`meaning` tells them apart. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._created: dict[str, list[int]] = {}  # numbers of creation, by own name

    def give(self, own: str, creation: int) -> str:
        """Return a new name for a variable with the name ``own``."""
        with self._lock:
            given = self._created.setdefault(own, [])
            given.append(creation)
            return own if len(given) == 1 else f"{own}#{len(given)}"

    def _created_before(self, own: str, creation: int) -> int:
        with self._lock:
            return sum(number < creation for number in self._created.get(own, ()))

    def meaning(self, named: Iterable[tuple[str, str, int]], continued: bool) -> int:
        """Return the digest of names' meanings, which must be the same on all workers.

        ``named``: name, own name and number of creation of each variable. ``continued``: processes
        of an earlier job are here. They have met other variables before, so only names count.
        """
        return meaning_of(
            name
            if continued
            else f"{name}, of its name the {self._created_before(own, creation)}th"
            for name, own, creation in named
        )
