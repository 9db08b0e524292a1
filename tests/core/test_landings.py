"""Landings: addresses for answers that a worker's core requests, and how a lane uses them.

A loopback transport records what is sent.
"""

from __future__ import annotations

import ctypes as C
from typing import Any

import numpy as np
import pytest

import core.cores as cores
from bpsx.compression.spec import compression, make
from bpsx.core._tensor import Tensor
from bpsx.planning.stages import stages_for
from core.test_lane import Rig
from core.test_lane_compressed import PACKED, register
from support import wire as w
from support.dataplane import Landing, Table

STATE = 32
_SIGNATURES = dict(Table._fields_)
_NAME = b"bpsx.Endpoint"


class Listened:
    """Data plane of an endpoint that records landings.

    It gives each received message with a body a landing, beginning with ``next_at``. It records
    the landing of each sent message with a body, and which memory was lent.
    """

    def __init__(self, endpoint: Any) -> None:
        get, new = C.pythonapi.PyCapsule_GetPointer, C.pythonapi.PyCapsule_New
        get.restype, get.argtypes = C.c_void_p, [C.py_object, C.c_char_p]
        new.restype, new.argtypes = C.py_object, [C.c_void_p, C.c_char_p, C.c_void_p]
        self._endpoint, self._of = endpoint, endpoint.abi()
        inner = Table.from_address(get(self._of, _NAME))
        self.next_at = 0x1000
        # (peer, kind of record, landing's address, landing's room)
        self.sent: list[tuple[int, int, int, int]] = []
        self.lent: list[tuple[int, int]] = []
        self.table = Table.from_buffer_copy(inner)

        def send(
            self_: int,
            peer: int,
            head: int,
            head_size: int,
            head_done: int,
            head_hint: int,
            body: int,
            size: int,
            *more: Any,
        ) -> int:
            landing = more[-1]
            if size:
                wanted = (landing[0].at, landing[0].room) if landing else (0, 0)
                self.sent.append(
                    (peer, w.unpack(C.string_at(head, head_size), b"")[-1].kind, *wanted)
                )
            return int(
                inner.send(self_, peer, head, head_size, head_done, head_hint, body, size, *more)
            )

        def receive(self_: int, m: Any) -> int:
            got = int(inner.recv(self_, m))
            if got and m[0].body_size:
                m[0].landing = Landing(self.next_at, 1 << 20, 5, 1)
                self.next_at += 0x1000
            return got

        self._kept = [
            _SIGNATURES["send"](send),
            _SIGNATURES["recv"](receive),
            _SIGNATURES["lend"](lambda self_, peer, at, n: self.lent.append((at, n))),
        ]
        self.table.send, self.table.recv, self.table.lend = self._kept
        self._capsule = new(C.addressof(self.table), _NAME, None)

    def abi(self) -> Any:
        return self._capsule


# ---- a lane


def answered(r: Rig, heard: Listened) -> list[tuple[int, int]]:
    """Wait for one answer per worker; return (rank, landing) of all sent answers with a body."""
    for rank in range(len(r.workers)):
        (answer,) = r.take(rank)
        assert answer.kind == w.ANSWER
    found = [(rank, at) for rank, kind, at, _ in heard.sent if kind == w.ANSWER]
    heard.sent.clear()
    return found


@pytest.fixture
def listened(rig):
    heard: list[Listened] = []

    def wrap(endpoint: Any) -> Listened:
        heard.append(Listened(endpoint))
        return heard[-1]

    made = rig(wrap=wrap)
    return made, heard[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reply_goes_to_the_landing_of_its_own_push(rig, asynchronous: bool) -> None:
    heard: list[Listened] = []
    r = rig(
        asynchronous=asynchronous,
        wrap=lambda endpoint: heard.append(Listened(endpoint)) or heard[0],
    )
    r.register(0, 40_000)
    for round_ in range(3):
        for rank in (0, 1):
            r.push(rank, 0, bytes(40_000), round_=round_, flags=w.ASYNC if asynchronous else 0)
        first = 0x1000 * (1 + 2 * round_)
        assert sorted(answered(r, heard[0])) == [(0, first), (1, first + 0x1000)]


def test_a_push_that_is_repeated_changes_nothing(listened) -> None:
    r, heard = listened
    r.register(0, 40_000)
    r.push(0, 0, bytes(40_000))
    r.push(0, 0, bytes(40_000))
    r.push(1, 0, bytes(40_000))
    assert sorted(answered(r, heard)) == [(0, 0x1000), (1, 0x3000)]


def test_a_reply_with_compression_state_has_no_landing(listened) -> None:
    """A reply with a lane's compression state has no landing.

    The memory of the earlier push may have been reused.
    """
    r, heard = listened
    n = 20_000
    register(r, 0, {"compressor": "topk", "k": 0.9, "ef": "vanilla"}, nbytes=4 * n)
    count = int(0.9 * n)
    wire = np.arange(count, dtype=np.uint32).tobytes() + np.ones(count, np.float32).tobytes()
    for rank in (0, 1):
        r.push(rank, 0, wire, flags=PACKED)
    assert sorted(answered(r, heard)) == [(0, 0x1000), (1, 0x2000)]
    r.send(0, w.Record(w.PUSH, w.INLINE | STATE, 3, 7, 100, 0, 0, cookie=1000))
    (kept,) = r.take(0)
    assert kept.kind == w.ANSWER and kept.length > 4 * n
    assert heard.sent == [(0, w.ANSWER, 0, 0)]


# ---- a worker's core


@pytest.fixture
def worker():
    heard: list[Listened] = []
    r = cores.Rig(wrap=lambda endpoint: heard.append(Listened(endpoint)) or heard[0])
    yield r, heard[0]
    r.close()


def test_a_users_tensor_is_not_lent(worker) -> None:
    r, heard = worker
    x = cores.array(cores.BIG)
    for given, taken in ((x, x.copy()), (x, x)):
        handle = cores.push_pull(r.core, r.tensor(f"t{taken is x}", cores.BIG), given, taken)
        (push,) = r.pushes(1)
        r.answer(push, bytes(cores.BIG))
        handle.wait()
    assert heard.lent == [] and heard.sent == [(0, w.PUSH, 0, 0)] * 2


@pytest.mark.parametrize("elastic", [False, True])
def test_compressed_output_is_lent_and_receives_replies(elastic: bool) -> None:
    """In a job that survives deaths it is only sent from: it may have to be pushed again."""
    heards: list[Listened] = []
    r = cores.Rig(
        wrap=lambda endpoint: heards.append(Listened(endpoint)) or heards[0], elastic=elastic
    )
    heard = heards[0]
    n, given = 40_000, compression({"compressor": "half"})
    r.core.open_pool(1)
    tensor = Tensor(
        "c",
        3,
        [(9, 0, 9, 0, 4 * n)],
        stages_for("cpu", True),
        codec=given.text(),
        made=[make(given, "float32", 4 * n, 0, 0)],
    )
    for round_ in range(2):
        x = np.full(n, 1 + round_, np.float32)
        handle = cores.push_pull(r.core, tensor, x, x)
        (push,) = r.pushes(1)
        ((at, room),) = set(heard.lent)
        assert heard.sent == [(0, w.PUSH, *((0, 0) if elastic else (at, room)))] * (1 + round_)
        assert room >= push.length == 2 * n
        r.endpoint.inject(
            0,
            w.pack(
                w.Record(w.ANSWER, 0, 3, 7, push.key, 0, 0, 0, push.round, 0, 0, push.cookie, 2 * n)
            ),
            np.full(n, 7, np.float16).tobytes(),
        )
        handle.wait()
        assert (x == 7).all()
    r.close()
