"""Jobs whose processes are struck one after the other: ``bench chaos``, by a count, and
``bench elastic --only committed``.
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import needed

from support import benches

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The job's processes are forks: to import PyTorch takes longer than all that they do."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in the process that they are forked from
    with benches.forks():
        yield


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "transport", "roles", "kinds"),
    [
        (2, "shm", "server,scheduler", "kill"),
        (2, "shm", "server,scheduler", "stop,term"),
        (3, "tcp", "worker,server,scheduler", "kill,stop"),
        (4, "zmq", "worker,server,scheduler", "kill,term"),
        pytest.param(3, "zmq", "worker,server,scheduler", "cut", marks=needed),
    ],
)
def test_survivors_count_each_step_with_the_right_weights(
    monkeypatch, workers, transport, roles, kinds
):
    monkeypatch.syspath_prepend(str(ROOT))
    chaos = importlib.import_module("bench.chaos")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    options = argparse.Namespace(
        minutes=0,
        kills=4,
        seed=seed,
        workers=workers,
        servers=2,
        roles=roles,
        kinds=kinds,
        transport=transport,
        logs="",
        quick=False,
    )
    equal, discarded, longest = chaos.run(options)
    assert equal.met and equal.samples == (1, 1), equal
    assert discarded.met, discarded
    assert longest.met, longest
    killed = re.findall(r"(\d+) (?:workers|servers|schedulers)", longest.note)
    assert len(killed) == 3 and sum(map(int, killed)) == 4, longest
    struck = dict(re.findall(r"(\w+) (\d+)[,)]", longest.note))
    assert {*struck} <= {*kinds.split(",")} and sum(map(int, struck.values())) == 4, longest


@pytest.mark.timeout(300)
def test_steps_with_a_death_each_count(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    elastic_committed = importlib.import_module("bench.elastic_committed")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    share, discarded, _ = elastic_committed.committed(
        "zmq", random.Random(seed), every=1.0, steps=8, seconds=0.2
    )
    assert share.value == 100 and discarded.value == 0, (share, discarded)
    counted, begun = share.samples
    assert counted == begun >= 2 * 8, share
    killed = re.findall(r"(\d+) (?:workers|servers|schedulers)", share.note)
    assert sum(map(int, killed)) >= 5, share
