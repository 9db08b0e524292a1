"""Lanes without which a job goes on: a worker's and a server's control thread hear TERM."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bpsx.config import Config
from bpsx.errors import RendezvousError
from bpsx.scheduler.waiting import VERDICT_SECONDS, patience
from bpsx.server.__main__ import Server
from bpsx.server.broken import Broken
from bpsx.session import entry
from bpsx.session.boundaries import Change
from bpsx.session.lanes import Lanes
from bpsx.session.session import Session
from bpsx.session.states import Life
from bpsx.telemetry.reporter import Reporter

TEXT = "server 1 (h, pid 8) is gone: its connection broke; its keys go to server 0"
MOVES = [[2, [[0, 10], [1, 20]]], [3, [[0, 15]]]]
#: TERM for the two lanes of the second of two servers.
TERM = {
    "type": "TERM",
    "term": 1,
    "moves": MOVES,
    "text": TEXT,
    "missed": False,
    "yields": [],
    "dropped": [],
    "living": 0,
    "entered": [],
    "met": False,
    "leaving": [],
}


class Endpoint:
    """The lanes, or the workers of a lane, whose connections a test has broken."""

    address = "h:0"

    def __init__(self) -> None:
        self.broken: list[int] = []
        self._watched = os.eventfd(0, os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._watched)

    def watch(self) -> int:
        return self._watched

    def lost(self) -> list[int]:
        found, self.broken = self.broken, []
        return found


class Core:
    """What the control thread asks of a worker's core."""

    def __init__(self) -> None:
        self.terms: list[Any] = []
        self.moved: list[tuple[int, int, int]] = []

    def begin_term(
        self,
        term: int,
        moves: list[tuple[int, list[tuple[int, int]]]],
        missed: bool,
        yields: list[tuple[int, int, list[tuple[int, int]]]],
        living: int,
    ) -> None:
        self.terms.append((term, moves, missed, yields, living))

    def take_moved(self) -> list[tuple[int, int, int]]:
        found, self.moved = self.moved, []
        return found


class Link:
    """What a session has sent to the scheduler; ``early``: what comes before it has begun."""

    def __init__(self, *early: dict[str, Any]) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self._early = list(early)

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))

    def news(self) -> dict[str, Any] | None:
        return self._early.pop(0) if self._early else None


class Near:
    """The other processes of this machine."""

    def __init__(self, has_lanes: bool) -> None:
        self.has_lanes = has_lanes


@pytest.fixture
def said() -> Iterator[list[tuple[int, str]]]:
    """Level and text of what sessions and servers log."""
    found: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda r: found.append((r.levelno, r.getMessage()))  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("bpsx.session.session", "bpsx.server")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield found
    for logger, level in zip(loggers, levels):
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which lanes and servers wait, in a list of one number that the test sets."""
    times = [0.0]
    monkeypatch.setattr("bpsx.system.awake.time.monotonic", lambda: times[0])
    return times


def two_servers(endpoint: Endpoint, wait: float = 0.0) -> Lanes:
    """Four lanes of two servers, with a verdict ``wait`` seconds after a connection has broken."""
    addresses = [(lane // 2, f"h:{lane}") for lane in range(4)]
    return Lanes(endpoint, addresses, ["server 0", "server 1"], wait)


# ---- the record of broken connections


def test_a_broken_connection_is_a_death_unless_it_is_explained() -> None:
    endpoint = Endpoint()
    lanes = two_servers(endpoint)
    lanes.take_broken()
    assert lanes.verdict() == ""
    endpoint.broken = [1]
    lanes.take_broken()
    assert lanes.verdict() == "server 0 at h:1 is gone: its connection broke"


@pytest.mark.parametrize("noticed", ["before", "after"])
@pytest.mark.parametrize("how", ["broken", "mute"])
def test_a_lane_that_the_job_has_lost_is_no_reason_to_end(noticed: str, how: str) -> None:
    endpoint = Endpoint()
    lanes = two_servers(endpoint)

    def notice() -> None:
        for lane in (3, 2):
            if how == "broken":
                endpoint.broken = [lane]
                lanes.take_broken()
            else:
                lanes.note_mute(lane)

    if noticed == "before":
        notice()
        assert lanes.verdict() != ""
    lanes.lose([2, 3], TEXT)
    if noticed == "after":
        notice()
    assert lanes.verdict() == ""
    assert [lanes.lost(lane) for lane in range(4)] == ["", "", TEXT, TEXT]


@pytest.mark.parametrize("first", [0, 3])
def test_another_broken_lane_still_is_one(first: int) -> None:
    """Whichever of the two connections broke first."""
    endpoint = Endpoint()
    lanes = two_servers(endpoint)
    endpoint.broken = [first, 3 - first]
    lanes.take_broken()
    lanes.lose([2, 3], TEXT)
    assert lanes.verdict() == "server 0 at h:0 is gone: its connection broke"


def test_a_lane_that_stays_broken_is_noted_once() -> None:
    lanes = two_servers(Endpoint(), wait=3600)
    lanes.note_mute(1)
    since = lanes.broken[1]
    lanes.note_mute(1)
    lanes.note_mute(-1)
    assert lanes.broken == {1: since}
    assert lanes.verdict() == ""


def test_a_server_is_suspected_once_if_others_can_be_reached(now: list[float]) -> None:
    endpoint = Endpoint()
    lanes = two_servers(endpoint, wait=10.0)
    endpoint.broken = [3]
    lanes.take_broken()
    while now[0] < VERDICT_SECONDS:
        assert lanes.take_suspects() == [], "the scheduler needs a moment"
        now[0] += 1.0
    assert lanes.take_suspects() == [(1, False)] and lanes.take_suspects() == []
    lanes.restart()
    assert lanes.take_suspects() == [(1, False)], "another scheduler has not heard of it"
    assert lanes.verdict() == "", "that scheduler needs a moment, too"
    for _ in range(4):
        now[0] += 1.0
        said = lanes.verdict()
    assert said != ""


@pytest.mark.parametrize("role", ["worker", "server"])
def test_time_in_which_this_process_was_stopped_does_not_count(role: str, now: list[float]) -> None:
    """The scheduler may have been silent, too, and this process could not notice it."""
    endpoint = Endpoint()
    lanes = two_servers(endpoint, wait=5.0)
    workers = Broken([endpoint], {0: "worker 0"}, 1, 5.0)  # type: ignore[list-item]
    verdict = lanes.verdict if role == "worker" else workers.verdict
    endpoint.broken = [0]
    lanes.take_broken() if role == "worker" else workers.look()
    now[0] = 3600.0
    assert verdict() == ""
    for _ in range(3):
        now[0] += 1.0
        assert verdict() == "", "a second of the pause counts"
    now[0] += 1.0
    assert "0 is gone: its connection" in verdict() or "0 at h:0 is gone" in verdict()


@pytest.mark.parametrize(("broken", "suspects"), [([0, 2], [(0, True), (1, True)]), ([-1], [])])
def test_a_worker_that_reaches_no_server_says_so(
    broken: list[int], suspects: list[tuple[int, bool]], now: list[float]
) -> None:
    endpoint = Endpoint()
    lanes = two_servers(endpoint, wait=VERDICT_SECONDS)
    endpoint.broken = broken
    lanes.take_broken()
    lanes.restart()
    now[0] = VERDICT_SECONDS
    assert lanes.take_suspects() == [] and lanes.verdict() == "", "two readings are needed"
    now[0] += VERDICT_SECONDS
    assert lanes.take_suspects() == suspects and lanes.verdict() != ""


def test_a_worker_that_reaches_another_server_again_blames_the_first(now: list[float]) -> None:
    """It was not sure before, as no other connection worked."""
    endpoint = Endpoint()
    lanes = two_servers(endpoint, wait=10.0)
    endpoint.broken = [0, 2]
    lanes.take_broken()
    now[0] += VERDICT_SECONDS
    assert lanes.take_suspects() == [(0, True), (1, True)]
    lanes.lose([2, 3], TEXT)
    lanes.add(4, "server 2", ["h:4"])
    assert lanes.take_suspects() == [], "this worker has not connected to it yet"
    lanes.have_come([4])
    assert lanes.take_suspects() == [(0, False)] and lanes.take_suspects() == []
    endpoint.broken = [4]
    lanes.take_broken()
    assert lanes.take_suspects() == [], "the scheduler has heard more than that"


def test_a_job_that_may_go_on_waits_for_silence_to_be_noticed() -> None:
    """The scheduler's own silence, which may begin just before it would notice the server's."""
    times = {"heartbeat_interval": 4.0, "heartbeat_timeout": 10.0}
    config = Config({}, role="worker", num_worker=2, **times)
    assert patience(config, False) == VERDICT_SECONDS
    assert patience(config, True) == VERDICT_SECONDS + 4.0 + 14.0
    config = Config({}, role="worker", num_worker=2, heartbeat_interval=0.0)
    assert patience(config, True) == VERDICT_SECONDS


# ---- a worker's session


@pytest.fixture
def session() -> Iterator[Callable[[bool], tuple[Session, Core, Link, Lanes]]]:
    """Make a session whose core, link and lanes are a test's."""
    opened: list[tuple[Session, Any, Any]] = []

    def make(has_lanes: bool) -> tuple[Session, Core, Link, Lanes]:
        ours, core, link = (
            Session(Config(role="worker", num_worker=1, num_server=0)),
            Core(),
            Link(),
        )
        opened.append((ours, ours._core, ours._near))
        lanes = two_servers(Endpoint())
        for name, value in (
            ("_core", core),
            ("_link", link),
            ("_lanes", lanes),
            ("_near", Near(has_lanes)),
        ):
            setattr(ours, name, value)
        return ours, core, link, lanes

    yield make
    for ours, core, near in opened:
        ours._core, ours._near, ours._link = core, near, None
        ours.close()


def test_a_term_goes_to_the_core_and_explains_broken_connections(
    session: Callable[[bool], tuple[Session, Core, Link, Lanes]], said: list[tuple[int, str]]
) -> None:
    ours, core, link, lanes = session(True)
    lanes.note_mute(2)
    ours._handle(TERM)
    assert core.terms == [(1, [(2, [(0, 10), (1, 20)]), (3, [(0, 15)])], False, [], 0)]
    assert lanes.verdict() == ""
    assert said == [(logging.WARNING, TEXT)]
    ours._tell_moved()
    assert link.sent == []
    core.moved = [(1, 5, 4096), (2, 0, 0)]
    ours._tell_moved()
    assert link.sent == [
        ("MOVED", {"term": 1, "partitions": 5, "again": 4096}),
        ("MOVED", {"term": 2, "partitions": 0, "again": 0}),
    ]
    assert ours.failure == ""


def test_a_process_without_lanes_only_logs_a_term(
    session: Callable[[bool], tuple[Session, Core, Link, Lanes]], said: list[tuple[int, str]]
) -> None:
    ours, core, link, _ = session(False)
    ours._handle(TERM)
    assert (core.terms, link.sent) == ([], [])
    assert said == [(logging.WARNING, TEXT)]


def test_another_scheduler_hears_again_of_the_wish_to_leave(
    session: Callable[[bool], tuple[Session, Core, Link, Lanes]],
) -> None:
    ours, core, link, _ = session(True)
    assert not ours.leave("SIGTERM"), "the job does not go on without workers"
    ours.shrinks, link.gone_ns = True, 0  # type: ignore[attr-defined]
    assert ours.leave("SIGTERM")
    asked = ("DEPART", {"why": "SIGTERM", "needs": ""})
    assert link.sent == [asked]
    ours._resume()
    assert asked in link.sent[1:] and ("SYNCED", {}) in link.sent
    ours._boundaries.fresh = True
    link.sent.clear()
    ours._resume()
    assert ("SYNCED", {}) not in link.sent


def at_boundaries(
    session: Callable[[bool], tuple[Session, Core, Link, Lanes]],
) -> tuple[Session, Link]:
    """A worker that may stop at its boundaries, with nothing under way."""
    ours, _, link, _ = session(True)
    ours.shrinks = True
    ours._settle = lambda: None  # type: ignore[method-assign]
    ours._names_for_newcomers = lambda: ""  # type: ignore[method-assign]
    return ours, link


def await_stops(link: Link, count: int) -> None:
    """Wait until the worker has stopped ``count`` times."""
    while len([kind for kind, _ in link.sent if kind == "HERE"]) < count:
        time.sleep(0.001)


def test_a_worker_that_leaves_stops_twice_and_is_let_go(
    session: Callable[[bool], tuple[Session, Core, Link, Lanes]],
) -> None:
    ours, link = at_boundaries(session)
    ours.leave("SIGTERM")
    passed: list[Any] = []
    ours._handle({"type": "GOODBYE"})  # nothing: it is at no boundary

    def scheduler(message: dict[str, Any], count: int) -> None:
        await_stops(link, count)
        assert ours._boundaries.awaits_goodbye and ours.state is Life.STOPPED
        ours._handle(message)

    ours._handle({"type": "SOON", "meeting": 3})
    ours._handle({"type": "MEET", "meeting": 3, "boundary": 1, "tells": False})
    for count, message in enumerate(
        ({**TERM, "moves": [], "met": True, "leaving": [0, 7]}, {"type": "GOODBYE"}), 1
    ):
        thread = threading.Thread(target=scheduler, args=(message, count))
        thread.start()
        passed.append(ours.pass_boundary())
        thread.join()
    assert passed == [Change(leaving=(0, 7)), Change(left=True)]
    assert [kind for kind, _ in link.sent] == ["DEPART", "AT", "HERE", "HERE"]
    assert ours.state is Life.DEPARTED and not ours.leave("again")
    ours._peer_lost("a server is gone")
    assert ours.failure == "", "it concerns the others"


def test_another_scheduler_may_ask_a_worker_anew_that_has_stopped(
    session: Callable[[bool], tuple[Session, Core, Link, Lanes]],
) -> None:
    """It goes on from where it is, and stops at the next boundary."""
    ours, link = at_boundaries(session)

    def scheduler() -> None:
        await_stops(link, 1)
        ours._handle({"type": "SOON", "meeting": 1})
        assert link.sent[-1] == ("AT", {"meeting": 1, "boundary": 1})
        ours._handle({"type": "MEET", "meeting": 1, "boundary": 2, "tells": False})
        await_stops(link, 2)
        ours._handle({**TERM, "moves": [], "met": True})

    ours._handle({"type": "SOON", "meeting": 3})
    ours._handle({"type": "MEET", "meeting": 3, "boundary": 1, "tells": False})
    thread = threading.Thread(target=scheduler)
    thread.start()
    assert [ours.pass_boundary() for _ in range(2)] == [Change(), Change()]
    thread.join()
    assert [kind for kind, _ in link.sent] == ["AT", "HERE", "AT", "HERE"]
    assert ours.state is Life.RUNNING


# ---- entering the job


class GreetingCore:
    """A core whose lanes reply as ``rounds`` says: the silent lanes after each look."""

    def __init__(self, *rounds: list[int]) -> None:
        self._rounds = list(rounds)

    def greet(self, seconds: float, addresses: list[str], secret: bytes) -> list[int]:
        return self._rounds.pop(0)


def greet(core: GreetingCore, link: Link, broken: list[int]) -> Lanes:
    endpoint = Endpoint()
    endpoint.broken = broken
    lanes = two_servers(endpoint, wait=3600)
    entry._greet(Config({}, role="worker", num_worker=2, worker_id=0), core, lanes, link)  # type: ignore[arg-type]
    return lanes


def test_a_worker_goes_on_if_a_lost_lane_had_replied() -> None:
    lanes = greet(GreetingCore([0, 1], [0], []), Link(TERM), [2, 3])
    assert lanes.broken == {}
    assert lanes.lost(2) == TEXT


def test_a_server_that_dies_before_it_has_replied_is_an_error() -> None:
    with pytest.raises(RendezvousError) as raised:
        greet(GreetingCore([0, 3], [0, 3]), Link(TERM), [2, 3])
    assert str(raised.value) == f"worker 0: server 1 at h:3 died before it had replied: {TEXT}"


# ---- a server


@pytest.mark.parametrize(("rank", "replaced"), [(0, False), (1, True)])
def test_a_replaced_server_ends(rank: int, replaced: bool, said: list[tuple[int, str]]) -> None:
    server = Server(Config(role="server"))
    server._numbers = range(2 * rank, 2 * rank + 2)
    server._reporter = Reporter(server._config, "server", rank, "h")
    server._handle(TERM)
    text = f"this server has been replaced: {TEXT}" if replaced else TEXT
    assert said == [(logging.ERROR if replaced else logging.INFO, text)]
    assert server._failure == (text if replaced else "")
    assert server._failed.is_set() is replaced
