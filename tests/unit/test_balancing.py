"""Keys that living servers yield to servers that have joined, at the scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bpsx.planning.placement import MOST_TARGETS, Placement
from bpsx.scheduler.balancing import PATIENCE_SECONDS
from bpsx.scheduler.states import Handover
from bpsx.scheduler.terms import Terms
from unit.scheduler_tools import declare, elastic, kinds, late_server
from unit.test_arrivals import OK, connect


def job(servers: int = 1, tensors: int = 8, workers: int = 2, **changes: Any) -> Any:
    """A job with some tensors of 400 kB."""
    m = elastic(workers, servers, **changes)
    for i in range(tensors):
        m.declare(b"w0", declare(f"t{i}", [100_000]))
    return m


def join(m: Any, n: int, servers: int = 1) -> list[Any]:
    """Let late server ``n`` join; returns what follows from the last CONNECTED."""
    m.hello(b"l%d" % n, late_server(n, servers=servers))
    connect(m, servers + n, b"w0")
    return connect(m, servers + n, b"w1")


def move(m: Any, now: float = 2.0) -> list[Any]:
    out = []
    for who in (b"w0", b"w1"):
        moved = {"term": m.terms.number, "partitions": 4, "again": 10}
        out = m.moved(who, moved, now)
    return out


def rules(out: list[Any]) -> list[Any]:
    """The rules of the term that ``out`` begins; there must be one."""
    (term,) = {str(m): m for _, m in out if m["type"] == "TERM"}.values()
    assert term["moves"] == [] and not term["missed"]
    return term["yields"]


def test_a_newcomer_gets_its_share() -> None:
    m = job()
    out = join(m, 0)
    assert kinds(out) == dict.fromkeys((b"w0", b"w1", b"s0", b"l0"), "TERM")
    ((lane, limit, targets),) = rules(out)
    assert (lane, len(targets)) == (0, MOST_TARGETS) and limit >= 8
    assert m.terms._placement.server_bytes == [1_600_000, 1_600_000]
    assert m.terms.state is Handover.MOVING
    for i in range(8):
        for place in m.registry.places(f"t{i}", 0):
            to, base = targets[place.slot % 64]
            expected = (0, place.slot) if to == 0 else (1, base + place.slot // 64)
            assert m.terms.resolve(place.lane, place.slot) == expected
    move(m)
    (line,) = m.terms.finished
    assert "2 workers have moved 8 partitions to server 1 (h, pid 700), 1600000 bytes" in str(line)
    assert m.losses == []


def test_nothing_moves_if_nothing_lacks() -> None:
    m = job(tensors=0)
    assert join(m, 0) == [] and m.terms.number == 0
    m = job(tensors=0)
    m.declare(b"w0", declare("one", [10]))  # a single key cannot be shared out
    assert join(m, 0) == [] and m.terms.number == 0
    m = job()
    m.balances = False
    assert join(m, 0) == [] and m.terms.number == 0


def test_one_move_follows_the_other() -> None:
    m = job()
    join(m, 0)
    assert join(m, 1) == [] and m.terms.number == 1
    assert {lane for lane, *_ in rules(move(m))} == {0, 1}
    assert m.terms.number == 2
    placed = m.terms._placement
    assert max(placed.server_bytes) - min(placed.server_bytes) <= 400_000


def test_several_newcomers_get_keys_at_once() -> None:
    m = job()
    m.hello(b"l1", late_server(1))  # comes as rank 1
    m.hello(b"l0", late_server(0))
    assert connect(m, 1, b"w0", b"w1") == []
    out = connect(m, 2, b"w0", b"w1")
    targets = {to for _, _, targets in rules(out) for to, _ in targets}
    assert targets == {0, 1, 2}


def test_a_newcomer_does_not_wait_for_long_for_another() -> None:
    m = job()
    m.hello(b"l1", late_server(1))
    m.hello(b"l0", late_server(0))
    assert connect(m, 1, b"w0", b"w1") == []
    assert m.tend(1.0 + PATIENCE_SECONDS - 0.1) == []
    assert len(rules(m.tend(1.0 + PATIENCE_SECONDS))) == 1


def test_no_key_moves_once_a_worker_wants_to_leave() -> None:
    m = job()
    m.hello(b"l0", late_server(0))
    connect(m, 1, b"w0")
    m.bye(b"w1", OK)
    assert m.tend(1.0) == [] and m.nodes[b"l0"].presence.name == "LIVE"
    assert m.terms.number == 0


def test_a_worker_that_wants_to_leave_waits_until_keys_have_moved() -> None:
    m = job()
    join(m, 0)
    assert m.bye(b"w1", OK) == [] and b"w1" in m._roster.leaving
    assert (b"w1", {"type": "GOODBYE"}) in move(m, now=2.0)


def test_the_old_server_dies_while_its_keys_move() -> None:
    m = job()
    ((_, limit, targets),) = rules(join(m, 0))
    out = m.gone(b"s0", "cut", 3.0)
    term = dict(out)[b"w0"]
    assert (term["term"], [lane for lane, _ in term["moves"]]) == (2, [0])
    places = set()
    for i in range(8):
        for place in m.registry.places(f"t{i}", 0):
            now = m.terms.resolve(place.lane, place.slot)
            places.add(now)
            to, base = targets[place.slot % 64]
            assert now[0] == 1 and (to == 0 or now == (1, base + place.slot // 64))
    assert len(places) == 8 and limit == 8


def test_the_new_server_dies_while_it_gets_keys() -> None:
    m = job()
    join(m, 0)
    m.gone(b"l0", "cut", 3.0)
    places = {
        m.terms.resolve(place.lane, place.slot)
        for i in range(8)
        for place in m.registry.places(f"t{i}", 0)
    }
    assert len(places) == 8 and {lane for lane, _ in places} == {0}


def test_one_that_has_to_leave_gets_no_keys() -> None:
    m = job()
    m.depart(b"s0", {"why": "SIGTERM"}, 1.0)
    out = join(m, 0)
    assert kinds(out)[b"s0"] == "GOODBYE" and dict(out)[b"w0"]["moves"]
    assert m.terms.number == 1 and move(m) == [] and m.terms.number == 1


def resolve(moves: dict[int, list[Any]], lane: int, slot: int) -> tuple[int, int]:
    """Where a slot is after all moves, by the rule of the page."""
    for limit, targets in moves.get(lane, []):
        to, base = targets[slot % len(targets)]
        if slot < limit and to != lane:
            return resolve(moves, to, base + slot // len(targets))
    return lane, slot


@pytest.mark.parametrize("function", ["balanced", "djb2"])
def test_no_place_is_used_twice_and_slots_do_not_grow_by_themselves(function: str) -> None:
    """Servers come and go, tensors are declared in between."""
    for seed in range(30):
        rng = random.Random(seed)
        placement = Placement([rng.randrange(1, 3)], function)
        terms, living = Terms(placement), [0]
        moves: dict[int, list[Any]] = {}
        given: list[tuple[int, int, int]] = []
        for turn in range(40):
            for place in placement.place(turn, rng.randrange(9_000_000)) if turn < 9 else []:
                given.append((place.lane, place.slot, max(place.length, 64)))
            if len(living) > 1 and rng.random() < 0.5:
                server = living.pop(rng.randrange(len(living)))
                for lane, targets in terms.lose(server, str(server), [], 0.0, False):
                    moves.setdefault(lane, []).append((1 << 32, targets))
            else:
                placement.reserve(rng.randrange(1, 3))
                living.append(len(placement.server_bytes) - 1)
                placement.admit(living[-1], dict.fromkeys(living, 1 / len(living)))
                yields, _ = terms.balance()
                if yields:
                    terms.give(yields, 1, "", [], 0.0)
                for lane, limit, targets in yields:
                    moves.setdefault(lane, []).append((limit, targets))
            terms.moved(b"", 99, 0, 0, 0.0)
            now = [resolve(moves, lane, slot) for lane, slot, _ in given]
            assert now == [terms.resolve(lane, slot) for lane, slot, _ in given]
            assert len(set(now)) == len(now) and all(slot >= 0 for _, slot in now)
            found = [0] * len(placement.lane_bytes)
            for (lane, _), (_, _, nbytes) in zip(now, given):
                found[lane] += nbytes
            assert found == placement.lane_bytes
        longest = max(len(sizes) for sizes in placement._sizes)
        assert longest <= 40 * len(given)


def test_mixed_mode_keeps_its_shares() -> None:
    """Two servers with workers beside them have small shares; a third one gets most."""
    placement = Placement([1, 1], shares=[0.5, 0.5])
    for i in range(100):
        placement.place(i, 1_000_000)
    placement.reserve(1)
    placement.admit(2, {0: 0.1, 1: 0.1, 2: 0.8})
    yields, nbytes = placement.balance()
    assert {lane for lane, *_ in yields} == {0, 1}
    assert abs(nbytes - 80_000_000) < 3_000_000
    assert abs(placement.server_bytes[2] - 80_000_000) < 3_000_000
