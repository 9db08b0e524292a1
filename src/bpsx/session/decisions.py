"""A worker's log of the scheduler's decisions, sent to a restarted scheduler.

docs/internals/elastic-scheduler.md says how that scheduler uses it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from bpsx.core._tensor import Declaration
from bpsx.scheduler.messages import KNOWN_BYTES, MOST_PLACES, TERM_FIELDS

Place = tuple[int, int, int, int]
Name = tuple[str, int]


class Decisions:
    """The decisions in the order in which they came. The session's lock guards it.

    ``servers``: host, pid and lanes of each server, by rank. ``gone``: lanes of ended servers whose
    keys no term had moved when GONE came. ``terms``: number, moves, text, whether results may have
    gone with a worker, slots that living lanes yield, ranks of lost workers, number of workers
    then, ranks of workers that have joined, whether a meeting ended. ``moved``: the latest
    term to which this worker has moved, partitions, bytes pushed again. ``reset``: status and text
    of the latest stall. ``joins``: number of joins that all have completed, and of terms in which
    workers have entered; ``last``: the rank that came last to the latest join. ``cleared``: number
    of joins whose marks this machine's root has cleared. ``doubt``: status and text, if this worker
    has asked to end the job.
    """

    def __init__(self, servers: list[Any], keep: bool) -> None:
        """``keep``: whether to keep the places of partitions, which take memory for each tensor."""
        self.servers, self._keep = list(servers), keep
        self.gone: set[int] = set()
        self.terms: list[list[Any]] = []
        self.moved = (0, 0, 0)
        self.reset = (0, "")
        self.joins, self.last, self.cleared = 0, -1, 0
        self.doubt: tuple[int, str] | None = None
        # Numbers of the latest change of partitions, and of the latest one that holds; the size
        # that it has given them, 0: none has.
        self.change, self.held, self.size = 0, 0, 0
        # Largest key, and number of slots on each lane, that this worker has heard of.
        self._key = -1
        self._slots: dict[int, int] = {}
        self._places: dict[Name, list[Place]] = {}
        self._failures: dict[Name, tuple[int, str]] = {}

    def place(self, name: Name, places: list[Place]) -> None:
        """Handle PLACED or ADOPT: record the places of a tensor's partitions."""
        for key, lane, slot, _ in places:
            self._key = max(self._key, key)
            self._slots[lane] = max(self._slots.get(lane, 0), slot + 1)
        if self._keep:
            self._places[name] = places

    def begin_term(self, message: dict[str, Any]) -> None:
        """Handle TERM: record the term."""
        self.terms.append([message[field] for field in TERM_FIELDS])

    def forget(self, name: Name) -> None:
        """Forget a declaration that no push_pull has used."""
        self._places.pop(name, None)

    def come(self, message: dict[str, Any]) -> None:
        """Handle LANES: record a server that joins the running job."""
        self.servers.append([message["host"], message["pid"], message["lanes"]])

    def fail(self, name: Name, status: int, text: str) -> None:
        """Handle FAILED: record the error of a declaration."""
        self._failures[name] = (status, text)

    def begin_epoch(self, status: int, text: str) -> None:
        """Handle RESET: forget all declarations, but not the numbers of keys and slots."""
        self.reset = (status, text)
        self._places.clear()
        self._failures.clear()

    @property
    def entries(self) -> int:
        """Number of terms in which workers have entered."""
        return sum(bool(term[TERM_FIELDS.index("entered")]) for term in self.terms)

    def report(
        self, epoch: int, joined: bool, fresh: bool, broken: Iterable[int], leaves: bool, lost: bool
    ) -> dict[str, Any]:
        """Return this worker's state, a field of AGAIN.

        ``joined``: whether it waits in join(). ``fresh``: whether it has joined the running job and
        may not have got the model. ``broken``: lanes whose connections have ended. ``leaves``:
        whether it has stopped and waits for its GOODBYE. ``lost``: whether it has heard that the
        job goes on without it.
        """
        return {
            "servers": self.servers,
            "gone": sorted(self.gone),
            "terms": self.terms,
            "moved": self.moved[0],
            "epoch": epoch,
            "reset": self.reset,
            "joins": self.joins,
            "last": self.last,
            "joined": joined,
            "fresh": fresh,
            "leaves": leaves,
            "change": [self.change, self.held, self.size],
            "lost": lost,
            "key": self._key,
            "slots": sorted(self._slots.items()),
            "broken": sorted(broken),
        }

    def known(self, declared: dict[Name, Declaration]) -> Iterator[list[Any]]:
        """The items of KNOWN: the declarations that have been placed or have failed."""
        for name, one in declared.items():
            places = self._places.get(name, [])
            status, text = self._failures.get(name, (0, ""))
            if not (places or status):
                continue
            codec = one.codec.text() if one.codec is not None else ""
            for at in range(0, max(len(places), 1), MOST_PLACES):
                some = places[at : at + MOST_PLACES]
                yield [*name, one.nbytes, one.dtype, one.shape, codec, some, status, text]


def parts(items: Iterable[list[Any]]) -> list[bytes]:
    """The messages KNOWN that carry ``items``, cut at :data:`KNOWN_BYTES`."""
    found: list[bytes] = []
    batch: list[str] = []
    size = 0
    for item in itertools.chain(items, [None]):
        text = json.dumps(item, separators=(",", ":")) if item is not None else ""
        if batch and (item is None or size + len(text) > KNOWN_BYTES):
            found.append(('{"type":"KNOWN","items":[' + ",".join(batch) + "]}").encode())
            batch, size = [], 0
        batch.append(text)
        size += len(text) + 1
    return found
