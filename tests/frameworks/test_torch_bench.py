"""``python -m bench torch`` runs and reports its cases. These tests judge no figures."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from support import benches

ROOT = Path(__file__).resolve().parents[2]


def test_step_runs_and_reports() -> None:
    cases = benches.cases("torch", "--quick", "--only", "step", "--models", "tiny")
    steps = [
        f"step-tiny-{transport}{way}"
        for transport in ("tcp", "machine")
        for way in ("", "-barrier", "-ddp")
    ]
    assert list(cases) == ["alone-tiny", *steps]
    assert all(
        c["unit"] == "ms"
        and c["value"] > 0
        and c["peer"] == cases["alone-tiny"]["peer"]
        and c["samples"]
        for c in cases.values()
    )
    assert {n for n, c in cases.items() if c["target"]} == {"step-tiny-tcp", "step-tiny-machine"}


def test_unknown_cases_and_models_are_named() -> None:
    for option in ("--only", "--models"):
        done = subprocess.run(
            [sys.executable, "-m", "bench", "torch", option, "nothing"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1 and "unknown: nothing" in done.stderr


def test_a_few_steps_of_training_on_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    bench, network = (
        importlib.import_module(f"bench.{name}") for name in ("end_to_end", "network")
    )
    if reason := network.why_not():
        pytest.skip(reason)
    with benches.forks():
        runs = bench._trained("200mbit", ["alone", "float32", "bfloat16", "topk"], 1, 3)
    plain, half, topk = runs["float32"], runs["bfloat16"], runs["topk"]
    assert all(
        len(run.steps) == 3 and len(run.scores) == len(run.seconds) == 1 for run in runs.values()
    )
    assert runs["alone"].moved < 1e4 and 0.98 < plain.moved / 19.8e6 < 1.02
    assert 0.48 < half.moved / plain.moved < 0.52 and topk.moved < plain.moved / 20
    assert plain.step > 2 * 9.9e6 * 8 / 200e6 * 1e3, (
        "nothing is sent faster than the link: the server answers two workers"
    )


@pytest.mark.parametrize(
    "spans, joined",
    [
        ([], []),
        ([(1, 2), (3, 4)], [(1, 2), (3, 4)]),
        ([(3, 4), (1, 3)], [(1, 4)]),
        ([(1, 9), (2, 3), (8, 10)], [(1, 10)]),
    ],
)
def test_time_under_way_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
    spans: list[tuple[float, float]],
    joined: list[tuple[float, float]],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert importlib.import_module("bench.torch_worker")._joined(spans) == joined
