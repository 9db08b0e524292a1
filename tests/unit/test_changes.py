"""The changes of a job that observers see: what, who, why, and for how long the job stopped."""

from __future__ import annotations

import pytest

from bpsx.scheduler.changes import MOST, Changes
from bpsx.scheduler.membership import Membership
from bpsx.scheduler.observers import Observers
from unit.scheduler_tools import late_server, running

SHRINK = {"BPSX_ELASTIC": "shrink", "BPSX_ELASTIC_WAIT": 60}


def moved(m: Membership, term: int, *idents: bytes, at: float) -> None:
    for ident in idents:
        m.moved(ident, {"term": term, "partitions": 1, "again": 50}, at)


def seen(m: Membership, now: float = 9.0) -> list[tuple]:
    fields = ("term", "what", "who", "why", "ago", "seconds", "again")
    return [tuple(change[field] for field in fields) for change in m.changes(now)["changes"]]


def states(m: Membership) -> dict[str, str]:
    nodes = Observers(m, "h").view(9.0)["nodes"]
    return {f"{node['role']} {node['rank']}": node["state"] for node in nodes}


def test_each_loss_keeps_its_own_gap():
    m = running(3, 2, **SHRINK)
    m.gone(b"s1", "its connection broke", 1.0)
    moved(m, 1, b"w0", b"w1", b"w2", at=1.5)
    m.bye(b"w2", {"failure": "ValueError: a\nb"}, 3.0)
    moved(m, 2, b"w0", at=3.25)
    server = (1, "lost", "server 1 (h, pid 901)", "its connection broke", 8.0, 0.5, 150)
    who, why = "worker 2 (h, pid 102)", "ValueError: a\nb"
    assert seen(m) == [server, (2, "lost", who, why, 6.0, None, 0)]
    moved(m, 2, b"w1", at=3.5)
    assert seen(m) == [server, (2, "lost", who, why, 6.0, 0.5, 100)]
    kept = {"worker 0": "running", "worker 1": "running", "server 0": "running"}
    assert states(m) == {**kept, "worker 2": "lost", "server 1": "lost"}


def test_a_server_that_asks_to_leave_is_not_lost():
    m = running(2, 2, **SHRINK)
    m.depart(b"s1", {"why": "SIGTERM", "needs": ""}, 2.0)
    moved(m, 1, b"w0", b"w1", at=2.5)
    assert seen(m) == [(1, "left", "server 1 (h, pid 901)", "SIGTERM", 7.0, 0.5, 100)]
    assert states(m)["server 1"] == "left"


def test_the_last_server_is_lost_once_and_its_gap_lasts_until_another_is_used():
    m = running(2, 1, **SHRINK)
    m.elastic_wait = 60.0
    m.gone(b"s0", "its connection broke", 1.0)
    lost = ("lost", "server 0 (h, pid 900)", "its connection broke", 8.0)
    assert seen(m) == [(0, *lost, None, 0)]
    m.tend(4.0)
    m.hello(b"s1", late_server(1, 2, 1, **SHRINK))
    for ident in (b"w0", b"w1"):
        m.connected(ident, {"server": 1, "failure": ""}, 4.0)
    moved(m, 1, b"w0", b"w1", at=4.5)
    (term, *of_lost), (_, what, who, *_) = seen(m)
    assert (term, of_lost) == (1, [*lost, 3.5, 100])
    assert what == "joined" and who.startswith("server 1 ("), who
    assert m.changes(9.0)["servers_lost"] == 1


def test_the_dead_workers_of_an_asynchronous_job_are_lost():
    m = running(3, 1, BYTEPS_ENABLE_ASYNC=1)
    for rank in (1, 2):
        m.gone(b"w%d" % rank, "its connection broke", 1.0)
    lost = [(0, "lost", f"worker {r} (h, pid 10{r})", "its connection broke") for r in (1, 2)]
    assert [change[:4] for change in seen(m)] == lost
    assert states(m) == {
        "worker 0": "running", "worker 1": "lost", "worker 2": "lost", "server 0": "running"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "entered", "yields", "shown"),
    [
        (
            "server 1 (a-b.c, pid 7) is gone: it broke; the job goes on with term 1: its keys",
            False,
            False,
            ("lost", "server 1 (a-b.c, pid 7)", "it broke"),
        ),
        (
            "worker 1 (h, pid 7) leaves the job: SIGTERM; the job goes on with term 1 and 2 of 3",
            False,
            False,
            ("left", "worker 1 (h, pid 7)", "SIGTERM"),
        ),
        (
            "worker 1 (h, pid 7), worker 2 (h, pid 8) has joined: the job goes on with term 1",
            True,
            False,
            ("joined", "worker 1 (h, pid 7), worker 2 (h, pid 8)", ""),
        ),
        (
            "term 1: keys of the others move to server 2 (h, pid 9)",
            False,
            True,
            ("moved", "server 2 (h, pid 9)", "they lacked keys"),
        ),
        ("what no scheduler says", False, False, ("lost", "", "what no scheduler says")),
    ],
)
def test_terms_of_an_earlier_scheduler(text, entered, yields, shown):
    changes = Changes()
    changes.restored(1, text, entered, yields)
    changes.went_on(1, 0.5, 10)  # counted since the new scheduler came
    (found,) = changes.view(1.0)
    assert (found["what"], found["who"], found["why"]) == shown
    assert found["ago"] is None and found["seconds"] is None


def test_old_changes_are_forgotten():
    changes = Changes()
    for i in range(MOST + 3):
        changes.joined(i, f"worker {i}", 0.0)
    assert [change["term"] for change in changes.view(0.0)] == list(range(3, MOST + 3))
