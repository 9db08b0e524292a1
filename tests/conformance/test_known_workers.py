"""Tests of what a lane knows of a worker after the worker's first message: it names the worker when
the connection ends, and can send it messages, whichever way they take.

Every transport must pass them.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conformance.test_drop import KINDS
from support.dataplane import DataPlane

#: Shared memory has fewer tokens, so some of that many messages take the network.
_MANY = 4200


class Meeting:
    """A lane and workers; ``visit``: see ``join`` in ``transports/base.py``."""

    def __init__(self, kind: str, visit: int) -> None:
        self._kind, self._visit = KINDS[kind], visit
        self.lane = self._kind.lane()
        self.lane.join(77, 0)
        self._address = self.lane.bind(self._kind.host)
        self.descriptor = self.lane.watch()
        self.s = DataPlane(self.lane)
        self.workers: dict[int, Any] = {}

    def enter(self, rank: int) -> DataPlane:
        """Return a new worker's data plane. The lane has got its first message, and one more."""
        worker = self.workers[rank] = self._kind.worker()
        worker.join(77, rank, self._visit)
        worker.connect(0, self._address)
        w = DataPlane(worker)
        w.other = self.s
        for word in (b"hello", b"again"):
            assert w.send(0, word) == 0
            assert self.s.receive() == (rank, word, None)
        return w

    def lost(self) -> list[int]:
        """Return the workers whose connections have ended, once there are some."""
        for _ in range(200):
            self.s.receive(0.1)  # without a thread for losses, the receiving thread detects them
            if select.select([self.descriptor], [], [], 0)[0] and (found := self.lane.lost()):
                return found
        raise AssertionError("the lane reports no connection that has ended")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.lane.close()


@pytest.fixture(params=[0, 3], ids=["first", "later"])
def visit(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=list(KINDS))
def meet(request: pytest.FixtureRequest, visit: int) -> Iterator[Callable[[], Meeting]]:
    made: list[Meeting] = []

    def one() -> Meeting:
        made.append(Meeting(request.param, visit))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_a_lane_names_the_worker_whose_connection_has_ended(meet: Callable[[], Meeting]) -> None:
    there = meet()
    for rank in (5, 2, 7):
        there.enter(rank)
    assert there.lane.lost() == []
    for rank in (2, 7, 5):
        there.workers.pop(rank).close()
        assert there.lost() == [rank]


def test_a_lane_sends_a_worker_more_than_shared_memory_has_room_for(
    meet: Callable[[], Meeting],
) -> None:
    there = meet()
    for rank in (5, 2):
        w = there.enter(rank)
        heads = [i.to_bytes(4, "little") for i in range(_MANY)]
        assert {there.s.send(rank, head) for head in heads} == {0}
        got = []
        while len(got) < _MANY and (found := w.receive(10)):
            got.append(found[1])
        assert sorted(got) == sorted(heads)
