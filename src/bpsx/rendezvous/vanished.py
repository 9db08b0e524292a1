"""Who had come while the job was gathering, and is gone. Pure; the hub lends its clock.

A process whose connection broke, or one that was started again, comes back within moments. One that does not has died, and those
who wait for it shall hear so now rather than at the rendezvous deadline.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Missed:
    """``rank`` of a server: -1, any server may take its place. ``since`` is stamped at the first look."""

    role: str
    rank: int
    text: str
    since: float | None = None


class Vanished:
    """The nodes that are missed. One thread owns it."""

    def __init__(self) -> None:
        self._missed: list[_Missed] = []

    def miss(self, role: str, rank: int, text: str) -> None:
        """A node has gone; ``text`` says which."""
        self._missed.append(_Missed(role, rank if role == "worker" else -1, text))

    def back(self, role: str, rank: int) -> None:
        """A node has come: it, or one in its place, is not missed any more."""
        rank = rank if role == "worker" else -1
        same = [m for m in self._missed if (m.role, m.rank) == (role, rank)]
        # A worker's place is one, however many died in it.
        for one in same if role == "worker" else same[:1]:
            self._missed.remove(one)

    def due(self, now: float, grace: float) -> tuple[float, str] | None:
        """When the first of them counts as dead (``grace`` seconds after ``now`` or the look that saw it first), and what to say then."""
        for one in self._missed:
            one.since = now if one.since is None else one.since
        first = min(self._missed, key=lambda m: m.since or 0.0, default=None)
        if first is None or first.since is None:
            return None
        return first.since + grace, f"{first.text}, and has not come back for {grace:g} s, while the job was gathering"
