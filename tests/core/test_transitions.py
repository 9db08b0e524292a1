"""Tasks, partitions and rounds make only the transitions of their tables."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import core.cores
import core.test_lane
from bpsx.core._handle import Request
from core.cores import BIG, Rig, array, push_pull
from core.counted import Counted, compiled, table
from support import wire as w
from support.places import ROOT

JOBS, EVENTS = 25, 80
E_STALL = -4


@pytest.fixture(scope="module")
def counted_core(tmp_path_factory):
    return compiled("_core.pyx", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def counted_lane(tmp_path_factory):
    return compiled("server/_engine.pyx", tmp_path_factory.mktemp("lane"))


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


class RandomJob:
    """A core to which things happen in random order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rig = Rig(lanes=2, servers=2, credit=rng.choice([0, 100_000]), start=False)
        self.rig.core.open_pool(2, copies_from=rng.choice([0, BIG]))
        self.rig.core.start()
        self.tensors = [
            self.rig.tensor(f"t{i}", *rng.choices([64, 4096, BIG], k=rng.randint(1, 3)), lane=i % 2)
            for i in range(4)
        ]
        self.tensors.append(self.rig.matrix("m", 20, 30))
        self.pushes: list[tuple[int, w.Record]] = []
        self.handles: list = []
        self.events: list[Callable[[], object]] = [
            *[self.submit, self.answer, self.answer] * 5,
            self.answer_with_an_error,
            self.answer_again,
            self.end_unsubmitted,
            self.fail_tensor,
            self.rig.core.reap,
        ]

    def request(self, i: int) -> Request:
        tensor = self.tensors[i]
        return Request(tensor.name, array(tensor.nbytes), array(tensor.nbytes))

    def submit(self) -> None:
        i = self.rng.randrange(5)
        self.handles.append(self.rig.core.submit(self.tensors[i], self.request(i)))

    def _receive(self) -> tuple[int, w.Record] | None:
        for lane in range(2):
            while (message := self.rig.lanes[lane].sent()) is not None:
                records = w.unpack(message[1], message[2])
                self.pushes += [(lane, r) for r in records if r.kind == w.PUSH]
        if not self.pushes:
            return None
        return self.pushes.pop(self.rng.randrange(len(self.pushes)))

    def answer(self) -> None:
        if found := self._receive():
            self.rig.answer(found[1], bytes(found[1].length), found[0])

    def answer_with_an_error(self) -> None:
        if found := self._receive():
            self.rig.answer(found[1], b"", found[0], kind=w.ERROR, divisor=-E_STALL)

    def answer_again(self) -> None:
        if found := self._receive():
            for _ in range(2):
                self.rig.answer(found[1], bytes(found[1].length), found[0])

    def end_unsubmitted(self) -> None:
        i = self.rng.randrange(4)
        handle = self.rig.core.prepare(self.request(i), self.tensors[i].nbytes)
        self.rig.core.end(handle, E_STALL, "not placed")
        self.handles.append(handle)

    def fail_tensor(self) -> None:
        if self.rng.random() < 0.3:
            self.rig.core.fail_tensor(self.tensors[self.rng.randrange(5)], E_STALL, "failed")

    def run(self) -> None:
        for _ in range(EVENTS):
            self.rng.choice(self.events)()
        if self.rng.random() < 0.5:
            self.rig.core.fail(E_STALL, "the whole core")
        self.rig.close()
        for handle in self.handles:
            assert handle.done()


def test_a_worker_makes_only_the_transitions_of_the_tables(
    counted_core: Counted, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.cores, "Core", counted_core.module.Core)
    # Only on a GPU is an input awaited.
    wanted = {row for row in table("task") if "AWAITS_INPUT" not in row}
    # Stand-ins are made only in a machine of several processes.
    of_matrix = table("matrix") - {("IDLE", "SUMMING_P"), ("SUMMING_P", "SUMMING_Q")}
    jobs = 0
    # Rare transitions depend on the moment at which the driver sees an event: more jobs, if needed.
    while jobs < JOBS or (
        (counted_core.seen("task"), counted_core.seen("matrix")) != (wanted, of_matrix)
        and jobs < 40 * JOBS
    ):
        RandomJob(rng).run()
        jobs += 1
    for machine in ("task", "partition", "matrix"):
        assert not counted_core.seen(machine, listed=False)
    assert {
        ("END", "PUSH"),
        ("PUSH", "PULL"),
        ("PULL", "END"),
        ("PULL", "COPY"),
        ("COPY", "END"),
    } <= counted_core.seen("partition")
    assert counted_core.seen("task") == wanted
    # Threads may be too quick for a failure to come between two of these.
    assert of_matrix - counted_core.seen("matrix") <= {
        (state, "IDLE") for state in ("PROJECTING", "ORTHOGONALISING", "PROJECTING_BACK")
    } | {("REFRESHING", "IDLE")}


def test_an_answer_that_comes_twice_ends_a_partition_once(
    counted_core: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.cores, "Core", counted_core.module.Core)
    r = Rig()
    tensor = r.tensor("x", 64, 64)
    out = np.zeros(32, np.float32)
    handle = push_pull(r.core, tensor, array(128), out)
    first, second = r.pushes(2)
    for push in (first, first, second):
        r.answer(push, array(64, 2).tobytes())
    handle.wait(60)
    assert (out == 2).all()
    r.close()
    assert not counted_core.seen("partition", listed=False)


def test_a_lane_makes_only_the_transitions_of_the_table(
    counted_lane: Counted, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.test_lane, "Lane", counted_lane.module.Lane)
    for _ in range(JOBS):
        workers = rng.randint(1, 3)
        r = core.test_lane.Rig(workers, fixed_order=rng.random() < 0.5)
        _register(r)
        left, pushed = rng.randrange(workers), [[0] * 3 for _ in range(workers)]
        for i in range(EVENTS):
            rank, slot = rng.randrange(workers), rng.randrange(3)
            if i == EVENTS // 2:
                r.lane.gone(left)
            if i < EVENTS // 2 or rank != left:
                body = bytes(core.test_lane.BIG if slot == 1 else 64)
                divisor = 1 if rng.random() < 0.9 else 2
                r.push(rank, slot, body, round_=pushed[rank][slot], divisor=divisor)
                pushed[rank][slot] += rng.random() < 0.9
        r.close()
    assert not counted_lane.seen("round", listed=False)


def test_a_lane_can_make_every_transition_of_the_table(
    counted_lane: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.test_lane, "Lane", counted_lane.module.Lane)
    r = core.test_lane.Rig(3)
    try:
        _register(r)
        for round_, divisors in enumerate([(1, 1, 1), (1, 2, 1)]):
            for rank in range(3):
                r.push(rank, 0, bytes(64), round_=round_, divisor=divisors[rank])
        r.push(0, 0, bytes(64), round_=2)
        for rank, divisor in enumerate((1, 2)):
            r.push(rank, 1, bytes(core.test_lane.BIG), divisor=divisor)
        r.send(2, w.Record(w.PING, w.INLINE, sender=2, length=32, body=bytes(32)))
        assert _kinds(r, 2, 3) == [w.ANSWER, w.ERROR, w.PONG]  # all pushes have been handled
        r.lane.gone(2)
        assert _kinds(r, 0, 4) == [w.ANSWER, w.ERROR, w.ERROR, w.ERROR]
    finally:
        r.close()
    assert counted_lane.seen("round") == table("round")


def _kinds(r: core.test_lane.Rig, rank: int, n: int) -> list[int]:
    """Return the kinds of the next ``n`` records that a worker gets."""
    found: list[int] = []
    while len(found) < n:
        found += [record.kind for record in r.take(rank)]
    return found


def _register(r: core.test_lane.Rig) -> None:
    """Register a small key, a large one, and one whose compression no server knows."""
    r.register(0, 64)
    r.register(1, core.test_lane.BIG)
    for rank in range(len(r.workers)):
        r.send(rank, _registration(2, rank, b"no such compressor"))


def _registration(slot: int, rank: int, codec: bytes) -> w.Record:
    return w.Record(
        w.REGISTER,
        w.INLINE,
        3,
        7,
        slot + 100,
        slot,
        rank,
        cookie=64,
        priority=len(codec),
        length=4 + len(codec),
        body=b"name" + codec,
    )


_RUN = """
import sys, pathlib, pytest
from core.counted import install
found = install("bpsx._core", pathlib.Path(sys.argv[1]))
code = pytest.main(sys.argv[2:])
for machine in ("task", "partition"):
    print(machine, "unlisted", found.seen(machine, listed=False))
print("seen", ("COORDINATE_REDUCE", "REDUCE") in found.seen("partition"))
sys.exit(code)
"""


def test_processes_of_one_machine_make_only_the_transitions_of_the_tables(counted_core):
    suite = str(ROOT / "tests" / "core" / "test_machine.py")
    done = subprocess.run(
        [sys.executable, "-c", _RUN, counted_core.library, "-q", "-p", "no:cacheprovider", suite],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "task unlisted set()" in done.stdout
    assert "partition unlisted set()" in done.stdout
    assert "seen True" in done.stdout
