"""Tests of shared memory only: bodies that are not moved, tokens, and neighbours that write
nonsense, leave, or belong to another user.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bpsx.transports.shm.endpoint import SharedEndpoint
from bpsx.transports.sockets import listener
from bpsx.transports.tcp.endpoint import TcpEndpoint
from support.dataplane import DataPlane, Message

_ENTRY = struct.Struct("<QQQQII")
_POSTED, _ENTRIES = 0, 128  # offsets in a Way of transports/shm/connection.pxd
_TOKENS = 4096
SECRET = b"sixteen bytes, or more"


def endpoint(**more: Any) -> SharedEndpoint:
    inner = TcpEndpoint(
        send_buffer=0, heartbeat_interval=5, heartbeat_timeout=30, secret=more.get("secret", b"")
    )
    return SharedEndpoint(inner, **more)


class Neighbours:
    """A lane and its workers."""

    def __init__(self, *ranks: int, **more: Any) -> None:
        self.lane = endpoint(**more)
        self.lane.join(77, 0)
        self.address = self.lane.bind("127.0.0.1")
        self.s = DataPlane(self.lane)
        self.workers = {rank: endpoint(secret=more.get("secret", b"")) for rank in ranks}
        self.w = {}
        for rank, worker in self.workers.items():
            worker.join(77, rank)
            worker.connect(0, self.address)
            self.w[rank] = DataPlane(worker)
            for word in (b"hello", b"again"):  # the second one goes through memory
                self.w[rank].send(0, word)
                assert self.s.receive() == (rank, word, None)

    def held(self) -> Message:
        """Return the lane's next message without releasing it."""
        m = Message()
        while self.s.table.recv(self.s.table.self, C.byref(m)) != 1:
            self.s.wait(100)
        return m

    def answer(self, rank: int, m: Message, done: Any, token: int) -> None:
        """Reply with the body of ``m``, as with a sum that was computed in place."""
        head = C.create_string_buffer(b"sum", 3)
        assert (
            self.s.table.send(
                self.s.table.self,
                rank,
                C.addressof(head),
                3,
                None,
                None,
                m.body,
                m.body_size,
                done,
                token,
                None,
            )
            == 0
        )

    def memory(self) -> mmap.mmap:
        """Return another mapping of the segment."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the folder's own
                if (
                    "memfd:bpsx-lane" in os.readlink(f"/proc/self/fd/{name}")
                    and os.fstat(int(name)).st_ino not in _seen
                ):
                    return mmap.mmap(int(name), 1 << 20)
        raise AssertionError("there is no segment")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.lane.close()


#: Segments of endpoints that earlier tests left open.
_seen: set[int] = set()


@pytest.fixture
def make() -> Iterator[Any]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            _seen.add(os.fstat(int(name)).st_ino)
    made: list[Neighbours] = []

    def one(*ranks: int, **more: Any) -> Neighbours:
        made.append(Neighbours(*ranks, **more))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_messages_go_through_memory(make: Any) -> None:
    there = make(3, 5)
    assert there.lane.neighbours == 2 and all(w.neighbours == 1 for w in there.workers.values())


def test_a_reply_in_the_memory_of_the_push_is_not_copied(make: Any) -> None:
    """Two workers read the same bytes, also bytes that are written after the reply was sent. The
    lane gets its memory back when both have released it.
    """
    there = make(3, 5)
    done: list[int] = []
    call = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p)(lambda data, hint: done.append(hint))
    there.w[3].send(0, b"push", bytes(100_000))
    m = there.held()
    for rank in (3, 5):
        there.answer(rank, m, C.cast(call, C.c_void_p), rank)
    C.memset(m.body, 7, m.body_size)
    for rank in (3, 5):
        assert there.w[rank].receive() == (0, b"sum", bytes([7]) * 100_000)
        there.s.wait(0)
        assert done == [3, 5][: 1 + (rank == 5)]
    there.s.table.release(there.s.table.self, C.byref(m))


def test_memory_that_was_given_back_is_used_again(make: Any) -> None:
    there = make(3)
    places = set()
    for _ in range(20):
        there.w[3].send(0, b"h", bytes(50_000))
        m = there.held()
        places.add(m.body)
        there.s.table.release(there.s.table.self, C.byref(m))
    assert len(places) == 1


def test_a_leaving_worker_returns_its_blocks(make: Any) -> None:
    there = make(3)
    done: list[int] = []
    call = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p)(lambda data, hint: done.append(hint))
    there.w[3].send(0, b"push", bytes(100_000))
    m = there.held()
    there.answer(3, m, C.cast(call, C.c_void_p), 9)
    there.s.wait(0)
    assert done == []
    there.workers[3].close()
    there.s.wait(0)
    assert done == [9]
    there.s.table.release(there.s.table.self, C.byref(m))


def test_a_lane_may_hold_more_than_there_are_tokens(make: Any) -> None:
    """Workers that push in different orders fill the lane's memory with incomplete sums, and must
    still make progress.
    """
    there = make(3)
    held = []
    for i in range(_TOKENS + 500):
        assert there.w[3].send(0, i.to_bytes(4, "little"), i.to_bytes(4, "little") * 20) == 0
        held.append(there.held())
    for i, m in enumerate(held):
        assert (
            C.string_at(m.head, 4) == i.to_bytes(4, "little")
            and C.string_at(m.body, 80) == i.to_bytes(4, "little") * 20
        )
        there.s.table.release(there.s.table.self, C.byref(m))
    there.w[3].send(0, b"on", b"and on")
    assert there.s.receive() == (3, b"on", b"and on")


def test_messages_without_a_free_token_go_through_the_network(make: Any) -> None:
    there = make(3)
    for i in range(_TOKENS + 100):
        assert there.w[3].send(0, i.to_bytes(4, "little")) == 0
    got = set()
    while len(got) < _TOKENS + 100:
        there.w[3].wait(0)
        found = there.s.receive()
        got.add(found[1])
    assert got == {i.to_bytes(4, "little") for i in range(_TOKENS + 100)}


def test_too_large_messages_go_through_the_network(make: Any) -> None:
    there = make(3)
    there.w[3].other, there.s.other = there.s, there.w[3]
    body = bytes((1 << 28) + 1)
    assert there.w[3].send(0, b"large", body) == 0
    peer, head, found = there.s.receive()
    assert (peer, head, len(found)) == (3, b"large", len(body))


def test_nonsense_in_the_segment_is_counted_and_dropped(make: Any) -> None:
    there = make(3, most_bytes=1000)
    there.s.wait(0)
    memory = there.memory()
    (posted,) = struct.unpack_from("<q", memory, _POSTED)
    far = 1 << 62
    for entry in (
        (far, 64, 0, 0, 0, 1),
        (0, far, 0, 0, 0, 1),
        (0, 64, far, 8, 1, 1),
        (0, 64, 0, far, 1, 1),
        (0, 64, 0, 1001, 1, 1),
        (0, 64, 0, 5, 0, 1),
        (0, 64, 0, 0, 2, 1),
        (2**64 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1, 1, 1),
    ):
        _ENTRY.pack_into(memory, _ENTRIES + posted % _TOKENS * _ENTRY.size, *entry)
        posted += 1
        struct.pack_into("<q", memory, _POSTED, posted)
    assert there.s.receive(0.1) is None
    assert there.lane.malformed == 8
    there.w[3].send(0, b"still here")
    assert there.s.receive() == (3, b"still here", None)


def _tries(name: str, greet: Callable[[socket.socket], None]) -> int:
    """Return how many bytes (0 or 1) a peer gets after the nonce, which every peer gets."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(name)
        link.settimeout(60)
        try:
            greet(link)
            return len(link.recv(1))
        except ConnectionResetError:
            return 0


def test_strangers_get_no_memory(make: Any) -> None:
    """Strangers: with another secret, without a greeting, or of another user."""
    there = make(3, secret=SECRET)
    name = f"\0bpsx-lane {there.address}"
    other = endpoint(secret=b"another secret of 16 bytes")
    other.join(77, 4)
    other.connect(0, there.address)
    assert other.neighbours == 0
    assert (
        _tries(name, lambda link: link.sendall(link.recv(32)[:0] + b"GET / HTTP/1.1\r\n\r\n" * 10))
        == 0
    )
    if os.getuid() == 0:
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            os._exit(_tries(name, lambda link: listener.greet(link, SECRET, 77, there.address, 6)))
        assert os.waitpid(pid, 0)[1] == 0
    assert there.lane.neighbours == 1
    there.w[3].send(0, b"still here")
    assert there.s.receive() == (3, b"still here", None)
    other.close()


def test_without_a_free_slot_a_worker_uses_the_network(make: Any) -> None:
    there = make(3, 5, slots=1)
    assert there.lane.neighbours == 1 and there.workers[5].neighbours == 0


def test_a_forked_child_closes_only_its_own_copies(make: Any) -> None:
    there = make(3)
    pid = os.fork()
    if pid == 0:
        there.workers[3].close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    there.s.wait(0)
    there.w[3].send(0, b"still here", b"x" * 100)
    assert there.s.receive() == (3, b"still here", b"x" * 100) and there.lane.neighbours == 1
