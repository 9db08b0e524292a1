"""``bench cores``: what its cases compare, its options, and one short run."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("default", "one", "zeromq", "gloo")
FIGURES = {
    "default": [6.0, 7.0, 8.0],
    "one": [2.0],
    "zeromq": [3.5],
    "threads-3": [5.0],
    "gloo": [1.75],
    "sockets 1": [8.0],
    "sockets 8": [40.0, 40.0],
    **{f"{way} latency": [10.0 * i] for i, way in enumerate(WAYS, 1)},
    **{f"{way} cpu": [0.5 * i] for i, way in enumerate(WAYS, 1)},
    "threads-3 latency": [9.0],
    "threads-3 cpu": [9.0],
}


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.cores")


def test_each_peer_is_the_median_of_what_it_is(cores: ModuleType) -> None:
    found = {c.case: (c.value, c.peer, c.met) for c in cores.report(32, FIGURES, 6)}
    assert found == {
        "rate-32": (7.0, 1.75, None),
        "gain-32": (7.0, 2.0, None),
        "zeromq-32": (7.0, 3.5, None),
        "threads-3-32": (5.0, 2.0, None),
        "sockets-32": (7.0, 10.0, True),
        "latency-32": (10.0, 20.0, None),
        "latency-32-zeromq": (10.0, 30.0, None),
        "latency-32-gloo": (10.0, 40.0, None),
        "cpu-32": (0.5, 1.0, None),
        "cpu-32-zeromq": (0.5, 1.5, None),
        "cpu-32-gloo": (0.5, 2.0, None),
    }


def test_few_cores_and_shared_memory_have_no_target(cores: ModuleType) -> None:
    assert not any(c.target for c in cores.report(16, FIGURES, 4))
    assert "sockets-32" not in {c.case for c in cores.report(32, FIGURES, 6, plain=False)}


def test_the_default_numbers_of_cores_are_doublings_and_all(cores: ModuleType) -> None:
    assert [cores._doublings(n) for n in (1, 2, 6, 32)] == [[1], [2], [2, 4, 6], [2, 4, 8, 16, 32]]


@pytest.mark.parametrize("text", ["0", "4,x", "-1"])
def test_a_wrong_number_names_the_option(cores: ModuleType, text: str) -> None:
    error = importlib.import_module("bench.report").BenchError
    with pytest.raises(error, match=re.escape(f"--cores {text!r}: expected integers from 1")):
        cores._counts("--cores", text)


def test_a_job_on_all_cores_is_measured() -> None:
    from support import benches

    every = str(len(os.sched_getaffinity(0)))  # later forks keep the cores that they may use
    found = benches.cases("cores", "--quick", "--cores", every, "--servers", "1")
    wanted = {f"{case}-{every}" for case in ("rate", "gain", "zeromq", "sockets", "latency", "cpu")}
    assert wanted <= found.keys()
    assert all(c["value"] > 0 and c["peer"] > 0 for c in found.values())
