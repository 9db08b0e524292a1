"""Tests of RDMA only: it pushes from lent memory, and receives replies into it."""

from __future__ import annotations

import ctypes as C
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.test_transports import made_by, network_pair, rdma_endpoint
from support.dataplane import DataPlane, Landing


@pytest.fixture
def rdma() -> Iterator[Callable[..., object]]:
    yield from made_by(rdma_endpoint)


def rdma_planes(rdma):
    """A worker's endpoint and a lane's, and their data planes."""
    worker, lane = network_pair(rdma)
    w, s = DataPlane(worker), DataPlane(lane)
    w.other, s.other = s, w
    return worker, lane, w, s


def pinned() -> int:
    """Return the KiB of this process's memory that are registered with an adapter."""
    found = re.search(r"^VmPin:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_over_rdma_lent_memory_is_not_copied(rdma):
    """The push is sent from lent memory and the reply is written there; other memory is copied."""
    worker, lane, w, s = rdma_planes(rdma)
    memory, other = C.create_string_buffer(1 << 20), C.create_string_buffer(1 << 20)
    landing = w.lend(memory)
    for turn in range(30):  # more than the inbox and the send queue hold at once
        memory.raw = bytes([turn]) * len(memory)
        assert w.push(0, b"h" * 64, memory, landing) == 0
        m = s.take()
        assert (
            m is not None
            and C.string_at(m.body, m.body_size) == memory.raw
            and m.landing.at == landing.at
            and m.landing.remote
        )
        C.memset(m.body, 100 + turn, m.body_size)
        assert s.answer(5, b"H" * 64, m) == 0
        answer = w.take()
        assert (
            answer is not None
            and answer.body == landing.at
            and memory.raw == bytes([100 + turn]) * len(memory)
        )
        assert C.string_at(answer.head, answer.head_size) == b"H" * 64
        w.release(answer)
    assert worker.copied == lane.copied == 0
    assert w.push(0, b"h" * 64, other, Landing(C.addressof(other), len(other), 0, 0)) == 0
    m = s.take()
    assert m is not None and m.landing.at == 0 and worker.copied == len(other)
    s.release(m)


def test_over_rdma_a_write_outside_lent_memory_fails(rdma):
    worker, _, w, s = rdma_planes(rdma)
    landing = w.lend(C.create_string_buffer(1 << 20))
    w.send(0, b"h" * 64, bytes(1 << 20), landing=landing)
    m = s.take()
    assert m is not None and m.landing.at
    m.landing.at += 1 << 40
    s.send(5, b"H" * 64, bytes(1000), landing=m.landing)
    s.release(m)
    lost: list[int] = []
    while not lost:
        assert w.receive(0.1) is None
        lost = worker.lost()
    assert lost == [0]


def test_over_rdma_a_dropped_lane_writes_nothing_any_more(rdma):
    """Its answer was wanted in memory that the worker has used for something else since."""
    _, lane, w, s = rdma_planes(rdma)
    memory = C.create_string_buffer(1 << 20)
    assert w.push(0, b"h" * 64, memory, w.lend(memory)) == 0
    m = s.take()
    assert m is not None and m.landing.at
    w.drop(0)
    memory.raw = b"n" * len(memory)
    C.memset(m.body, 9, m.body_size)
    s.answer(5, b"H" * 64, m)
    while lane.lost() != [5]:
        assert s.receive(0.1) is None
    assert memory.raw == b"n" * len(memory) and w.receive(0.1) is None


def test_over_rdma_a_dropped_workers_push_is_still_sent_to_others(rdma):
    """From where it has arrived, without a copy; after that the memory is not pinned any more."""
    worker, lane, w, s = rdma_planes(rdma)
    other = rdma()
    other.join(77, 6)
    other.connect(0, lane.address)
    o = DataPlane(other)
    before = pinned()
    assert w.send(0, b"h" * 64, b"b" * (1 << 20)) == 0 and o.send(0, b"hello") == 0
    m = s.take()
    assert s.receive() == (6, b"hello", None) and m is not None and m.peer == 5
    s.drop(5)
    assert s.answer(6, b"H" * 64, m) == 0  # releases the push when it is done
    answer = o.take()
    assert answer is not None and C.string_at(answer.body, answer.body_size) == b"b" * (1 << 20)
    o.release(answer)
    while pinned() > before - (8 << 10):
        s.wait(10)
    assert lane.copied == 0 and worker.lost() in ([], [0])


def test_over_rdma_a_dropped_worker_is_not_heard_and_another_takes_its_place(rdma):
    worker, lane, w, s = rdma_planes(rdma)
    assert w.send(0, b"hello", b"b" * 10_000) == 0
    assert s.receive() == (5, b"hello", b"b" * 10_000)
    assert w.send(0, b"on its way", b"b" * 10_000) == 0
    s.drop(5)
    w.send(0, b"too late", b"b" * 10_000)
    assert s.receive(0.2) is None and lane.lost() == []
    while worker.lost() != [0]:
        w.receive(0.1)
    again = rdma()
    again.join(77, 5)
    again.connect(0, lane.address)  # the number that the lane has accepted before
    assert DataPlane(again).receive(0.2) is None and lane.refused == 1
    other = rdma()
    other.join(77, 5, visit=1)
    other.connect(0, lane.address)
    o = DataPlane(other)
    assert o.send(0, b"new", b"n" * 10_000) == 0
    assert s.receive() == (5, b"new", b"n" * 10_000)
    assert s.send(5, b"answer", b"a" * 10_000) == 0
    assert o.receive() == (0, b"answer", b"a" * 10_000)
    third = rdma()  # comes before the lane knows that the second has gone
    third.join(77, 5, visit=2)
    third.connect(0, lane.address)
    t = DataPlane(third)
    assert t.send(0, b"third", b"3" * 10_000) == 0
    assert s.receive() == (5, b"third", b"3" * 10_000)
    o.send(0, b"second", b"2" * 10_000)
    assert s.receive(0.2) is None
    assert s.send(5, b"answer", b"a" * 10_000) == 0
    assert t.receive() == (0, b"answer", b"a" * 10_000)
