"""Loss of servers: where their slots go, who may leave when, and what ends the job after all."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.planning.placement import MOST_TARGETS, Assignment, Placement
from bpsx.scheduler import messages
from bpsx.scheduler.hub import Hub
from bpsx.scheduler.membership import Membership
from bpsx.scheduler.terms import LONGEST_SECONDS, SETTLE_SECONDS, Terms
from unit.scheduler_tools import config, declare, elastic, hello, kinds, members, running, waiting

GOOD = {"failure": ""}


# ---- moves


@dataclass
class Placed:
    """A placement, its terms, and all (lane, slot) pairs that were ever given out, by key."""

    lanes: list[int]
    function: str
    shares: list[float]
    original: list[Assignment] = field(default_factory=list)
    used: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.placement = Placement(self.lanes, self.function, 1, self.shares, 8192)
        self.terms = Terms(self.placement)
        self.living = set(range(len(self.lanes)))
        self.tensors = 0

    def server(self, lane: int) -> int:
        return next(s for s in range(len(self.lanes)) if lane < sum(self.lanes[: s + 1]))

    def place(self, nbytes: int) -> None:
        for one in self.placement.place(self.tensors, nbytes):
            assert self.server(one.lane) in self.living
            assert (one.lane, one.slot) not in self.used, "a place was given out twice"
            self.used[one.lane, one.slot] = one.key
            self.original.append(one)
        self.tensors += 1

    def held(self) -> list[int]:
        """The bytes of each server, from where all partitions are now."""
        found = [0] * len(self.lanes)
        for one in self.original:
            lane, slot = self.terms.resolve(one.lane, one.slot)
            found[self.server(lane)] += max(one.length, 64)
            key = self.used.setdefault((lane, slot), one.key)
            assert key == one.key, "two partitions have the same place"
        return found

    def lose(self, server: int) -> None:
        before = self.held()
        sizes = {(o.lane, o.slot): max(o.length, 64) for o in self.original}
        now = {self.terms.resolve(*place): size for place, size in sizes.items()}
        self.living.discard(server)
        moves = self.terms.lose(server, f"server {server}", [], 0.0, False)
        first = sum(self.lanes[:server])
        assert [lane for lane, _ in moves] == list(range(first, first + self.lanes[server]))
        part = 0
        for lane, targets in moves:
            assert 1 <= len(targets) <= MOST_TARGETS
            assert all(self.server(target) in self.living for target, _ in targets)
            m = len(targets)
            parts = [0] * m
            for (at, slot), size in now.items():
                if at == lane:
                    parts[slot % m] += size
            part = max(part, *parts)
        after, total = self.held(), sum(before)
        assert sum(after) == total == sum(self.placement.server_bytes)
        assert after == self.placement.server_bytes and after[server] == 0
        rest = sum(self.shares[s] for s in self.living)
        if self.function != "balanced" or not rest:
            rest = 0
        for s in self.living:
            share = self.shares[s] / rest if rest else 1 / len(self.living)
            assert after[s] <= max(before[s], share * total + part) + 1
            assert share or after[s] == before[s]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_place_is_used_twice_and_bytes_stay_balanced_after_any_losses(data):
    lanes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    parts = data.draw(
        st.lists(st.integers(0, 4), min_size=len(lanes), max_size=len(lanes)).filter(any)
    )
    function = data.draw(st.sampled_from(["balanced", "djb2"]))
    placed = Placed(lanes, function, [p / sum(parts) for p in parts])
    for event in data.draw(st.lists(st.integers(-1, 300_000), max_size=30)):
        if event >= 0:
            placed.place(event)
        elif len(placed.living) > 1:
            placed.lose(data.draw(st.sampled_from(sorted(placed.living))))
    assert placed.terms.number == len(lanes) - len(placed.living)
    for one in placed.original:
        lane, _ = placed.terms.resolve(one.lane, one.slot)
        assert placed.server(lane) in placed.living
    placed.held()


def test_the_rule_of_the_moves_is_the_documented_one():
    placement = Placement([1, 1, 1], partition_bytes=4096)
    places = [placement.place(t, 4096)[0] for t in range(300)]
    terms = Terms(placement)
    ((lane, targets),) = terms.lose(1, "server 1", [], 0.0, False)
    assert lane == 1 and len(targets) == MOST_TARGETS
    for place in places:
        if place.lane == 1:
            target, base = targets[place.slot % MOST_TARGETS]
            assert terms.resolve(1, place.slot) == (target, base + place.slot // MOST_TARGETS)
        else:
            assert terms.resolve(place.lane, place.slot) == (place.lane, place.slot)


def test_an_unused_server_can_be_lost():
    placement = Placement([2, 1])
    assert placement.lose(0) == [(0, [(2, 0)]), (1, [(2, 0)])]
    assert placement.place(0, 100)[0][1:3] == (2, 0)


def test_the_largest_parts_go_first():
    placement = Placement([1] * 3, shares=[1, 0, 0], partition_bytes=1 << 20)
    for tensor, nbytes in enumerate((65536, 65536, 131072)):
        placement.place(tensor, nbytes)
    placement.lose(0)
    assert placement.server_bytes == [0, 131072, 131072]


def test_later_bytes_go_to_the_living_by_their_shares():
    placement = Placement([1] * 3, shares=[0.5, 0.25, 0.25], partition_bytes=4096)
    placement.lose(1)
    for tensor in range(300):
        placement.place(tensor, 4096)
    assert placement.server_bytes == [200 * 4096, 0, 100 * 4096]


# ---- the loss of a server


def moved(m: Membership, who: bytes, term: int = 1, again: int = 0, now: float = 1.0) -> list[Any]:
    return m.moved(who, {"term": term, "partitions": 3, "again": again}, now)


def lose(m: Membership, who: bytes = b"s0", now: float = 1.0) -> dict[bytes, Any]:
    out = m.gone(who, "its connection broke", now)
    assert {o["type"] for _, o in out} <= {"TERM", "ALL_JOINED", "GOODBYE", "LEFT", "END"}
    return dict(out)


def texts(out: list[Any]) -> set[str]:
    assert {o["type"] for _, o in out} <= {"LOST", "GOODBYE", "END"}
    return {o["text"] for _, o in out if o["type"] == "LOST"}


def test_all_live_nodes_learn_where_the_keys_go():
    m = elastic(2, 3)
    ((_, placed),) = m.declare(b"w0", declare("t", [4]))
    out = lose(m, b"s0")
    assert set(out) == {b"w0", b"w1", b"s1", b"s2"}
    first, *rest = out.values()
    assert rest == [first] * 3 and m.state == "running" and m.blamed is None
    assert first == {
        "type": "TERM",
        "term": 1,
        "moves": [(0, [(1, 0)])],
        "text": (
            "server 0 (h, pid 900) is gone: its connection broke; the job goes on with term 1: its"
            " keys go to server 1 (h, pid 901), server 2 (h, pid 902)"
        ),
        "missed": False,
        "yields": [],
        "dropped": [],
        "living": 0,
        "entered": [],
        "met": False,
        "leaving": [],
    }
    # A worker that declares the tensor later moves it by itself.
    assert dict(m.declare(b"w1", declare("t", [4])))[b"w1"]["places"] == placed["places"]
    assert placed["places"][0][1:3] == [0, 0]
    assert {o["places"][0][1] for _, o in m.declare(b"w0", declare("u", [4]))} == {2}


@pytest.mark.parametrize(("failure", "text"), [("", "has left while"), ("x", "has failed: x")])
def test_a_server_may_also_leave(failure, text):
    m = elastic(2, 2)
    out = m.bye(b"s1", {"failure": failure})
    assert kinds(out) == {b"s1": "GOODBYE", b"w0": "TERM", b"w1": "TERM", b"s0": "TERM"}
    assert text in dict(out)[b"w0"]["text"] and m.state == "running" and m.blamed is None


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (lambda: elastic(2, 1), "it was the last server"),
        (lambda: running(2, 2), "BPSX_ELASTIC=off"),
    ],
)
def test_a_job_that_cannot_go_on_says_why(job, why):
    m = job()
    ((text,), out) = (lambda out: (texts(out), out))(m.gone(b"s0", "cut"))
    assert text.startswith("server 0 (h, pid 900) is gone: cut; the job cannot go on without it: ")
    assert why in text and m.state == "failed" and str(m.blamed) == "server 0 (h, pid 900)"
    assert {ident for ident, _ in out} >= {b"w0", b"w1"} and not m.losses


def test_a_job_with_compressed_tensors_goes_on():
    m = elastic()
    m.declare(b"w0", {**declare("t", [4]), "codec": '{"compressor":"onebit","ef":"vanilla"}'})
    lose(m)


def test_the_second_of_two_servers_ends_the_job():
    m = elastic()
    lose(m)
    assert "last server" in texts(m.gone(b"s1", "cut")).pop()
    assert str(m.blamed) == "server 1 (h, pid 901)"


def test_nodes_must_agree_on_the_option():
    m = members(2, 2)
    m.hello(b"s0", hello("server", -1, 2, 2, config=config(2, 2, BPSX_ELASTIC="servers")))
    ((_, answer),) = m.hello(b"w0", hello("worker", 0, 2, 2))
    assert answer["type"] == "REFUSED" and "BPSX_ELASTIC=off on this worker" in answer["reason"]


@pytest.mark.parametrize(("hosts", "goes_on"), [("aaa", False), ("aab", True), ("abb", True)])
def test_by_default_jobs_of_several_machines_go_on(hosts: str, goes_on: bool) -> None:
    m = members(1, 2)
    options = config(1, 2, BPSX_ELASTIC="auto")
    m.hello(b"s0", {**hello("server", -1, 1, 2, pid=900, config=options), "host": hosts[0]})
    m.hello(b"s1", {**hello("server", -1, 1, 2, pid=901, config=options), "host": hosts[1]})
    out = m.hello(b"w0", {**hello("worker", 0, 1, 2, config=options), "host": hosts[2]})
    assert [o["elastic"] for _, o in out if o["type"] == "WELCOME"] == [goes_on] * 3
    m.gone(b"s0", "cut")
    assert (m.state == "running") is goes_on
    assert goes_on or "on one machine, and BPSX_ELASTIC is not set to servers" in m.failure


# ---- the recovery


def test_one_line_says_how_the_recovery_went():
    m = elastic(2, 3)
    lose(m, now=10.0)
    assert moved(m, b"w0", again=5, now=10.25) == [] and m.terms.finished == []
    assert moved(m, b"s1", now=10.25) == [] == moved(m, b"nobody") == moved(m, b"w0", again=5)
    assert moved(m, b"w1", again=6, now=10.5) == []
    assert str(m.terms.finished.pop()) == (
        "term 1: 2 workers have moved 6 partitions of server 0 (h, pid 900) and push 11 bytes"
        " again, 0.500 s after its loss was noticed"
    )
    assert moved(m, b"w1") == [] and m.terms.finished == []


def test_each_term_has_its_own_recovery():
    m = elastic(2, 4)
    lose(m, b"s0"), lose(m, b"s1")
    for who in (b"w0", b"w1"):
        moved(m, who, 1)
    assert [r.term for r in m.terms.finished] == [1] and m.terms.state.name == "MOVING"
    for who in (b"w0", b"w1"):
        moved(m, who, 2)
    assert [r.term for r in m.terms.finished] == [1, 2] and m.terms.state.name == "SETTLING"


def test_only_the_roots_of_machines_are_awaited():
    m = elastic(1, 2, BYTEPS_LOCAL_SIZE=2, BPSX_LOCAL_REDUCE=1)
    assert set(lose(m)) == {b"w0", b"w1", b"s1"}
    assert moved(m, b"w0") == [] and not m.terms.finished
    moved(m, b"w1")
    assert m.terms.finished[0].senders == 1
    assert kinds(m.bye(b"w0", GOOD))[b"w0"] == "GOODBYE"  # it holds nothing that others may lack


class Socket:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, str]] = []

    def send_multipart(self, frames: list[bytes]) -> None:
        self.sent.append((frames[0], messages.decode(frames[1])["type"]))


def test_the_hub_logs_and_tells_the_launcher(caplog, monkeypatch):
    hub: Any = object.__new__(Hub)
    hub._members, hub._socket, hub._gone = elastic(), Socket(), [(b"s0", False)]
    hub._broke, hub._reported, lines = "its connection broke", 0, []
    hub._silent_until = float("-inf")
    monkeypatch.setattr(hub, "_tell_launcher", lines.append)
    with caplog.at_level(logging.WARNING, "bpsx.scheduler"):
        hub._bury()
        for _ in range(2):
            hub._report_losses()
        fields = {"type": "MOVED", "term": 1, "partitions": 2, "again": 0}
        for who in (b"w0", b"w1"):
            message = messages.decode(messages.encode("MOVED", **fields))
            messages.check(message)
            hub._handle(who, message)
        for _ in range(2):
            hub._report_losses()
    assert lines == ["lost server 0 900", "gone server 900"]
    assert sorted(hub._socket.sent) == [(b"s1", "TERM"), (b"w0", "TERM"), (b"w1", "TERM")]
    lost, recovered = [r.getMessage() for r in caplog.records]
    assert lost.startswith("server 0 (h, pid 900) is gone") and recovered.startswith("term 1: ")


@pytest.mark.parametrize("field", ["term", "partitions", "again"])
def test_moved_needs_all_its_fields(field):
    fields = {"type": "MOVED", "term": 1, "partitions": 2, "again": 0}
    messages.check(fields)
    with pytest.raises(messages.BadMessage, match=field):
        messages.check({**fields, field: -1})


# ---- join() and stalls


@pytest.mark.parametrize("first", [True, False])
def test_join_does_not_await_a_lost_server(first):
    m = elastic(2, 3)
    m.join(b"w0"), m.join(b"w1")
    m.cleared(b"s1", {"generation": 0})
    if first:
        assert kinds(lose(m, b"s0").items())[b"w0"] == "TERM"
        assert kinds(m.cleared(b"s2", {"generation": 0})) == dict.fromkeys(
            (b"w0", b"w1"), "ALL_JOINED"
        )
    else:
        m.cleared(b"s2", {"generation": 0})
        out = m.gone(b"s0", "cut")
        assert [o["type"] for i, o in out if i == b"w1"] == ["TERM", "ALL_JOINED"]
    m.join(b"w0")
    assert {i for i, o in m.join(b"w1") if o["type"] == "CLEAR"} == {b"s1", b"s2"}


def stuck(m: Membership, now: float) -> list[Any]:
    """Each worker has waited for 40 s for what the other one has not pushed."""
    m.waiting(b"w0", waiting(["a", 0, 0, 40.0]), now)
    return m.waiting(b"w1", waiting(["b", 0, 0, 40.0]), now)


def test_a_move_makes_no_deadlock():
    assert "RESET" in kinds(stuck(elastic(), 100.0)).values()
    m = elastic()
    lose(m, now=99.0)
    assert "RESET" not in kinds(stuck(m, 100.0)).values()
    assert "RESET" not in kinds(stuck(m, 140.0)).values()  # not all have moved
    moved(m, b"w0", now=141.0), moved(m, b"w1", now=141.0)
    assert "RESET" not in kinds(stuck(m, 142.0)).values()
    assert "RESET" in kinds(stuck(m, 180.0)).values()


# ---- workers that leave


def test_a_worker_stays_until_others_have_what_it_may_keep():
    """The last step: w0 has all results, w1 lacks one that only w0 has, and the server dies."""
    m = elastic()
    lose(m)
    assert m.bye(b"w0", GOOD) == []  # crosses TERM
    assert moved(m, b"w0") == [] == moved(m, b"w1", again=4)
    assert m.settle(1.0 + SETTLE_SECONDS / 2) == []
    out = m.bye(b"w1", GOOD)  # w0 has given the result
    assert [o["type"] for i, o in out if i in (b"w0", b"w1")] == ["GOODBYE"] * 2
    assert (b"s1", {"type": "END"}) in out and m.state == "done"


def test_a_worker_need_not_stay_for_long():
    m = elastic()
    lose(m), moved(m, b"w0"), moved(m, b"w1", now=2.0)
    assert m.bye(b"w0", GOOD) == [] == m.settle(2.0 + SETTLE_SECONDS - 0.1)
    assert kinds(m.settle(2.0 + SETTLE_SECONDS))[b"w0"] == "GOODBYE"
    assert kinds(m.bye(b"w1", GOOD))[b"w1"] == "GOODBYE" and m.state == "done"


def test_a_worker_stays_longer_for_one_that_waits():
    m = elastic()
    m.declare(b"w1", declare("t", [4]))
    lose(m), moved(m, b"w0"), moved(m, b"w1", again=16)
    m.bye(b"w0", GOOD)
    m.waiting(b"w1", waiting(["t", 0, 0, 1.0]), 3.0)
    assert m.settle(1.0 + SETTLE_SECONDS) == []
    m.waiting(b"w1", waiting(over=[["t", 0]]), 9.0)
    assert kinds(m.settle(9.0))[b"w0"] == "GOODBYE" and m.state == "running"


def test_a_worker_that_waits_in_vain_for_one_that_left_is_not_left_alone():
    m = elastic()
    m.declare(b"w1", declare("t", [4]))
    lose(m), moved(m, b"w0"), moved(m, b"w1", again=16)
    m.bye(b"w0", GOOD)
    m.waiting(b"w1", waiting(["t", 0, 0, 1.0]), 3.0)
    assert kinds(m.settle(1.0 + LONGEST_SECONDS))[b"w0"] == "GOODBYE"
    (text,) = texts(m.waiting(b"w1", waiting(), 40.0))
    assert "worker 1 (h, pid 101) waits for 't'" in text and m.state == "failed"


def test_a_worker_that_dies_while_it_stays_has_left():
    m = elastic()
    lose(m)
    m.bye(b"w0", GOOD)
    out = m.gone(b"w0", "cut")
    assert kinds(out) == {b"s1": "LEFT"} and m.state == "running"
    assert moved(m, b"w1") == [] and len(m.terms.finished) == 1
    assert kinds(m.bye(b"w1", GOOD))[b"w1"] == "GOODBYE" and m.state == "done"


def test_what_it_took_along_ends_the_job_if_another_needs_it():
    m = elastic()
    m.declare(b"w1", declare("t", [4]))
    lose(m)
    m.bye(b"w0", GOOD), m.gone(b"w0", "cut")
    assert moved(m, b"w1", again=16) == []  # w0 may have given it
    (text,) = texts(m.waiting(b"w1", waiting(["t", 0, 0, 1.0]), 3.0))
    assert "worker 1 (h, pid 101) waits for 't'" in text and m.state == "failed"


def test_a_failing_worker_does_not_stay():
    m = elastic()
    lose(m)
    out = m.bye(b"w0", {"failure": "ended by ValueError: x"})
    assert "LOST" in kinds(out).values() and str(m.blamed) == "worker 0 (h, pid 100)"


# ---- servers that are lost at the end of a job


def ending(**changes: Any) -> Membership:
    """w0 has left in good order; t is on server 0, u on both."""
    m = elastic(2, 2, BYTEPS_PARTITION_BYTES=4096, **changes)
    for who in (b"w0", b"w1"):
        ((_, t),) = m.declare(who, declare("t", [1024]))
        ((_, u),) = m.declare(who, declare("u", [2048]))
    assert [p[1] for p in t["places"]] == [0] and {p[1] for p in u["places"]} == {0, 1}
    m.bye(b"w0", GOOD)
    assert m.state == "running"
    return m


def test_a_job_whose_workers_have_all_they_need_ends_well_without_a_server():
    m = ending()
    out = lose(m)
    assert kinds(out.items()) == {b"w1": "TERM", b"s1": "TERM"}
    assert "but none of them can be summed any more, as worker 0" in out[b"w1"]["text"]
    assert out[b"w1"]["missed"]
    assert moved(m, b"w1", again=0) == []
    out = m.bye(b"w1", GOOD)
    assert kinds(out) == {b"w1": "GOODBYE", b"s1": "END"} and m.state == "done"
    assert m.gone(b"s1", "cut") == [] and m.state == "done" and m.blamed is None


def test_it_may_also_end_before_its_last_worker_has_moved():
    m = ending()
    lose(m)
    assert kinds(m.bye(b"w1", GOOD))[b"w1"] == "GOODBYE" and m.state == "done"


REASON = (
    "server 0 (h, pid 900) is gone: its connection broke; the job cannot go on without it: worker 1"
    " (h, pid 101) waits for {}, and worker 0 (h, pid 100) had left in good order, perhaps with the"
    " only result"
)


def test_a_worker_that_still_needs_the_server_ends_the_job():
    m = ending()
    lose(m)
    (text,) = texts(moved(m, b"w1", again=7))
    assert text == REASON.format("7 bytes that it had pushed there") and m.state == "failed"
    assert str(m.blamed) == "server 0 (h, pid 900)"


def test_so_does_one_that_waits_for_it():
    m = ending()
    lose(m)
    assert m.waiting(b"w1", waiting(["t", 0, 0, 5.0]), 2.0) == []  # the result may just have come
    moved(m, b"w1")
    (text,) = texts(m.waiting(b"w1", waiting(), 3.0))
    assert text == REASON.format("'t' (float32 of shape (1024,))") and m.state == "failed"


def test_what_is_under_way_from_other_servers_may_come():
    m = ending()
    lose(m), moved(m, b"w1")
    assert m.waiting(b"w1", waiting(["u", 0, 0, 1.0]), 2.0) == []
    assert m.waiting(b"w1", waiting(), 0.9 + LONGEST_SECONDS)[0][1]["type"] == "WARN"
    assert "'u'" in texts(m.waiting(b"w1", waiting(), 1.0 + LONGEST_SECONDS)).pop()


def test_a_worker_that_fails_afterwards_says_what_was_lost():
    m = ending()
    lose(m)
    out = m.bye(b"w1", {"failure": "left with 1 push_pulls under way"})
    assert kinds(out)[b"s1"] == "END"
    assert m.failure.endswith("; before, the job had lost server 0 (h, pid 900)")


def test_an_asynchronous_job_does_not_need_workers_that_have_left() -> None:
    """Neither before a server is lost nor while keys move; nor those that have died."""
    m = elastic(4, 3, BYTEPS_ENABLE_ASYNC=1)
    m.bye(b"w3", GOOD)
    out = dict(m.gone(b"s0", "cut"))
    assert not out[b"w1"]["missed"] and b"w3" not in out
    m.moved(b"w0", {"term": 1, "partitions": 2, "again": 64}, 0.0)
    m.moved(b"w1", {"term": 1, "partitions": 2, "again": 0}, 0.0)
    assert m.terms is not None and m.terms.finished == []
    assert {o["type"] for _, o in m.gone(b"w2", "cut")} == {"WARN", "LEFT"}
    (recovery,) = m.terms.finished
    assert (recovery.senders, recovery.partitions, recovery.again) == (2, 4, 64)
    assert not m.terms.any_missed
    out = dict(m.gone(b"s1", "cut"))
    assert out[b"w1"]["term"] == 2 and not out[b"w1"]["missed"]


def test_an_asynchronous_job_does_not_need_workers_that_wait_to_leave() -> None:
    """Those that are left report push_pulls for as long as they like."""
    m = elastic(2, 3, BYTEPS_ENABLE_ASYNC=1)
    for worker in (b"w0", b"w1"):
        m.declare(worker, declare("t", [4]))
    m.gone(b"s0", "cut")
    for worker in (b"w0", b"w1"):
        m.moved(worker, {"term": 1, "partitions": 1, "again": 0}, 10.0)
    m.waiting(b"w1", waiting(["t", 0, 0, 2.0]), 10.5)
    assert m.bye(b"w0", GOOD) == [] and m.terms is not None
    assert m.settle(10 + SETTLE_SECONDS) == []
    assert kinds(m.settle(10 + LONGEST_SECONDS))[b"w0"] == "GOODBYE"
    assert not m.terms.any_missed and m.state == "running"
    assert kinds(m.waiting(b"w1", waiting(["t", 0, 0, 2.0]), 90.0)) == {b"w1": "WARN"}


def test_keys_of_earlier_terms_are_not_missed():
    """Only what was on a server that was lost after a worker had left cannot be summed."""
    m = elastic(2, 3, BYTEPS_PARTITION_BYTES=4096)
    for who in (b"w0", b"w1"):
        m.declare(who, declare("t", [1024]))
    lose(m, b"s0"), moved(m, b"w0"), moved(m, b"w1"), m.settle(1.0 + SETTLE_SECONDS)
    holder = m.terms.resolve(0, 0)[0]
    m.bye(b"w0", GOOD)
    other = 3 - holder
    lose(m, b"s%d" % other), moved(m, b"w1", term=2)
    assert m.waiting(b"w1", waiting(["t", 0, 0, 2.0]), 90.0) == []
    assert m.state == "running"


def test_what_moved_to_a_missed_server_is_missed():
    m = elastic(2, 3, BYTEPS_PARTITION_BYTES=4096)
    for who in (b"w0", b"w1"):
        m.declare(who, declare("t", [1024]))
    lose(m, b"s0"), moved(m, b"w0"), moved(m, b"w1"), m.settle(1.0 + SETTLE_SECONDS)
    holder = m.terms.resolve(0, 0)[0]
    m.bye(b"w0", GOOD)
    lose(m, b"s%d" % holder), moved(m, b"w1", term=2)
    (text,) = texts(m.waiting(b"w1", waiting(["t", 0, 0, 2.0]), 90.0))
    assert text.startswith(f"server {holder} ")
