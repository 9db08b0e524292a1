"""Output of ``bench trust``, without measurements: names, targets, the worst stage."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.trust")


def test_a_role_is_its_worst_stage(trust: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"init": 1.0, "push": 0.1, "pull": 6.0, "idle": 0.2, "shutdown": 0.3}
    monkeypatch.setattr(trust, "strike", lambda role, stage: trust.Outcome(seconds[stage], 9.0))
    cases = {c.case: c for c in trust.kills(["worker", "server", "scheduler"], turns=3)}
    for role in ("worker", "server", "scheduler"):
        case = cases[f"kill-{role}"]
        assert (case.value, case.peer, case.ratio, case.target, case.met) == (
            6.0,
            5.0,
            1.2,
            "<= 1",
            False,
        )
        assert len(case.samples) == 3 and "pull" in case.note
        assert [n for n in cases if n.startswith(f"kill-{role}.")] == [
            f"kill-{role}.{stage}" for stage in seconds
        ]


def test_the_allowed_silence_is_subtracted(
    trust: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "strike", lambda *_, **__: trust.Outcome(3.0, 9.0))
    (case,) = trust.stops(["server"], turns=2)
    assert (case.case, case.value) == ("stop-server", 0.5)


def test_only_existing_benchmarks_are_offered(trust: ModuleType) -> None:
    offered = trust._offered()
    assert {"kill-worker", "kill-server", "kill-scheduler", "handshake", "start-stop"} <= set(
        offered
    )
    for name, module in trust._OTHERS.items():
        assert (name in offered) == (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_an_unknown_case_is_named(trust: ModuleType) -> None:
    import argparse

    with pytest.raises(trust.BenchError, match="kill-boss"):
        trust.run(argparse.Namespace(only="kill-boss", quick=True))
