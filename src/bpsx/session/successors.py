"""Declarations that end after an agreed push_pull, and those that follow them.

docs/internals/retuning.md has the protocol and the table of states. The session's lock guards all.
"""

from __future__ import annotations

from collections.abc import Iterable

from bpsx.core._tensor import Declaration

#: A tensor's name, its declaration that ends, and the one that follows it.
Succession = tuple[str, Declaration, Declaration]


class Successors:
    """The declarations of this worker that have a last count.

    They are *closing* until all workers have noted theirs, then *closed* until they have begun
    their last push_pull.
    """

    def __init__(self) -> None:
        self._closing: dict[int, Succession] = {}
        self._closed: dict[int, Succession] = {}

    def close(self, name: str, declared: Declaration, successor: Declaration) -> None:
        """Note a declaration's successor, which may yet be dropped."""
        self._closing[id(declared)] = name, declared, successor

    def hold(self) -> list[Succession]:
        """Close all that are closing; returns them."""
        held = list(self._closing.values())
        self._closed |= self._closing
        self._closing.clear()
        return held

    def drop(self) -> list[Succession]:
        """Forget all that are closing; returns them: the declarations go on."""
        dropped = list(self._closing.values())
        self._closing.clear()
        return dropped

    def follow(self, declared: Declaration) -> Declaration | None:
        """Return the successor of a closed declaration; None for others."""
        found = self._closed.get(id(declared))
        return found[2] if found is not None else None

    def held(self) -> Iterable[Succession]:
        """All closed declarations that have not ended."""
        return list(self._closed.values())

    def forget(self, declared: Declaration) -> None:
        """A declaration has ended."""
        self._closing.pop(id(declared), None)
        self._closed.pop(id(declared), None)

    def clear(self) -> None:
        """Forget all, as a new epoch begins."""
        self._closing.clear()
        self._closed.clear()
