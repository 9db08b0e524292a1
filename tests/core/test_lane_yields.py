"""A server's lane that yields slots while it lives, with scripted workers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from bpsx.telemetry._recorder import Watcher
from core.test_lane import BIG, Rig
from support import wire as w

#: Bytes: a barrier, inline without and with acknowledgement, and large.
SIZES = [0, 16, 8192, BIG]
#: Slots 3 and 5 are yielded; 4 is not.
CLASSES = 1 << 3 | 1 << 5


def give_up(rig: Rig, rank: int, **changes: int) -> None:
    record = w.Record(
        w.YIELD, w.INLINE, key=CLASSES, slot=64, sender=rank, term=1, divisor=64, length=0
    )
    rig.send(rank, record._replace(**changes))


def await_count(rig: Rig, name: str, count: int) -> None:
    end = time.monotonic() + 60
    while rig.lane.counters()[name] != count:
        assert time.monotonic() < end, rig.lane.counters()
        time.sleep(0.001)


def take(rig: Rig, rank: int, kind: int) -> w.Record:
    """The next record that a worker gets, which must be of this kind."""
    (record,) = [r for r in rig.take(rank) if r.kind != w.SETTLED]
    assert record.kind == kind
    return record


def ones(nbytes: int) -> bytes:
    return np.ones(nbytes // 4, np.float32).tobytes()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("options", [{}, {"fixed_order": True}])
def test_an_open_round_is_forgotten_when_all_have_asked(rig, nbytes, options):
    r = rig(3, **options)
    r.register(3, nbytes)
    r.push(2, 3, ones(nbytes))
    r.push(0, 3, ones(nbytes))
    for rank in range(2):
        give_up(r, rank)
    await_count(r, "messages_received", 7)
    for rank in range(3):
        r.assert_nothing_for(rank)
    give_up(r, 2)
    for rank in range(3):
        assert take(r, rank, w.LEFT).term == 1
    r.push(1, 3, ones(nbytes))  # it did not know yet
    r.register(3, nbytes)
    await_count(r, "stale", 4)
    counters = r.lane.counters()
    assert (counters["yielded"], counters["malformed"], counters["rounds"]) == (1, 0, 0)


def test_a_forgotten_round_is_not_open_any_more(rig):
    """As metrics and `bpsx-run top` show it."""
    watcher = Watcher("server", workers=2)
    watcher.live(True)
    r = rig(2, watch=watcher)
    r.register(3, 16)
    r.push(0, 3, ones(16))
    await_count(r, "messages_received", 3)
    assert watcher.stats()["open_rounds"] == 1
    for rank in range(2):
        give_up(r, rank)
    for rank in range(2):
        take(r, rank, w.LEFT)
    assert watcher.stats()["open_rounds"] == 0


def test_other_slots_stay(rig):
    """Also those that are used first afterwards, and those from the limit on."""
    r = rig(2)
    r.register(4, 16)
    r.push(0, 4, ones(16))
    for rank in range(2):
        give_up(r, rank)
    for rank in range(2):
        take(r, rank, w.LEFT)
    r.push(1, 4, ones(16))
    for slot in (6, 64 + 3):
        r.register(slot, 16)
        for rank in range(2):
            r.push(rank, slot, ones(16))
    answers = []
    while len(answers) < 6:
        answers += r.take(len(answers) // 3)
    assert {a.body for a in answers} == {np.full(4, 2, np.float32).tobytes()}
    assert r.lane.counters()["stale"] == r.lane.counters()["yielded"] == 0


def test_rounds_close_until_the_last_has_asked(rig):
    r = rig(2)
    r.register(3, 16)
    give_up(r, 0)
    for rank in range(2):
        r.push(rank, 3, ones(16))
    for rank in range(2):
        assert take(r, rank, w.ANSWER).round == 0
    give_up(r, 1)
    for rank in range(2):
        take(r, rank, w.LEFT)
    assert r.lane.counters()["yielded"] == 1


def test_acknowledgements_of_yielded_keys_mean_nothing(rig):
    r = rig(2)
    r.register(3, 8192)
    for rank in range(2):
        r.push(rank, 3, ones(8192))
    for rank in range(2):
        take(r, rank, w.ANSWER)
        give_up(r, rank)
    for rank in range(2):
        take(r, rank, w.LEFT)
    body = np.array([3, 0], np.uint32).tobytes()
    r.send(0, w.Record(w.ACK, w.INLINE, sender=0, length=8, body=body))
    await_count(r, "messages_received", 7)
    assert r.lane.counters()["malformed"] == 0


@pytest.mark.parametrize("twice", [True, False])
def test_a_slot_may_come_back_under_another_number(rig, twice):
    """In a later term, with the state of a key that was yielded used again for another one."""
    r = rig(2)
    r.register(3, 16)
    for rank in range(2):
        give_up(r, rank)
    for rank in range(2):
        take(r, rank, w.LEFT)
    r.register(70, 8192 if twice else 16, key=103)
    size = 8192 if twice else 16
    for rank in range(2):
        r.push(rank, 70, ones(size), key=103)
    for rank in range(2):
        assert take(r, rank, w.ANSWER).body == np.full(size // 4, 2, np.float32).tobytes()


@pytest.mark.parametrize(
    "changes",
    [{"divisor": 0}, {"divisor": 65}, {"term": 0}, {"slot": 63}, {"key": 1}, {"divisor": 32}],
)
def test_what_workers_ask_for_has_to_agree(rig, changes: dict[str, Any]):
    r = rig(2)
    r.register(3, 16)
    give_up(r, 0)
    give_up(r, 1, **changes)
    await_count(r, "malformed", 1)
    give_up(r, 1)
    for rank in range(2):
        take(r, rank, w.LEFT)
    give_up(r, 1)
    await_count(r, "malformed", 2)


def test_memory_of_yielded_keys_returns(rig):
    """A lane yields and gets keys of 40 kB, again and again, each with an open round."""
    r = rig(2)
    slot, term, sizes = 3, 0, []
    for term in range(1, 400):
        r.register(slot, BIG, key=5)
        r.push(0, slot, ones(BIG), key=5)
        for rank in range(2):
            give_up(r, rank, term=term, slot=slot + 1, key=1 << slot % 64)
        for rank in range(2):
            assert take(r, rank, w.LEFT).term == term
        slot += 64
        if term in (100, 399):
            with open("/proc/self/statm") as file:
                sizes.append(int(file.read().split()[1]) * 4096)
    assert r.lane.counters()["yielded"] == 399
    assert sizes[1] - sizes[0] < 100 * BIG, sizes
