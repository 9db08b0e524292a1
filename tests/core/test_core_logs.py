"""A core against scripted lanes: what it logs and holds of compressed keys, and gives to a lane."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bpsx._core import Core
from bpsx.compression.spec import compression, make, stream
from bpsx.compression.state import ask
from bpsx.core._handle import Handle, Request
from bpsx.core._tensor import Tensor
from bpsx.dtypes import BY_NAME
from bpsx.planning.stages import stages_for
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from support import wire as w

N = 1000
STATE_BYTES = 48 + 4 * N


class Rig:
    """An elastic core with one compressed tensor, on lane 0 of two."""

    def __init__(self, ef: str = "vanilla", n: int = N, **options: int) -> None:
        self.endpoint = LoopbackEndpoint()
        self.lanes = [LoopbackEndpoint() for _ in range(2)]
        for i, lane in enumerate(self.lanes):
            self.endpoint.link(i, lane, 0)
            lane.link(0, self.endpoint, i)
        self.core = Core(
            self.endpoint, rank=0, job=7, lanes=[0, 1], credit=0, spin_us=0, elastic=True, **options
        )
        self.core.open_pool(1)
        self.core.start()
        spec = compression({"compressor": "onebit", "scaling": True, "ef": ef})
        made = make(spec, "float32", 4 * n, stream(b"t", 0), 0)
        self.tensor = Tensor(
            "t",
            BY_NAME["float32"].code,
            [(5, 0, 9, 0, 4 * n)],
            stages_for("cpu", True),
            codec=spec.text(),
            made=[made],
        )
        self.n, self.lane, self.pushed = n, 0, 0

    def take(self, kind: int) -> w.Record:
        """Return the next record of that kind that the key's lane receives."""
        while True:
            message = self.lanes[self.lane].sent(60)
            assert message is not None
            for record in w.unpack(message[1], message[2]):
                if record.kind == kind:
                    return record

    def begin(self) -> tuple[Handle, w.Record]:
        """Begin a push_pull; return its handle and the push."""
        self.pushed += 1
        data = np.random.default_rng(self.pushed).standard_normal(self.n).astype(np.float32)
        handle = self.core.submit(self.tensor, Request("t", data, np.empty_like(data), divisor=3))
        return handle, self.take(w.PUSH)

    def send(self, kind: int, push: w.Record, body: bytes = b"", **fields: int) -> None:
        """Send a record about the key as its lane."""
        record = w.Record(kind, w.INLINE, push.dtype, 7, push.key, cookie=push.cookie)
        record = record._replace(length=len(body), body=body, **{"divisor": 0, **fields})
        self.endpoint.inject(self.lane, w.pack(record))

    def round(self, number: int, stored: int = 0) -> w.Record:
        """Have a push_pull answered as sum ``number``; return the push."""
        handle, push = self.begin()
        self.send(w.ANSWER, push, push.body or b"", round=push.round, slot=number, divisor=stored)
        handle.wait(60)
        return push

    def lose_lane(self, term: int = 1) -> w.Coded:
        """Lose lane 0; return what the core says to lane 1."""
        self.core.begin_term(term, [(0, [(1, 20)])])
        self.lane = 1
        return w.coded(self.take(w.HAVE).body or b"")

    def logged(self, push: w.Record, after: int, unanswered: int = 0, term: int = 1) -> list[tuple]:
        """Ask for the log; return its entries."""
        self.send(w.FETCH, push, term=term, round=after, divisor=unanswered)
        parts = [self.take(w.LOG)]
        while len(parts) < parts[0].divisor:
            parts.append(self.take(w.LOG))
        assert [part.round for part in parts] == list(range(len(parts)))
        return [entry for part in parts for entry in w.log_entries(part.body or b"")]

    def close(self) -> None:
        self.core.close()
        self.endpoint.close()
        for lane in self.lanes:
            lane.close()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.close()


def rig_in(rigs: list[Rig], *arguments: str, **more: int) -> Rig:
    rigs.append(Rig(*arguments, **more))
    return rigs[-1]


def test_pushes_are_logged_until_a_later_snapshot_is_stored(rigs):
    r = rig_in(rigs)
    pushes = [r.round(1), r.round(2), r.round(4)]
    size = len(pushes[0].body or b"")
    assert r.core.gauges()["logged"] == 3 * size
    pushes.append(r.round(5, stored=2))
    assert r.core.gauges()["logged"] == 2 * size
    said = r.lose_lane()
    assert (said.sum, said.flags, said.logged) == (5, w.SUMMED, 2 * size)
    wanted = [(4, 3, pushes[2].body), (5, 3, pushes[3].body)]
    assert r.logged(pushes[0], after=0) == r.logged(pushes[0], after=3) == wanted
    assert r.logged(pushes[0], after=4) == wanted[1:] and r.logged(pushes[0], after=5) == []


def test_an_unanswered_push_is_logged_and_pushed_again_with_the_same_bytes(rigs):
    r = rig_in(rigs)
    first = r.round(1)
    handle, push = r.begin()
    said = r.lose_lane()
    assert said.sum == 1
    again = r.take(w.PUSH)
    assert (again.body, again.round, again.slot, again.term) == (push.body, 1, 20 + 9, 1)
    entries = [(1, 3, first.body), (2, 3, push.body)]
    assert r.logged(push, 0, unanswered=2) == entries and r.logged(push, 0) == entries[:1]
    r.send(w.ANSWER, again, push.body or b"", round=1, slot=2)
    handle.wait(60)
    assert r.core.gauges()["logged"] == 2 * len(push.body or b"")


def test_a_round_that_fails_is_no_sum(rigs):
    r = rig_in(rigs)
    r.round(1)
    handle, push = r.begin()
    r.send(w.ERROR, push, round=1, divisor=2)
    with pytest.raises(Exception, match="t"):
        handle.wait(60)
    said = r.lose_lane()
    assert (said.sum, said.flags) == (1, 0)
    assert [entry[0] for entry in r.logged(push, 0)] == [1]


def test_a_snapshot_is_held_confirmed_once_and_given(rigs):
    r = rig_in(rigs)
    r.round(1)
    handle, push = r.begin()
    assert not push.flags & w.KEPT
    r.send(w.SNAP, push, bytes([1]) * STATE_BYTES, round=1)
    r.send(w.ANSWER, push, push.body or b"", round=1, slot=2)
    handle.wait(60)
    assert r.round(3).flags & w.KEPT
    assert not r.round(4, stored=1).flags & w.KEPT
    assert r.core.gauges()["held"] == STATE_BYTES
    said = r.lose_lane()
    assert (said.flags, said.state) == (w.HAS_STATE | w.SUMMED, 1)
    r.send(w.FETCH, push, term=1, round=1, flags=w.INLINE | w.STATE)
    load = r.take(w.LOAD)
    assert (load.round, load.body) == (1, bytes([1]) * STATE_BYTES)


def test_a_snapshot_is_dropped_when_another_worker_has_a_later_one(rigs):
    r = rig_in(rigs)
    push = r.round(1)
    r.send(w.SNAP, push, bytes(STATE_BYTES), round=1)
    r.round(2, stored=1)
    assert r.core.gauges()["held"] == STATE_BYTES
    r.round(3, stored=2)
    assert r.core.gauges()["held"] == 0 and not r.lose_lane().flags & w.HAS_STATE


@pytest.mark.parametrize(("snapshot_after", "kept"), [(1, "set"), (2, "set"), (3, "snapshot")])
def test_a_state_that_was_set_gives_way_to_later_snapshots_only(rigs, snapshot_after, kept):
    r = rig_in(rigs)
    push = r.round(1)
    r.round(2)
    set_ = np.full(STATE_BYTES, 9, np.uint8)
    handle = ask(r.core, r.tensor, set_)
    r.send(w.ANSWER, r.take(w.PUSH), set_.tobytes(), round=2, slot=2)
    handle.wait(60)
    r.send(w.SNAP, push, bytes(STATE_BYTES), round=snapshot_after)
    # The thread that begins a round sends its push before it reads what has come meanwhile.
    assert any(r.round(number).flags & w.KEPT for number in (3, 4))
    said = r.lose_lane()
    assert bool(said.flags & w.WAS_SET) == (kept == "set")
    assert said.state == (2 if kept == "set" else 3)


def test_a_state_that_is_being_set_is_set_again_and_is_no_round(rigs):
    r = rig_in(rigs)
    r.round(1)
    set_ = np.full(STATE_BYTES, 9, np.uint8)
    handle = ask(r.core, r.tensor, set_)
    first = r.take(w.PUSH)
    r.core.begin_term(1, [(0, [(1, 20)])])
    r.lane = 1
    have = r.take(w.HAVE)
    assert (have.round, have.flags & w.WAITS) == (1, 0)
    again = r.take(w.PUSH)
    assert again.flags & w.STATE and again.body == first.body == set_.tobytes()
    r.send(w.ANSWER, again, set_.tobytes(), round=1, slot=1)
    handle.wait(60)


def test_without_a_residual_only_the_counter_is_remembered(rigs):
    r = rig_in(rigs, "")
    handle, push = r.begin()
    r.send(w.ANSWER, push, push.body or b"", slot=8, term=3, priority=1)
    handle.wait(60)
    assert r.core.gauges()["logged"] == r.core.gauges()["held"] == 0
    said = r.lose_lane()
    assert said == w.Coded(8, w.HAS_STATE | w.SUMMED, 8, 0, (1 << 32) + 3, 0)


def test_a_long_log_is_given_in_parts(rigs):
    """Parts of about 1 MiB; pushes are sent in frames of their own."""
    r = rig_in(rigs, n=1 << 21)
    pushes = []
    for number in range(1, 10):
        handle, push = r.begin()
        body = push.body or b""
        record = w.Record(w.ANSWER, 0, push.dtype, 7, push.key, number, 0, 0, push.round)
        record = record._replace(divisor=0, cookie=push.cookie, length=len(body))
        r.endpoint.inject(0, w.pack(record), body)
        handle.wait(60)
        pushes.append(push)
    r.lose_lane()
    entries = r.logged(pushes[0], 0)
    assert [(entry[0], entry[2]) for entry in entries] == [
        (number, push.body) for number, push in enumerate(pushes, 1)
    ]


@pytest.mark.parametrize("fields", [{"cookie": 5}, {"key": 6}, {"length": 0, "body": b""}])
def test_an_invalid_snapshot_is_counted_and_dropped(rigs, fields):
    r = rig_in(rigs)
    push = r.round(1)
    record = w.Record(w.SNAP, w.INLINE, push.dtype, 7, push.key, round=1, cookie=push.cookie)
    record = record._replace(length=STATE_BYTES, body=bytes(STATE_BYTES))
    r.endpoint.inject(0, w.pack(record._replace(**fields)))
    r.round(2)
    assert r.core.counters()["malformed"] == 1 and r.core.gauges()["held"] == 0
