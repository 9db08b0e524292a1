"""``bench elastic`` and ``bench chaos`` without jobs: gaps, the model's weights, arguments."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


def test_a_gap_is_the_longest_later_step_less_the_median_before(load: Any) -> None:
    elastic = load("elastic")
    # Steps of 1, 1, 3 | 2, 5, 1 seconds; the one of 2 was under way.
    assert elastic.excess([0, 1, 2, 5, 7, 12, 13], struck=6.0) == 4.0
    with pytest.raises(elastic.BenchError, match="was over before"):
        elastic.excess([0, 1, 2], struck=2.5)


def test_the_weights_of_a_job_follow_without_one(load: Any) -> None:
    """A worker that exchanges gradients has the weights that one process computes."""
    model = load("plain_model")
    mine, alone = (model.start_weights([3, 500]) for _ in range(2))
    for step in range(5):
        pushed: list[np.ndarray] = []

        def push(gradients: list[np.ndarray], to: list[np.ndarray] = pushed) -> list[np.ndarray]:
            to.extend(g.copy() for g in gradients)
            return gradients

        def add(gradients: list[np.ndarray], of: list[np.ndarray] = pushed) -> list[np.ndarray]:
            return [a + b for a, b in zip(gradients, of)]

        model.next_weights([w.copy() for w in mine], step, [1], push)
        model.next_weights(mine, step, [0], add)
        model.next_weights(alone, step, [0, 1])
    assert [w.tobytes() for w in mine] == [w.tobytes() for w in alone]


@pytest.mark.parametrize("steps", [0, 3])
def test_the_digest_tells_weights_apart(load: Any, steps: int) -> None:
    model = load("plain_model")
    same = model.digest_after("mixed", steps, 2)
    assert same == model.digest_after("mixed", steps, 2)
    assert same != model.digest_after("mixed", steps + 1, 2)
    assert (same == model.digest_after("mixed", steps, 3)) == (steps == 0)


def test_a_job_with_other_weights_is_counted(load: Any) -> None:
    chaos = load("chaos")
    course = chaos.Course(jobs=4, equal=3, steps=100, begun=400, counted=399, longest=12.0)
    equal, discarded, longest = chaos.cases(course)
    assert (equal.value, equal.met, longest.value, longest.met) == (75.0, False, 12.0, False)
    assert (discarded.value, discarded.met) == (1, False)


def test_wrong_arguments_are_named(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, chaos = load("elastic"), load("chaos")
    with pytest.raises(elastic.BenchError, match="other-gap"):
        elastic.run(argparse.Namespace(only="other-gap", seed=1, quick=True))
    monkeypatch.setattr(load("network"), "why_not", lambda: "no root")
    with pytest.raises(elastic.BenchError, match="--link: no root"):
        elastic.run(argparse.Namespace(only="overhead", link="1gbit", seed=1, quick=True))
    with pytest.raises(chaos.BenchError, match="--servers 1: at least 2"):
        chaos.run(argparse.Namespace(roles="all", servers=1, workers=4))
    with pytest.raises(chaos.BenchError, match="--workers 2: at least 3"):
        chaos.run(argparse.Namespace(roles="worker", servers=1, workers=2))
    with pytest.raises(chaos.BenchError, match="unknown: launcher"):
        chaos.run(argparse.Namespace(roles="server,launcher", servers=2, workers=2))
    given = {"roles": "server", "servers": 2, "workers": 2}
    with pytest.raises(chaos.BenchError, match="unknown: freeze"):
        chaos.run(argparse.Namespace(kinds="kill,freeze", **given))
    monkeypatch.setattr(load("deaths"), "why_no_cuts", lambda: "no root")
    with pytest.raises(chaos.BenchError, match="cut: no root"):
        chaos.run(argparse.Namespace(kinds="cut", **given))
    assert load("deaths").allowed("all") == ["kill", "stop", "term"]


@pytest.mark.parametrize(
    ("kind", "status", "text", "wrong"),
    [
        ("stop", 1, "worker 1: this worker is not awaited any more: worker 1 is gone: cut", False),
        ("stop", 0, "the job is gone: worker 1 is gone", True),
        ("cut", 1, "KeyError: 3", True),
        ("cut", -9, "worker 1 is gone", True),
        ("term", 0, "", False),
        ("term", 1, "worker 1 is gone", True),
    ],
)
def test_the_end_of_a_struck_process_is_checked(
    load: Any, tmp_path: Path, kind: str, status: int, text: str, wrong: bool
) -> None:
    deaths, log = load("deaths"), tmp_path / "log"
    log.write_text(text)
    process = argparse.Namespace(pid=7, returncode=status)
    going = deaths.Going(kind, "worker", 1, "worker 1", process, log, 0.0, 0.0)
    assert bool(going.fault) == wrong, going.fault


def test_a_peer_that_is_not_there_has_a_row_that_says_so(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchft = load("elastic_torchft")
    monkeypatch.setattr(torchft.importlib.util, "find_spec", lambda name: None)
    case = torchft.committed(None, 4, 6.0, iter(()), 10, 0.1)
    assert (case.case, case.value, case.unit) == ("torchft-6", 0, "runs")
    assert "torchft is not installed" in case.note


def test_the_picture_shows_the_gaps(load: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, report = load("elastic_plot"), load("report")
    gaps = [
        report.median_case("server-gap-digits", [0.1, 0.2, 0.3], "s"),
        report.median_case("silent-gap-large", [0.4, 0.5], "s"),
        report.Case("committed-1.5", 99.87, "%"),
    ]
    file = tmp_path / "gaps.svg"
    plot.draw({"cores": 2}, gaps, str(file))
    assert "killed, digits" in (text := file.read_text()) and "stopped, 100 MB" in text
    assert "99.9 % with a death in 1.5 steps" in text
    with pytest.raises(report.BenchError, match="no case"):
        plot.draw({"cores": 2}, [report.Case("bits", 100.0, "%")], str(file))
