"""Tests of RDMA only: it pushes from lent memory, and receives replies into it."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterator

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
