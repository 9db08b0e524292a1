"""How the scheduler goes on without workers that it loses."""

from __future__ import annotations

import pytest

from bpsx.scheduler.membership import Membership
from bpsx.scheduler.messages import TERM_FIELDS
from bpsx.scheduler.states import Handover, JobState
from unit.scheduler_tools import declare, kinds, late_server, running
from unit.scripted_job import World

MET = TERM_FIELDS.index("met")
SHRINK = {"BPSX_ELASTIC": "shrink", "BPSX_ELASTIC_WAIT": 1}


def shrinking(workers: int = 3, servers: int = 1, **changes) -> Membership:
    return running(workers, servers, **{**SHRINK, **changes})


def moved(m: Membership, who: bytes, term: int, again: int = 0) -> list:
    return m.moved(who, {"term": term, "partitions": 0, "again": again}, 1.0)


def test_all_others_hear_of_a_lost_worker():
    m = shrinking()
    out = m.gone(b"w1", "its connection broke", 0.5)
    assert set(kinds(out).values()) == {"TERM"} and set(dict(out)) == {b"w0", b"w2", b"s0"}
    assert {**dict(out)[b"s0"], "text": ""} == {
        "type": "TERM",
        "term": 1,
        "moves": [],
        "text": "",
        "missed": False,
        "yields": [],
        "dropped": [1],
        "living": 2,
        "entered": [],
        "met": False,
        "leaving": [],
    }
    assert m.state is JobState.RUNNING and m.blamed is None
    moved(m, b"w0", 1, 100), moved(m, b"w2", 1, 100)
    assert "2 workers go on without worker 1 (h, pid 101) and push 200 bytes again, 0.500 s" in str(
        m.terms.finished[0]
    )


def test_a_second_loss_replaces_the_first_recovery():
    m = shrinking(4)
    m.gone(b"w1", "cut")
    m.gone(b"w2", "cut")
    moved(m, b"w0", 2), moved(m, b"w3", 2)
    assert m.terms.state is Handover.SETTLING and m.terms.dropped == {1: 1, 2: 2}


def test_a_worker_that_fails_is_lost():
    m = shrinking()
    out = m.bye(b"w1", {"failure": "ValueError: no"})
    assert kinds(out) == {b"w0": "TERM", b"w2": "TERM", b"s0": "TERM", b"w1": "GOODBYE"}
    assert "no" in dict(out)[b"w0"]["text"]


def test_a_job_that_does_not_shrink_ends():
    m = shrinking(3, BPSX_ELASTIC="servers")
    out = m.gone(b"w1", "cut")
    assert set(kinds(out).values()) == {"LOST"} and m.state is JobState.FAILED
    assert "cannot go on" not in m.failure


def test_the_last_worker_ends_the_job():
    m = shrinking(2)
    m.gone(b"w1", "cut")
    m.gone(b"w0", "cut")
    assert m.state is JobState.FAILED and "it was the last worker" in m.failure


def test_a_worker_that_has_left_may_have_the_only_result():
    m = shrinking(3)
    m.bye(b"w0", {"failure": ""})
    m.gone(b"w1", "cut")
    assert "worker 0 (h, pid 100) has left, perhaps with the only result" in m.failure


def test_join_does_not_wait_for_a_lost_worker():
    m = shrinking(3)
    m.join(b"w0"), m.join(b"w2")
    out = m.gone(b"w1", "cut")
    assert [o["type"] for who, o in out if who == b"s0"] == ["TERM", "CLEAR"]
    assert "UNJOINED" not in kinds(out).values()
    out = m.cleared(b"s0", {"generation": 0})
    assert kinds(out) == {b"w0": "ALL_JOINED", b"w2": "ALL_JOINED"}
    # Nor does the next one.
    m.join(b"w0")
    assert "UNJOINED" not in kinds(m.join(b"w2")).values()


def test_a_server_that_joins_is_sent_away_and_may_come_again():
    m = shrinking(3)
    m.elastic_wait = 30.0
    m.hello(b"l0", late_server(0, 3, **SHRINK))
    out = kinds(m.gone(b"w1", "cut"))
    assert out[b"l0"] == "LOST" and out[b"w0"] == "TERM"
    out = dict(m.hello(b"l1", late_server(1, 3, **SHRINK)))
    welcome = out[b"l1"]
    assert (welcome["term"], welcome["dropped"], welcome["left"]) == (1, [(1, 1)], [])
    assert welcome["shrinks"] and set(out) == {b"l1", b"w0", b"w2"}


def test_a_lost_worker_that_comes_back_is_told_so():
    world = World(3, 1, elastic="shrink")
    world.settle()
    lost = world.workers[1]
    world.bury(lost)  # it was only silent
    lost.state = "orphaned"
    world.settle()
    assert lost.over and "this worker is not awaited any more" in lost.lost


def test_nobody_ends_before_a_worker_confirms_that_the_job_goes_on_without_it():
    """The scheduler was silent, and worker 2, whose connection has not ended, is silent, too."""
    world = World(3, 2, elastic="shrink")
    world.settle()
    back = [*world.workers[:2], world.nodes[0]]  # and a server
    for node in back:
        world.bury(node)
        node.state = "orphaned"
    for node in back:
        node.introduce()
        while node.outbox:
            world.act(node)
        while node.inbox:
            node.take()
    assert world.hub.state is JobState.RUNNING and not any(node.over for node in back)


def test_the_job_ends_well_without_the_lost():
    m = shrinking(3)
    m.gone(b"w1", "cut")
    m.bye(b"w0", {"failure": ""}), m.bye(b"w2", {"failure": ""})
    assert m.state is JobState.DONE


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("heard", ["w0", "s0", "w0 s1", "w2 s0 s1", "w0 w2 s0 s1"])
def test_the_scheduler_dies_while_it_tells_of_a_lost_worker(heard, comes_back):
    """One that is started again goes on without the worker, which all hear of in one term."""
    world = World(3, 2, elastic="shrink")
    names = dict(zip(("s0", "s1", "w0", "w1", "w2"), world.nodes))
    lost = names["w1"]
    if not comes_back:
        world.kill(lost)
    world.bury(lost)
    for name in heard.split():
        while names[name].inbox:
            names[name].take()
    world.kill_hub()
    if comes_back:
        lost.state = "orphaned"
    world.settle()
    assert world.hub.state is JobState.RUNNING, world.hub.failure
    for name in ("w0", "w2"):
        # Lanes ignore the number of a term of which only they have heard.
        *skipped, (term, moves, _, _, _, dropped, living, *_), met = names[name].decisions.terms
        assert met[MET]
        assert (moves, dropped, living) == ([], [1], 2) and not any(t[5] for t in skipped)
        assert term == 1 + any(name[0] == "s" for name in heard.split()) * ("w" not in heard)
    assert [set(names[name].marks.dropped) for name in ("s0", "s1")] == [{1}, {1}]
    assert world.hub.terms.state is Handover.SETTLED
    assert "not awaited any more" in lost.lost if comes_back else not lost.over
    # A second loss, and the end.
    world.kill(names["w0"])
    world.settle()
    assert [term[5] for term in names["w2"].decisions.terms if term[5]] == [[1], [0]]
    names["w2"].leave()
    world.settle()
    assert world.hub.state is JobState.DONE


def test_lanes_whose_term_no_worker_knows_hear_of_a_later_one():
    """A server has heard that a worker was lost in term 2; no worker has heard of term 1 or 2."""
    world = World(3, 2, elastic="shrink")
    names = dict(zip(("s0", "s1", "w0", "w1", "w2"), world.nodes))
    for i in range(40):
        for worker in world.workers:
            worker.declare(f"t{i}", 100_000)
    world.settle()
    world.arrive()
    while not world.hub.terms.number:  # the keys that move to the new server
        world.look()
        for node in world.nodes:
            while node.outbox and not world.hub.terms.number:
                world.act(node)
        for node in world.nodes if not world.hub.terms.number else ():
            while node.inbox:
                node.take()
            if node in world.workers:
                node.connect()
    world.kill(names["w1"]), world.bury(names["w1"])
    while names["s0"].inbox:
        names["s0"].take()
    assert names["s0"].marks.dropped == {1: 2}
    world.kill_hub()
    world.settle()
    assert world.hub.state is JobState.RUNNING, world.hub.failure
    for name in ("w0", "w2"):
        terms = [(t[0], t[5]) for t in names[name].decisions.terms if not t[MET]]
        assert terms == [(1, []), (2, []), (3, [1])]
    assert [names[name].marks.dropped for name in ("s0", "s1")] == [{1: 3}, {1: 3}]


def test_a_leaver_that_dies_while_lanes_wait_for_it_is_lost():
    m = shrinking(3)
    m.gone(b"w1", "cut", 0.5)
    assert not m.bye(b"w0", {"failure": ""}, 1.0)  # it has to stay until keys have been taken over
    terms = [x for _, x in m.gone(b"w0", "killed", 1.5) if x["type"] == "TERM"]
    assert terms and terms[0]["dropped"] == [0] and terms[0]["living"] == 1
    moved(m, b"w2", 2)
    assert m.terms.state is Handover.SETTLING and m.state is JobState.RUNNING


def test_a_server_that_a_worker_does_not_reach_any_more_is_replaced():
    m = shrinking(3, 2)
    out = m.broken(b"w0", {"server": 1, "alone": False}, 0.5)
    assert kinds(out) == {b"s1": "LOST", **dict.fromkeys((b"w0", b"w1", b"w2", b"s0"), "TERM")}
    text = "server 1 (h, pid 901) is gone: its connection to worker 0 (h, pid 100) broke"
    assert dict(out)[b"s1"]["text"] == f"this server has been replaced: {text}"
    assert m.broken(b"w1", {"server": 1, "alone": False}, 0.5) == [], "all know"
    assert m.broken(b"w1", {"server": 0, "alone": False}, 0.5) == [], "no other server is left"
    assert m.state is JobState.RUNNING


def test_a_server_is_replaced_if_all_workers_say_that_they_reach_none():
    """The last one: the job waits for another. One worker alone may be to blame itself."""
    m = shrinking(2, 1)
    m.elastic_wait = 5.0
    assert m.broken(b"w0", {"server": 0, "alone": True}, 0.5) == []
    assert m.broken(b"w0", {"server": 0, "alone": True}, 0.6) == []
    out = m.broken(b"w1", {"server": 0, "alone": True}, 0.7)
    assert kinds(out) == {b"s0": "LOST", b"w0": "GONE", b"w1": "GONE"}
    assert m.state is JobState.RUNNING and m.starvation is not None


@pytest.mark.parametrize("who", [b"w1", b"s0", b"nobody"])
def test_only_a_living_worker_may_have_a_server_replaced(who):
    m = shrinking(3, 2)
    m.gone(b"w1", "cut")
    assert m.broken(who, {"server": 1, "alone": False}, 0.5) == []


def test_a_server_stays_in_a_job_that_cannot_replace_it():
    m = running(2, 2, BPSX_ELASTIC="off")
    assert m.broken(b"w0", {"server": 1, "alone": False}, 0.5) == [] and m.state is JobState.RUNNING


def test_a_scheduler_that_loses_all_workers_does_not_know_that_the_job_has_failed():
    """It may have been silent itself."""
    m = shrinking(2)
    m.gone(b"w0", "cut")
    assert not m.unheard
    m.gone(b"w1", "cut")
    assert m.state is JobState.FAILED and m.unheard and m.deserted


def test_a_worker_that_has_heard_of_the_failure_proves_it():
    m = running(2, 1, BPSX_ELASTIC="servers")
    m.gone(b"w0", "cut")
    assert m.state is JobState.FAILED and m.unheard and not m.deserted
    m.bye(b"w1", {"failure": "worker 0 is gone"})
    assert not m.unheard and not m.deserted


def test_a_job_that_is_not_elastic_has_failed_when_a_worker_is_gone():
    m = running(2, 1, BPSX_ELASTIC="off")
    m.gone(b"w0", "cut"), m.gone(b"w1", "cut")
    assert m.state is JobState.FAILED and not m.unheard


def test_a_leaver_that_another_one_holds_up_leaves_later():
    """Workers 0 and 1 ask to leave before worker 2 has confirmed an error.

    Worker 0 fails, so those that are left begin a new term. Worker 1 leaves once it has begun.
    """
    m = shrinking()
    for who, elements in ((b"w0", 4), (b"w1", 4), (b"w2", 5)):
        m.declare(who, declare("x", [elements]))
    m.heard(b"w0"), m.heard(b"w1")
    assert m.bye(b"w0", {"failure": "ValueError: no"}) == m.bye(b"w1", {"failure": ""}) == []
    assert kinds(m.heard(b"w2"))[b"w0"] == "GOODBYE"
    assert list(m._roster.leaving) == [b"w1"]
    moved(m, b"w1", 1), moved(m, b"w2", 1)
    assert kinds(m.settle(99.0))[b"w1"] == "GOODBYE" and not m._roster.leaving
