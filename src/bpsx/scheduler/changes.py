"""The latest changes of a running job's servers and workers, for observers. Pure.

Owned by the hub's only thread; :meth:`Changes.view` may be called from any.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any

#: Number of changes that are kept.
MOST = 32
# "server 1 (host, pid 7) is gone: why", as membership says it, and TERM to all nodes.
_END = re.compile(
    r"(?P<who>\w+(?: \d+)? \(.*?, pid \d+\)) "
    r"(?P<how>is gone|has failed|leaves the job|has left while workers were running)"
    r"(?:: (?P<why>.*?))?(?:; the job goes on with term .*)?",
    re.DOTALL,
)


@dataclass
class JobChange:
    """One change of the job.

    ``term``: that it has begun; 0 if none. ``what``: "lost", "left", "joined" or "moved" (keys).
    ``who``: the node, as text. ``at``: time of the hub's clock, in seconds; None if another
    scheduler saw it. ``seconds``: until the job went on; None if it has not, or that is not known.
    ``again``: bytes that workers have pushed again.
    """

    term: int
    what: str
    who: str
    why: str
    at: float | None
    seconds: float | None = None
    again: int = 0


class Changes:
    """The latest :data:`MOST` changes, the oldest first."""

    def __init__(self) -> None:
        self._latest: deque[JobChange] = deque(maxlen=MOST)

    def ended(self, term: int, text: str, at: float | None) -> None:
        """Note a node that was lost or has left in good order. ``text``: its end, as in TERM.

        ``term``: 0 if the job waits for another server first; the call is repeated then.
        """
        found = _END.fullmatch(text)
        who, how, why = found.group("who", "how", "why") if found else ("", "", text)
        what = "left" if how == "leaves the job" else "lost"
        for change in self._latest:
            if change.term == 0 and (change.what, change.who) == (what, who):
                change.term = term
                return
        self._latest.append(JobChange(term, what, who, why or how, at))

    def joined(self, term: int, who: str, at: float | None, seconds: float | None = None) -> None:
        """Note a node that has joined. ``seconds``: for which the workers had stopped for that."""
        self._latest.append(JobChange(term, "joined", who, "", at, seconds))

    def moved(self, term: int, to: str, at: float | None) -> None:
        """Note that keys of living servers move to the servers ``to``."""
        self._latest.append(JobChange(term, "moved", to, "they lacked keys", at))

    def restored(self, term: int, text: str, entered: bool, yields: bool) -> None:
        """Note a term of an earlier scheduler, whose TERM said ``text``.

        ``entered``: workers have joined in it. ``yields``: keys of living servers have moved.
        """
        if entered:
            self.joined(term, text.partition(" has joined: ")[0], None)
        elif yields:
            self.moved(term, text.rpartition(" move to ")[2], None)
        else:
            self.ended(term, text, None)

    def went_on(self, term: int, seconds: float, again: int) -> None:
        """All workers have moved to ``term``, and pushed ``again`` bytes again."""
        for change in self._latest:
            if change.term == term and change.at is not None:
                change.seconds, change.again = seconds, again

    def view(self, now: float) -> list[dict[str, Any]]:
        """Return the changes as plain data; ``ago``: seconds since then, or None."""
        return [
            {
                "term": change.term,
                "what": change.what,
                "who": change.who,
                "why": change.why,
                "ago": None if change.at is None else round(now - change.at, 1),
                "seconds": change.seconds,
                "again": change.again,
            }
            for change in list(self._latest)
        ]
