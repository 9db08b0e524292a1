"""Who had come while the job was gathering, and is gone or was turned away.

Pure; the hub lends its clock.

A process whose connection broke, or one that was started again, comes back within moments. One that
does not has died, and those who wait for it shall hear so now rather than at the rendezvous
deadline. One that was refused for its options has ended, and is waited for in the same way:
somebody may start it again with others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Missed:
    """``rank`` of a server: -1, any server may take its place.

    ``since`` is stamped at the first look.
    """

    role: str
    rank: int
    host: str
    text: str
    since: float | None = None


class Vanished:
    """The nodes that are missed. One thread owns it."""

    def __init__(self) -> None:
        self._missed: list[_Missed] = []

    def miss(self, role: str, rank: int, host: str, text: str) -> None:
        """A node has gone; ``text`` says which."""
        self._missed.append(_Missed(role, rank if role == "worker" else -1, host, text))

    def turn_away(self, role: str, rank: int, host: str, text: str) -> None:
        """A node for whom there is a place was refused; ``text`` says which, and why.

        It may try again and again: that is one miss, whose clock runs on. A server's further tries
        are known by the host, so of several servers there that are refused one is missed.
        """
        for one in self._of(role, rank):
            if role == "worker" or one.host == host:
                one.text = text
                return
        self.miss(role, rank, host, text)

    def back(self, role: str, rank: int, host: str, lacking: int) -> None:
        """A node has come: it, or one in its place, is not missed any more.

        ``lacking``: servers for whom there is still a place.
        """
        same = self._of(role, rank)
        # A worker's place is one, however many died in it. A server on another host than those who
        # are missed is one that had not come yet, as long as there are such.
        if role == "server":
            same = [m for m in same if m.host == host][:1] or same[: max(0, len(same) - lacking)]
        for one in same:
            self._missed.remove(one)

    def _of(self, role: str, rank: int) -> list[_Missed]:
        return [
            m for m in self._missed if (m.role, m.rank) == (role, rank if role == "worker" else -1)
        ]

    def due(self, now: float, grace: float) -> tuple[float, str] | None:
        """When the first of them counts as dead (``grace`` seconds after ``now`` or the look that
        saw it first), and what to say then.
        """
        for one in self._missed:
            one.since = now if one.since is None else one.since
        first = min(self._missed, key=lambda m: m.since or 0.0, default=None)
        if first is None or first.since is None:
            return None
        return (
            first.since + grace,
            f"{first.text}, and has not come back for {grace:g} s, while the job was gathering",
        )
