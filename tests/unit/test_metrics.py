"""The metrics as Prometheus' reader understands them, and the observers' part in the scheduler."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bpsx.scheduler import messages
from bpsx.scheduler.metrics import METRICS, JobCollector
from bpsx.scheduler.observers import LEASE, RENEW, Observers
from support.exposition import parse
from support.places import ROOT
from unit.scheduler_tools import elastic, hello, late_server, running, waiting
from unit.test_leaving_workers import parting


def observed(members=None):
    members = members or running(2, 1)
    return members, Observers(members, "h")


def stats(at=1, late=(), **values):
    return {"type": "STATS", "at": at, "values": values, "late": [list(x) for x in late]}


OBSERVE = {"type": "OBSERVE", "protocol": messages.PROTOCOL, "trace": 0}


def scraped(o, *names):
    """The metrics of a scrape: all, or those with these names."""
    registry = CollectorRegistry()
    registry.register(JobCollector(o))
    return parse(
        generate_latest(registry.restricted_registry(names) if names else registry).decode()
    )


def of(role, rank, host="h", **more):
    """The labels of a sample."""
    return tuple(sorted({"role": role, "rank": str(rank), "host": host, **more}.items()))


def test_every_figure_can_be_read(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 12.0)
    _, o = observed()
    o.handle(b"w1", stats(push_pulls=7, busy_ns=1_500_000_000, bytes_sent=2**60), 10.0)
    o.handle(b"s0", stats(late=[(1, 0), (9, 2_500_000_000)], rounds=10, waited_ns=3), 10.0)
    found = scraped(o)
    w1, s0 = of("worker", 1), of("server", 0)
    assert found["bpsx_push_pulls_total"] == ("counter", {w1: 7.0})
    assert found["bpsx_busy_seconds_total"][1][w1] == 1.5
    assert found["bpsx_sent_bytes_total"][1][w1] == 2.0**60
    assert found["bpsx_report_age_seconds"] == ("gauge", {w1: 2.0, s0: 2.0})
    assert found["bpsx_worker_late_seconds_total"][1] == {
        of("server", 0, worker="0"): 0.0,
        of("server", 0, worker="1"): 2.5,
    }
    assert found["bpsx_worker_last_rounds_total"][1][of("server", 0, worker="1")] == 9.0
    assert found["bpsx_round_wait_seconds_total"][1][s0] == pytest.approx(3e-9)


def test_a_host_name_may_have_any_characters():
    members, o = observed()
    members.nodes[b"w0"].host = 'a"b\\c\nd'
    assert scraped(o)["bpsx_up"][1][of("worker", 0, 'a"b\\c\nd')] == 1


def test_a_scrape_may_name_the_metrics_that_it_wants():
    _, o = observed()
    assert set(scraped(o, "bpsx_up", "bpsx_tensors")) == {"bpsx_up", "bpsx_tensors"}


def test_names_follow_the_conventions():
    for metric in METRICS:
        assert re.fullmatch(r"bpsx_[a-z_]+", metric.name)
        assert (metric.family().type == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".") and "\n" not in metric.help and "\\" not in metric.help
        assert callable(metric.source) or (
            metric.source.endswith("_ns") == ("_seconds" in metric.name)
        )
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_survived_losses_of_servers_are_counted():
    members, o = observed(elastic(2, 3))
    scheduler = of("scheduler", 0)
    for count, server in enumerate((b"s0", b"s2", b"s1")):
        found = scraped(o)
        assert found["bpsx_term"] == ("gauge", {scheduler: count})
        assert found["bpsx_servers_lost_total"] == ("counter", {scheduler: count})
        assert (o.view(0.0)["term"], o.view(0.0)["servers_lost"]) == (count, count)
        members.gone(server, "test")
    assert o.view(0.0)["servers_lost"] == 2 and members.state == "failed"


def test_workers_that_were_lost_have_left_and_have_joined_are_counted():
    m, _, _ = parting()
    for ident in (b"w0", b"w2"):
        m.moved(ident, {"term": 2, "partitions": 0, "again": 50}, 3.0)
    m.tend(3.0)
    m.gone(b"w2", "cut", 4.0)
    m.moved(b"w0", {"term": 4, "partitions": 0, "again": 7}, 6.5)
    o = Observers(m, "h")

    def figures(*names):
        found = scraped(o)
        return [found[f"bpsx_{name}"][1][of("scheduler", 0)] for name in names]

    totals = ("workers_lost_total", "workers_left_total", "workers_joined_total")
    assert figures("workers", "workers_at_start", *totals) == [1, 3, 1, 1, 0]
    assert figures("term", "last_recovery_seconds", "pushed_again_bytes_total") == [4, 2.5, 107]
    # Another comes.
    given = hello("worker", 2, 3, 1, pid=555, config=m.nodes[b"w0"].config)
    m.settle(100.0), m.hello(b"n1", given), m.tend(100.0)
    m.said_at(b"w0", {"meeting": 2, "boundary": 9}), m.tend(100.0)
    m.here(b"w0", {"meeting": 2, "names": "x"}), m.tend(100.0)
    m.ready(b"n1", {"meeting": 2}), m.tend(100.0), m.cleared(b"s0", {"generation": 0})
    assert figures("workers", *totals) == [2, 1, 1, 1]


def test_servers_that_have_left_and_have_joined_are_counted():
    members, o = observed(elastic(2, 2))
    members.depart(b"s0", {"why": "SIGTERM", "needs": ""}, 1.0)
    members.hello(b"l0", late_server(0, servers=2))
    scheduler = of("scheduler", 0)

    def figures():
        found = scraped(o)
        names = ("lost", "left", "joined")
        return [found[f"bpsx_servers_{name}_total"][1][scheduler] for name in names]

    assert figures() == [0, 1, 0]
    for ident in (b"w0", b"w1"):
        members.connected(ident, {"server": 2, "failure": ""}, 2.0)
    assert figures() == [0, 1, 1]


def test_the_page_explains_every_metric():
    page = (ROOT / "docs" / "run" / "metrics.md").read_text()
    assert set(re.findall(r"`(bpsx_[a-z_]+)`", page)) == {m.name for m in METRICS}


def test_a_dead_process_is_down_in_the_metrics():
    members, o = observed()
    members.gone(b"w1", "test")
    up = {
        (dict(labels)["role"], dict(labels)["rank"]): value
        for labels, value in scraped(o)["bpsx_up"][1].items()
    }
    assert up == {("scheduler", "0"): 1, ("worker", "0"): 0, ("worker", "1"): 0, ("server", "0"): 0}


def test_stalls_are_counted():
    members, o = observed()
    members.waiting(b"w0", waiting(["x", 0, 3, 12.0], ["y", 0, 1, 11.0], ["z", 0, 1, 2.0]), 0.0)
    found, w0 = scraped(o), of("worker", 0)
    assert (
        found["bpsx_stalled_push_pulls"][1][w0] == 2
        and found["bpsx_oldest_stall_seconds"][1][w0] == 12.0
    )
    assert o.view(0.0)["nodes"][0]["waits"] == [("x", 3, 12.0), ("y", 1, 11.0)]


# ---- observers


def test_an_observer_is_no_member_and_nodes_report_while_it_asks():
    members, o = observed()
    before = dict(members.nodes)
    out = o.handle(b"o", OBSERVE, 100.0)
    assert [(i, m["type"]) for i, m in out] == [
        (b"s0", "WATCH"),
        (b"w0", "WATCH"),
        (b"w1", "WATCH"),
        (b"o", "VIEW"),
    ]
    assert out[0][1]["seconds"] == LEASE > RENEW
    assert [m["type"] for _, m in o.handle(b"o", OBSERVE, 101.0)] == ["VIEW"]
    assert "WATCH" in [m["type"] for _, m in o.handle(b"o2", OBSERVE, 100.0 + RENEW)]
    assert members.nodes == before and members.state == "running"
    assert members.gone(b"o", "died") == []


def test_an_observer_may_ask_while_the_job_gathers():
    from unit.scheduler_tools import hello, members

    m = members()
    m.hello(b"w0", hello("worker", 0))
    ((who, view),) = Observers(m, "h").handle(b"o", OBSERVE, 0.0)
    assert (
        who == b"o" and view["state"] == "waiting" and view["missing"] == ["worker 1", "the server"]
    )


def test_another_version_is_refused():
    _, o = observed()
    ((_, answer),) = o.handle(b"o", {**OBSERVE, "protocol": 99}, 0.0)
    assert answer["type"] == "REFUSED" and "version 99" in answer["reason"]


def test_a_recording_is_requested_from_all_and_its_files_are_reported():
    _, o = observed()
    out = o.handle(b"o", {**OBSERVE, "trace": 5}, 0.0)
    assert {i for i, m in out if m == {"type": "TRACE", "seconds": 5}} == {b"s0", b"w0", b"w1"}
    o.handle(b"w1", {"type": "TRACED", "path": "/x", "records": 4}, 0.0)
    o.handle(b"stranger", {"type": "TRACED", "path": "/y", "records": 4}, 0.0)
    assert o.view(0.0)["traced"] == [
        {"number": 0, "role": "worker", "rank": 1, "host": "h", "path": "/x", "records": 4}
    ]


def test_reports_of_strangers_are_ignored():
    _, o = observed()
    assert o.handle(b"o", stats(push_pulls=1), 0.0) == []
    assert all(n["values"] == {} for n in o.view(0.0)["nodes"])


def test_any_process_can_ask_for_the_clock():
    _, o = observed()
    ((who, answer),) = o.handle(b"w0", {"type": "CLOCK", "at": 5}, 0.0)
    assert who == b"w0" and answer["at"] == 5 and answer["wall"] > 1.7e18


@pytest.mark.parametrize(
    "message",
    [
        stats(**{"x": "1"}),
        stats(**{"x": True}),
        stats(**{"x": 1.5}),
        stats(**{"x" * 64: 1}),
        stats(x=2**64),
        stats(late=[(1,)]),
        stats(late=[(1, -1)]),
        stats(late=[("a", 1)]),
        {**stats(), "at": -1},
        {**stats(), "values": []},
        {**stats(), "late": {}},
        {**OBSERVE, "trace": 3601},
        {**OBSERVE, "trace": -2},
        {**OBSERVE, "trace": True},
        {"type": "OBSERVE"},
        {"type": "CLOCK", "at": None},
        {"type": "TRACED", "path": 3, "records": 0},
    ],
)
def test_malformed_messages_are_refused(message):
    with pytest.raises(messages.BadMessage):
        messages.check(message)
