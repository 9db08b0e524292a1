"""Who is missed while a job gathers: when that counts as a death, and what comes back in time."""

from __future__ import annotations

import pytest

from bpsx.rendezvous.vanished import Vanished


def test_nobody_is_missed_at_first():
    assert Vanished().due(10.0, 3.0) is None


def test_the_clock_starts_at_the_first_look():
    v = Vanished()
    v.miss("worker", 1, "worker 1 is gone")
    assert v.due(100.0, 3.0)[0] == 103.0
    when, text = v.due(102.0, 3.0)
    assert when == 103.0 and text.startswith("worker 1 is gone, and has not come back for 3 s")


@pytest.mark.parametrize(("role", "rank", "due"), [("worker", 1, False), ("worker", 0, True), ("server", 1, True)])
def test_only_the_same_worker_takes_its_place(role, rank, due):
    v = Vanished()
    v.miss("worker", 1, "worker 1 is gone")
    v.back(role, rank)
    assert (v.due(0.0, 3.0) is not None) == due


def test_a_worker_that_died_twice_is_back_once():
    v = Vanished()
    v.miss("worker", 1, "first")
    v.miss("worker", 1, "second")
    v.back("worker", 1)
    assert v.due(0.0, 3.0) is None


def test_servers_are_counted():
    v = Vanished()
    v.miss("server", 0, "server 0 is gone")
    v.due(0.0, 3.0)
    v.miss("server", 1, "server 1 is gone")
    v.back("server", 0)
    assert v.due(1.0, 3.0)[1].startswith("server 1 is gone")
    v.back("server", 1)
    assert v.due(1.0, 3.0) is None
