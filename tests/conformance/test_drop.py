"""Tests of ``drop``, which every transport that has it must pass."""

from __future__ import annotations

import contextlib
import ctypes as C
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from conformance.test_lent_memory import pinned
from conformance.test_transports import (
    other_endpoint,
    rdma_endpoint,
    shared_endpoint,
    tcp_endpoint,
    threaded_endpoint,
    zeromq_endpoint,
)
from support.dataplane import DataPlane, Message
from support.jobs import Process
from support.places import ROOT

Make = Callable[..., Any]


class Kind(NamedTuple):
    """How to make a worker's endpoint, and a lane's if that is another one."""

    worker: Make
    host: str = "127.0.0.1"
    other: Make | None = None

    @property
    def lane(self) -> Make:
        return self.other or self.worker


def _shared_tcp() -> Any:
    return shared_endpoint(tcp_endpoint)


KINDS = {
    "loopback": Kind(LoopbackEndpoint),
    "zeromq": Kind(zeromq_endpoint),
    "zeromq-ipv6": Kind(zeromq_endpoint, "::1"),
    "zeromq-encrypted": Kind(
        lambda: zeromq_endpoint(secret=b"sixteen bytes, or more", encrypt=True)
    ),
    "tcp": Kind(tcp_endpoint),
    "tcp-ipv6": Kind(tcp_endpoint, "::1"),
    "shared-zeromq": Kind(shared_endpoint),
    "shared-tcp": Kind(_shared_tcp),
    "rdma": Kind(rdma_endpoint),
    "shared-rdma": Kind(lambda: shared_endpoint(rdma_endpoint)),
    "threaded-tcp": Kind(threaded_endpoint, other=tcp_endpoint),
    "threaded-shared-tcp": Kind(lambda: threaded_endpoint(_shared_tcp), other=_shared_tcp),
}
#: Transports whose lane may be in another process.
APART = [kind for kind in KINDS if "loopback" not in kind and "-ipv6" not in kind]
APART.remove("zeromq-encrypted")
if "CONFORMANCE_OF" in os.environ:
    KINDS, APART = {"other": Kind(other_endpoint)}, []
#: A lane that answers its first message with a body of 100,000 bytes and then reads no more.
_LANE = """
import sys
sys.path.insert(0, {tests!r})
from conformance.test_drop import KINDS
from support.dataplane import DataPlane
kind = KINDS[{kind!r}]
lane = kind.lane()
lane.join(77, 0)
print("at", lane.bind(kind.host), flush=True)
s = DataPlane(lane)
assert s.receive() == (5, b"hello", None)
s.send(5, b"answer", b"a" * 100_000)
s.wait(0)
sys.stdin.read()
"""


class Job:
    """A worker's endpoint and its lanes; the lanes' data planes are called by the test."""

    def __init__(self, kind: str) -> None:
        self.how = KINDS[kind]
        self.kind, self.worker, self.lanes = kind, self.how.worker(), {}
        self.planes: dict[int, DataPlane] = {}
        self.worker.join(77, 5)
        self.w = DataPlane(self.worker)
        self.descriptor = self.worker.watch()
        self.child: Process | None = None

    def connect(self, peer: int) -> DataPlane:
        """Connect the worker to a new lane of this process, and send it two messages.

        The second one may go through shared memory, which the lane then uses, too.
        """
        lane = self.how.lane()
        lane.join(77, peer)
        self.worker.connect(peer, lane.bind(self.how.host))
        self.lanes[peer], self.planes[peer] = lane, DataPlane(lane)
        for word in (b"hello", b"again"):
            assert self.w.send(peer, word) == 0
            assert self.planes[peer].receive() == (5, word, None)
        return self.planes[peer]

    def connect_apart(self, peer: int) -> Message:
        """Connect the worker to a lane in another process; return that lane's answer."""
        source = _LANE.format(tests=str(ROOT / "tests"), kind=self.kind)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.child = Process("lane", [sys.executable, "-c", source], environment)
        self.worker.connect(peer, self.child.wait_for_line("at ").removeprefix("at "))
        assert self.w.send(peer, b"hello") == 0
        answer = self.w.take()
        assert answer is not None
        return answer

    def assert_done(self, *tokens: int) -> None:
        """Assert that exactly these done callbacks run, each once; token 0 does not count."""
        for _ in range(6000):
            if len(self.w.done) - self.w.done.count(0) >= len(tokens):
                break
            self.w.wait(10)
        self.w.wait(0)
        assert sorted(token for token in self.w.done if token) == sorted(tokens)

    def receive_from(self, peer: int) -> tuple[int, bytes, bytes | None]:
        """Return the next message of ``peer``. Those of dropped peers may still come."""
        while True:
            found = self.w.receive()
            assert found is not None
            if found[0] not in self.w.dropped:
                assert found[0] == peer
                return found

    def assert_in_order(self, peer: int, n: int) -> None:
        """Assert that messages to and from ``peer`` arrive, all and in order."""
        for i in range(n):
            assert self.w.send(peer, i.to_bytes(4, "little"), bytes(i), token=0) == 0
        for i in range(n):
            assert self.planes[peer].receive() == (5, i.to_bytes(4, "little"), bytes(i))
            self.planes[peer].send(5, i.to_bytes(4, "little"), bytes(i))
        for i in range(n):
            assert self.receive_from(peer) == (peer, i.to_bytes(4, "little"), bytes(i))

    def close(self) -> None:
        if self.child is not None:
            self.child.end()
        self.worker.close()
        for lane in self.lanes.values():
            lane.close()


@pytest.fixture(params=list(KINDS))
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    one = Job(request.param)
    yield one
    one.close()


@pytest.fixture(params=APART)
def apart(request: pytest.FixtureRequest) -> Iterator[Job]:
    one = Job(request.param)
    yield one
    one.close()


def contents(m: Message) -> tuple[int, bytes, bytes]:
    return m.peer, C.string_at(m.head, m.head_size), C.string_at(m.body, m.body_size)


def test_a_drop_returns_the_memory_of_unsent_messages(job: Job) -> None:
    job.connect(0)
    job.connect(1)
    for token in range(1, 21):
        assert job.w.send(0, b"h", bytes(1_000_000), token, own_head=True) == 0
    job.w.drop(0)
    sent = [*range(1, 21), *range(1001, 1021)]
    job.assert_done(*sent)
    assert job.w.send(0, b"h", b"body", 30, own_head=True) == -1
    job.assert_done(*sent, 30, 1030)
    job.w.drop(0)
    assert job.w.send(0, b"h", b"body", 31) == -1
    job.assert_done(*sent, 30, 1030, 31)


def test_other_peers_do_not_notice_a_drop(job: Job) -> None:
    job.connect(0)
    s = job.connect(1)
    for i in range(200):
        assert job.w.send(0, b"h", bytes(10_000), 1) == 0
        assert job.w.send(1, i.to_bytes(4, "little"), bytes(1000 + i)) == 0
        if i == 100:
            job.w.drop(0)
            break
    for i in range(101):
        assert s.receive() == (5, i.to_bytes(4, "little"), bytes(1000 + i))
        job.w.wait(0)
    job.assert_in_order(1, 100)


def test_messages_that_wait_in_the_endpoint_survive_the_drop_of_another_peer(job: Job) -> None:
    """Each drop happens after a wait, which may have read the beginning of a message ahead."""
    planes = [job.connect(peer) for peer in range(4)]
    for s in planes:
        for i in range(3):
            s.send(5, bytes([i]), bytes([i]) * 5000)
            s.send(5, bytes([10 + i]), bytes([i]))  # small enough to be in the frame itself
    for s in planes:
        s.wait(0)
    for peer in range(3):
        job.w.wait(1000)
        job.w.drop(peer)
    assert [job.receive_from(3)[1:] for _ in range(6)] == [
        one
        for i in range(3)
        for one in ((bytes([i]), bytes([i]) * 5000), (bytes([10 + i]), bytes([i])))
    ]
    job.assert_in_order(3, 10)


def test_a_dropped_peer_is_not_reported_as_lost(job: Job) -> None:
    for peer in range(3):
        job.connect(peer)
    job.w.drop(0)
    job.lanes[0].close()
    job.lanes[1].close()
    lost: list[int] = []
    while not lost:
        job.w.wait(20)
        job.w.receive(0.1)
        lost = job.worker.lost()
    assert lost == [1]
    job.lanes[2].close()
    while not _readable(job.descriptor):
        job.w.receive(0.1)
    job.w.drop(2)  # after the loss was noticed, before it was reported
    assert job.worker.lost() == []


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_a_message_received_before_the_drop_stays_readable(job: Job) -> None:
    s = job.connect(0)
    s.send(5, b"head", b"b" * 100_000)
    m = job.w.take()
    assert m is not None
    job.w.drop(0)
    job.lanes[0].close()
    assert contents(m) == (0, b"head", b"b" * 100_000)
    C.memset(m.body, 7, m.body_size)
    assert contents(m)[2] == bytes([7]) * 100_000
    job.w.release(m)


def test_close_after_a_drop_runs_each_callback_once(job: Job) -> None:
    job.connect(0)
    job.connect(1)
    for token in range(1, 11):
        for peer in (0, 1):
            job.w.send(peer, b"h", bytes(500_000), token + 100 * peer)
    job.w.drop(0)
    job.worker.close()
    assert sorted(job.w.done) == [*range(1, 11), *range(101, 111)]


def test_a_drop_of_an_unknown_peer_does_nothing(job: Job) -> None:
    job.connect(0)
    for peer in (1, 200, 2**32 - 1):
        job.w.drop(peer)
    job.assert_in_order(0, 5)


def test_a_peer_that_was_never_reached_can_be_dropped(apart: Job) -> None:
    job = apart
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    job.worker.connect(0, f"127.0.0.1:{port}")
    job.connect(1)
    for token in range(1, 6):
        assert job.w.send(0, b"h", bytes(1000), token, own_head=True) in (0, -1)
    job.w.drop(0)
    job.assert_done(*range(1, 6), *range(1001, 1006))
    assert job.worker.lost() == [] and job.w.send(0, b"h", b"body", 6) == -1
    job.assert_in_order(1, 5)


def _watched() -> list[int]:
    """Return how many descriptors each epoll of this process watches."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            if "eventpoll" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(Path(f"/proc/self/fdinfo/{name}").read_text().count("tfd:"))
    return sorted(found)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Keep a forked child, which has all connections of this process, during the block."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(far)
        os.read(near, 1)
        os._exit(0)
    os.close(near)
    try:
        yield
    finally:
        os.close(far)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif("tcp" not in KINDS, reason="a test of TCP")
def test_over_tcp_a_drop_ends_a_connection_that_a_forked_child_has() -> None:
    job = Job("tcp")
    s = job.connect(0)
    with forked():
        job.w.drop(0)
        while job.lanes[0].lost() != [5]:
            s.receive(0.1)
    job.close()


@pytest.mark.skipif("tcp" not in KINDS, reason="a test of TCP")
@pytest.mark.parametrize("drops", [True, False], ids=["drop", "loss"])
def test_over_tcp_a_connection_that_has_ended_is_not_watched(drops: bool) -> None:
    """Also if a forked child has it: its events would keep the driver awake for ever, and name a
    connection whose memory has been freed.
    """
    job = Job("tcp")
    before = _watched()
    job.w.release(job.connect_apart(0))
    assert _watched() != before and job.child is not None
    with forked():
        if drops:
            job.w.drop(0)
        else:
            job.child.signal(signal.SIGKILL)
            while job.worker.lost() != [0]:
                job.w.receive(0.1)
        assert _watched() == before
    job.close()


def test_a_drop_of_a_killed_peer_returns_the_memory(apart: Job) -> None:
    """Neither sends to the dead peer nor waits block, and its answer stays readable."""
    job = apart
    answer = job.connect_apart(0)
    job.connect(1)
    assert job.child is not None
    for token in range(1, 11):
        assert job.w.send(0, b"h", bytes(1_000_000), token, own_head=True) == 0
    job.child.signal(signal.SIGKILL)
    job.child.wait()
    for token in range(11, 31):
        assert job.w.send(0, b"h", bytes(1_000_000), token, own_head=True) in (0, -1)
        job.w.wait(1)
    while not _readable(job.descriptor):
        job.w.receive(0.1)
    job.assert_in_order(1, 20)
    job.w.drop(0)
    job.assert_done(*range(1, 31), *range(1001, 1031))
    assert job.worker.lost() == []
    assert job.w.send(0, b"h", b"body", 31) == -1
    assert contents(answer) == (0, b"answer", b"a" * 100_000)
    job.w.release(answer)
    job.assert_in_order(1, 20)


def test_a_drop_of_a_stopped_peer_returns_the_memory(apart: Job) -> None:
    job = apart
    answer = job.connect_apart(0)
    job.connect(1)
    assert job.child is not None
    job.child.signal(signal.SIGSTOP)
    for token in range(1, 41):
        assert job.w.send(0, b"h", bytes(1_000_000), token, own_head=True) == 0
    job.w.wait(0)
    assert len(job.w.done) < 80  # the peer does not read, and no buffer holds 40 MB
    job.w.drop(0)
    job.assert_done(*range(1, 41), *range(1001, 1041))
    job.child.signal(signal.SIGCONT)
    assert contents(answer) == (0, b"answer", b"a" * 100_000)
    job.w.release(answer)
    job.assert_in_order(1, 20)
    assert job.worker.lost() == []


def _held() -> tuple[int, int, int, int]:
    """Return this process's descriptors, its mappings of segments, its bytes of malloc, and the
    KiB that are registered with an adapter.
    """

    class Info(C.Structure):
        _fields_ = [
            (name, C.c_size_t)
            for name in ["arena", "ord", "smb", "hblks", "hblkhd", "us", "fsm", "uord", "f", "k"]
        ]

    of = C.CDLL(None).mallinfo2
    of.restype = Info
    info = of()
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:bpsx-lane" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), segments, info.uord + info.hblkhd, pinned()


def test_dropped_peers_leave_nothing_behind(job: Job) -> None:
    """Peer numbers are never used again, so what stays of one would grow without bound."""

    def cycle(peer: int) -> None:
        s = job.connect(peer)
        assert job.w.send(peer, b"h", bytes(100_000)) == 0
        s.send(5, b"answer", bytes(100_000))
        m = job.w.take()
        assert m is not None
        job.w.drop(peer)
        job.w.release(m)
        job.lanes.pop(peer).close()
        del job.planes[peer]
        job.w.wait(0)
        job.w.forget()
        s.forget()

    segments = _held()[1]
    for peer in range(10):
        cycle(peer)
    before = _held()
    for peer in range(10, 30):
        cycle(peer)
    most = before[2] + 20 * 16384
    after = _held()
    for _ in range(600):  # a thread of ZeroMQ, or an I/O thread, ends the last connection
        if after[0] <= before[0] and after[1] == segments and after[2] < most:
            break
        job.w.wait(100)
        after = _held()
    assert after[0] <= before[0] and after[1] == segments
    assert after[2] < most and after[3] <= before[3]
