"""Large answers that the pool's threads copy: what may come between an answer and its copy."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bpsx.errors import BpsxError
from core.cores import BIG, array, push_pull
from core.test_core_moves import Elastic
from core.test_matrices import Held, gradient
from support import wire as w

E_STALL = -4
TOTAL = array(BIG, 7).tobytes()


class Copying(Elastic):
    """A core whose pool has one thread, which the test can hold before it copies x's answer."""

    def __init__(self, **more: bool) -> None:
        super().__init__(BIG, start=False, **more)
        self.core.open_pool(1, copies_from=BIG)
        self.core.start()
        self.held = Held("project")
        self.holder = self.matrix("held", 40, 60, steps=self.held.steps)
        self.holders_keys = range(self.slot + 1, self._key + 1)
        self.out = array(BIG)

    def next(self, kind: int, lane: int) -> w.Record:
        """As in the base class, but not of the tensor that holds the thread."""
        record = super().next(kind, lane)
        while record.key in self.holders_keys:
            record = super().next(kind, lane)
        return record

    def begin_copy(self) -> Any:
        """Answer the second push of x while the thread is held; return the handle."""
        self.round(5)
        self.held.armed = True
        push_pull(self.core, self.holder, gradient(0), np.empty((40, 60), np.float32))
        assert self.held.entered.wait(60)
        handle = push_pull(self.core, self.x, array(BIG), self.out)
        push, before = self.next(w.PUSH, 0), self.core.counters()["messages_received"]
        self.reply(push, TOTAL, 0)
        self.wait_for("messages_received", before + 1)
        self.small_round()  # so the driver has handled the answer before
        self.unread[0].clear()
        assert not handle.done() and (self.out == 1).all()
        return handle

    def small_round(self) -> None:
        tensor, out = self.tensor("small", 16), array(16)
        handle = push_pull(self.core, tensor, array(16), out)
        self.reply(self.next(w.PUSH, 0), array(16, 3).tobytes(), 0)
        handle.wait(60)
        assert (out == 3).all()

    def end_copy(self, handle: Any) -> None:
        self.held.go.set()
        handle.wait(60)
        assert self.out.tobytes() == TOTAL

    def acks(self) -> list[tuple[int, ...]]:
        """Return what lane 0 gets acknowledged with the next push, which this makes."""
        push_pull(self.core, self.tensor("next", 16), array(16), array(16))
        self.next(w.PUSH, 0)
        return [
            item
            for record in self.unread[0]
            if record.kind == w.ACK
            for item in struct.iter_unpack("<II", record.body or b"")
        ]

    @property
    def kept(self) -> int:
        found: int = self.core.gauges()["kept"]
        return found


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Copying]:
    made = Copying(**getattr(request, "param", {}))
    yield made
    made.held.go.set()
    made.close()


@pytest.mark.parametrize("rig", [{"elastic": False}, {}, {"shrinks": True}], indirect=True)
def test_rounds_are_exact_and_the_driver_goes_on_while_a_thread_copies(rig):
    rig.end_copy(rig.begin_copy())
    for value in (2, 3):
        rig.round(value)


@pytest.mark.parametrize("rig", [{"elastic": False}], indirect=True)
def test_a_job_without_deaths_keeps_an_answer_only_until_it_is_copied(rig):
    handle = rig.begin_copy()
    assert rig.kept == BIG
    rig.end_copy(handle)
    assert rig.kept == 0


@pytest.mark.parametrize("rig", [{}, {"shrinks": True}], indirect=True)
def test_an_answer_is_acknowledged_once_it_is_copied(rig):
    handle = rig.begin_copy()
    assert rig.acks() == []
    rig.end_copy(handle)
    assert rig.acks() == [(rig.slot, 1)]
    assert rig.kept >= BIG


@pytest.mark.parametrize(
    ("rig", "elastic"), [({"elastic": False}, False), ({}, True)], indirect=["rig"]
)
def test_an_answer_is_not_copied_once_its_tensor_has_failed(rig, elastic):
    handle = rig.begin_copy()
    rig.core.fail_tensor(rig.x, E_STALL, "x has failed")
    with pytest.raises(BpsxError, match="x has failed"):
        handle.wait(60)
    assert (rig.kept >= BIG) == elastic
    assert rig.acks() == ([(rig.slot, 1)] if elastic else [])  # others do not wait for it
    rig.held.go.set()
    rig.close()
    assert (rig.out == 1).all() and rig.kept == 0


@pytest.mark.parametrize("end", ["fail", "close"])
def test_a_core_may_end_before_an_answer_is_copied(rig, end):
    handle = rig.begin_copy()
    if end == "fail":
        rig.core.fail(E_STALL, "all has failed")
    # The end of the held tensor waits for its thread, which may then copy the answer first.
    threading.Thread(target=rig.held.go.set).start()
    rig.core.close()
    with contextlib.suppress(BpsxError):
        handle.wait(60)
    assert rig.out.tobytes() in (TOTAL, array(BIG).tobytes())
    rig.close()
    assert rig.kept == 0


def test_an_answer_that_all_have_got_is_forgotten_after_the_copy(rig):
    """The lane knows by a HAVE that this worker has it."""
    handle = rig.begin_copy()
    body = struct.pack("<II", 0, 1)
    rig.endpoint.inject(0, w.pack(w.Record(w.SETTLED, w.INLINE, length=len(body), body=body)))
    rig.small_round()
    assert rig.kept >= BIG
    rig.end_copy(handle)
    assert rig.kept < BIG
    assert rig.acks() == []


def test_an_answer_that_is_not_copied_counts_when_its_lane_is_lost(rig):
    handle = rig.begin_copy()
    rig.moves()
    have = rig.next(w.HAVE, rig.target)
    while have.key != 1:
        have = rig.next(w.HAVE, rig.target)
    assert (have.round, have.flags & ~w.INLINE) == (2, w.KEPT)
    rig.want(1)
    assert rig.next(w.GIVE, rig.target).body == TOTAL
    rig.end_copy(handle)
    push_pull(rig.core, rig.x, array(BIG), rig.out)
    assert rig.next(w.PUSH, rig.target).round == 2
    assert not [r for r in rig.unread[rig.target] if r.kind == w.ACK]


def test_all_may_join_before_an_answer_is_copied(rig):
    handle = rig.begin_copy()
    rig.core.all_joined()
    rig.small_round()
    rig.end_copy(handle)
    assert rig.kept < BIG
    push_pull(rig.core, rig.x, array(BIG), rig.out)
    assert rig.next(w.PUSH, 0).round == 0
