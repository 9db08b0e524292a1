"""Processes missed while a job gathers: when that counts as a death, and which may come back."""

from __future__ import annotations

import pytest

from bpsx.scheduler.departures import Vanished
from bpsx.scheduler.roster import Node
from bpsx.scheduler.states import Presence


def node(role: str, rank: int, host: str, presence: Presence = Presence.ABSENT) -> Node:
    return Node(b"x", role, rank, host, 7, presence=presence)


def missed(role: str, rank: int) -> Node:
    return node(role, rank, "h", Presence.MISSED)


def test_no_process_is_missed_at_first():
    assert Vanished().due(10.0, 3.0) is None


def test_the_clock_starts_at_the_first_look():
    v = Vanished()
    v.miss(missed("worker", 1), "worker 1 is gone")
    assert v.due(100.0, 3.0)[0] == 103.0
    when, text = v.due(102.0, 3.0)
    assert when == 103.0 and text.startswith("worker 1 is gone, and did not come back within 3 s")


@pytest.mark.parametrize(
    ("role", "rank", "due"), [("worker", 1, False), ("worker", 0, True), ("server", 1, True)]
)
def test_only_the_same_worker_takes_its_place(role, rank, due):
    v = Vanished()
    v.miss(missed("worker", 1), "worker 1 is gone")
    v.back(node(role, rank, "h"), 0)
    assert (v.due(0.0, 3.0) is not None) == due


def test_a_worker_that_died_twice_is_back_once():
    v = Vanished()
    v.miss(missed("worker", 1), "first")
    v.miss(missed("worker", 1), "second")
    v.back(node("worker", 1, "elsewhere"), 0)
    assert v.due(0.0, 3.0) is None


def test_servers_are_counted():
    v = Vanished()
    v.miss(missed("server", 0), "server 0 is gone")
    v.due(0.0, 3.0)
    v.miss(missed("server", 1), "server 1 is gone")
    v.back(node("server", 0, "h"), 1)
    assert v.due(1.0, 3.0)[1].startswith("server 1 is gone")
    v.back(node("server", 1, "h"), 0)
    assert v.due(1.0, 3.0) is None


def test_a_server_on_another_host_counts_as_the_missing_one_only_if_no_other_is_awaited():
    v = Vanished()
    v.miss(node("server", 0, "here", Presence.MISSED), "server 0 is gone")
    v.back(node("server", 1, "there"), 1)
    assert v.due(0.0, 3.0)[1].startswith("server 0 is gone")
    v.back(node("server", 1, "there"), 0)
    assert v.due(0.0, 3.0) is None


def test_repeated_refusals_of_one_process_share_a_deadline():
    v = Vanished()
    for role, rank in (("worker", 1), ("server", -1)):
        v.turn_away(node(role, rank, "h"), f"{role} was refused (first)")
        v.due(10.0, 3.0)
        v.turn_away(node(role, rank, "h"), f"{role} was refused (second)")
        when, text = v.due(12.0, 3.0)
        assert when == 13.0 and text.startswith(
            f"{role} was refused (second), and did not come back within 3 s"
        )
        v.back(node(role, rank, "h"), 0)
        assert v.due(12.0, 3.0) is None
