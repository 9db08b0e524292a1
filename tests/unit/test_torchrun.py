"""The meaning of torchrun's variables, and meetings in a store that remembers earlier jobs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bpsx.api.torchrun import Machines, Rendezvous, machines
from bpsx.config import LaunchedPlace, launched
from bpsx.errors import ConfigError, RendezvousError

GIVEN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "far",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}


def read(monkeypatch, **changes):
    for name in (*GIVEN, "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**GIVEN, **changes}.items():
        monkeypatch.setenv(name, value)
    return launched()


def test_torchruns_variables_give_a_worker_its_place(monkeypatch):
    found = read(monkeypatch)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert (found.master_addr, found.master_port, found.run) == ("far", 29500, "job")


@pytest.mark.parametrize(("name", "other"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_a_half_is_refused_and_names_the_other(monkeypatch, name, other):
    with pytest.raises(ConfigError, match=f"^{other}=. is set, but .*set {name};"):
        read(monkeypatch, **{name: ""})


@pytest.mark.parametrize(
    "name",
    [
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ],
)
def test_a_place_needs_only_some_of_torchruns_variables(monkeypatch, name):
    assert read(monkeypatch, **{name: ""}) is not None


@pytest.mark.parametrize("name", ["DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK"])
def test_bpsx_place_wins(monkeypatch, name):
    assert read(monkeypatch, **{name: "0"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"),
        ("RANK", "x"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "4"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "tcp://10.0.0.1:80"),
        ("MASTER_PORT", "0"),
        ("LOCAL_WORLD_SIZE", "1.5"),
    ],
)
def test_impossible_settings_are_named(monkeypatch, name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r}|{name}={value}: expected"):
        read(monkeypatch, **{name: value})


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ([(0, 2), (1, 2)], Machines(1, 2, False)),
        ([(0, 2), (1, 2), (0, 2), (1, 2)], Machines(2, 2, False)),
        ([(0, 1), (0, 1), (0, 1)], Machines(3, 1, False)),
        ([(0, 2), (1, 2), (0, 1)], Machines(3, 1, True)),
        ([(0, 1), (0, 2), (1, 2)], Machines(3, 1, True)),
        (
            [(0, 2), (0, 2), (1, 2), (1, 2)],
            Machines(4, 1, True),
        ),  # ranks that are not consecutive on each machine
    ],
)
def test_local_ranks_tell_how_many_machines_there_are(local, expected):
    assert machines(local) == expected


class Memory:
    """A store within this process."""

    def __init__(self):
        self.entries, self._changed = {}, threading.Condition()

    def set(self, name, text):
        with self._changed:
            self.entries[name] = text
            self._changed.notify_all()

    def get(self, names, timeout):
        with self._changed:
            self._changed.wait_for(lambda: all(name in self.entries for name in names), timeout)
            return [self.entries.get(name) for name in names]

    def wait_for(self, ending, text):
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(n.endswith(ending) and t == text for n, t in self.entries.items()), 30
            )


def meeting(store, rank, size, timeout=30.0):
    return Rendezvous(LaunchedPlace(rank, size, rank, size, "far", 29500, "job"), store, timeout)


def lead(store, size, job):
    """Run worker 0: publish ``job`` and return the replies."""
    ours = meeting(store, 0, size)
    answers = ours.gather("0")
    ours.tell(job)
    return answers


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("led_first", [True, False])
def test_a_new_rendezvous_sees_nothing_of_earlier_jobs(pool, led_first):
    """The same store, ranks and names are used each time.

    In between there is a smaller job, and one that was not complete in time.
    """
    store = Memory()
    for turn, size in enumerate((4, 2, 4, 4)):
        others = (
            []
            if led_first
            else [
                pool.submit(meeting(store, rank, size).hear, f"{rank} {turn}")
                for rank in range(1, size)
            ]
        )
        first = pool.submit(lead, store, size, f"job {turn}")
        others = others or [
            pool.submit(meeting(store, rank, size).hear, f"{rank} {turn}")
            for rank in range(1, size)
        ]
        assert first.result() == ["0", *(f"{rank} {turn}" for rank in range(1, size))]
        assert [heard.result() for heard in others] == [f"job {turn}"] * (size - 1)
        if turn == 2:
            with pytest.raises(
                RendezvousError, match="missing in torchrun's store at far:29500: worker 1, 2, 3"
            ):
                meeting(store, 0, 4, timeout=0).gather("0")


def test_worker_0_is_replaced_while_others_wait(pool):
    """Worker 0 is killed after it has heard worker 1.

    Worker 1 goes on to the job of the next worker 0.
    """
    store = Memory()
    with pytest.raises(RendezvousError):
        meeting(store, 0, 3, timeout=0).gather("0")
    waiting = pool.submit(meeting(store, 1, 3).hear, "1")
    store.wait_for("/1", "1")
    first = pool.submit(lead, store, 3, "job")
    late = pool.submit(meeting(store, 2, 3).hear, "2")
    assert first.result() == ["0", "1", "2"] and waiting.result() == late.result() == "job"


def test_a_refusal_reaches_a_worker_that_reads_after_the_next_call(pool):
    """Worker 0 refuses, and calls again at once, while worker 2 is between two looks.

    Worker 2's reply of the refused attempt must not count in the next one.
    """
    store, away, back = Memory(), threading.Event(), threading.Event()

    class Slow:
        set = store.set

        def get(self, names, timeout):
            if names[0].endswith("/job") and timeout:
                away.set()
                assert back.wait(30)
                return [None]  # as if the job had come just after the end of the wait
            return store.get(names, timeout)

    first = meeting(store, 0, 3)
    gathered = pool.submit(first.gather, "0")
    slow = pool.submit(meeting(Slow(), 2, 3).hear, "2 old")
    quick = pool.submit(meeting(store, 1, 3).hear, "1 old")
    assert gathered.result() == ["0", "1 old", "2 old"] and away.wait(30)
    first.refuse("no")
    assert quick.result() == "no"
    second = pool.submit(lead, store, 3, "job")
    others = [pool.submit(meeting(store, 1, 3).hear, "1 new")]
    store.wait_for("/1", "1 new")
    back.set()
    assert slow.result() == "no"
    others.append(pool.submit(meeting(store, 2, 3).hear, "2 new"))
    assert second.result() == ["0", "1 new", "2 new"]
    assert [heard.result() for heard in others] == ["job", "job"]


def test_a_worker_is_replaced_while_worker_0_waits(pool):
    store = Memory()
    first = pool.submit(lead, store, 3, "job")
    lost = pool.submit(meeting(store, 1, 3).hear, "old")
    store.wait_for("/1", "old")
    new = pool.submit(meeting(store, 1, 3).hear, "new")
    store.wait_for("/1", "new")
    late = pool.submit(meeting(store, 2, 3).hear, "2")
    assert (
        first.result() == ["0", "new", "2"]
        and new.result() == late.result() == lost.result() == "job"
    )


def test_a_worker_without_an_answer_names_the_worker_it_waits_for():
    store = Memory()
    with pytest.raises(
        RendezvousError,
        match="worker 1: .* no answer from worker 0 in torchrun's store at far:29500",
    ):
        meeting(store, 1, 3, timeout=-0.9).hear("1")
    with pytest.raises(RendezvousError):
        meeting(store, 0, 3, timeout=0).gather("0")
    with pytest.raises(
        RendezvousError, match="worker 1: .* worker 0 still waits for other workers"
    ):
        meeting(store, 1, 3, timeout=-0.5).hear("1")
