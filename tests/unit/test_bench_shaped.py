"""The bounds to which ``bench shaped`` compares its times, and what its picture says."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.scaling")


@pytest.mark.parametrize(("spare", "seconds"), [(0, 1.2), (1, 24 / 18 * 0.8), (2, 0.96), (4, 0.8)])
def test_the_optimal_time_falls_with_spare_machines(
    scaling: Any, spare: int, seconds: float
) -> None:
    """The optimal time for 100 MB at 1 Gbit/s falls with the number of spare machines.

    Without spare machines it is a ring's; with as many as workers it is the time to send all bytes
    once.
    """
    assert scaling.optimum(
        4, spare, 100_000_000, scaling.bytes_per_second("1gbit")
    ) == pytest.approx(seconds)


def test_rates_become_bytes_per_second(scaling: Any) -> None:
    assert [scaling.bytes_per_second(rate) for rate in ("8kbit", "200mbit", "1.6gbit")] == [
        1e3,
        25e6,
        2e8,
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rate": "fast"}, "--rate 'fast': expected"),
        ({"rate": "0mbit"}, "--rate '0mbit'"),
        ({"spare": "0,5"}, "--spare '5': expected 0 to 4"),
        ({"spare": "-1"}, "--spare '-1'"),
        ({"ways": "defaults,best"}, "--ways 'best': expected some of defaults, by-hand, untuned"),
        ({"ways": "untuned"}, "--ways: defaults must be among them"),
    ],
)
def test_wrong_arguments_are_named(scaling: Any, given: dict[str, str], text: str) -> None:
    from bench.report import BenchError

    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args([f"--{key}={value}" for key, value in given.items()])
    with pytest.raises(BenchError, match=text):
        scaling.run(options)


def cases(scaling: Any, spares: list[int]) -> list[Any]:
    """Cases on links of 500 Mbit/s: the defaults at the optimum, untuned at 1.3, gloo at 3 s."""
    found = []
    for k in spares:
        best = scaling.optimum(4, k, 100_000_000, 62.5e6)
        division = scaling.Division(best)
        division.seconds |= {"defaults": [best] * 3, "untuned": [1.3 * best] * 3}
        division.seconds |= {"by-hand": [best] * 3, "gloo": [3.0] * 3}
        found += scaling._cases(k, division, scaling.Plan("500mbit", "shm", "reno", 1))
    return found


def test_all_ways_are_reported_against_the_optimum(scaling: Any) -> None:
    found = {case.case: case for case in cases(scaling, [4])}
    assert list(found) == ["defaults-k4", "by-hand-k4", "untuned-k4", "gloo-k4"]
    assert [found[f"{way}-k4"].ratio for way in ("defaults", "untuned")] == [1, pytest.approx(1.3)]
    assert (found["gloo-k4"].value, found["gloo-k4"].peer) == (3, found["defaults-k4"].value)
    assert "BYTEPS_PARTITION_BYTES=131072;" in found["by-hand-k4"].note
    assert "no options;" in found["defaults-k4"].note


def test_the_picture_states_the_result_and_what_not_tuned_means(
    scaling: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("bench.scaling.plot")
    plot.draw({"cores": 2, "date": "2026-11-24"}, cases(scaling, [0, 4]), str(tmp_path / "a.svg"))
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for text in (
        "With 4 spare machines bpsx takes 0.53 of gloo's time, 0.69 if not tuned",
        "Not tuned: BYTEPS_ENABLE_MIXED_MODE=0 BPSX_AUTOTUNE=0.",
        "on links of 500 Mbit/s.",
        "bpsx, defaults, 1.60 s",
        "bpsx, not tuned, 2.08 s",
        "gloo's ring, 3.00 s",
        "the links' limit, 1.60 s",
        "medians of 3 calls in turn; machines imitated on 2 cores, 2026-11-24",
    ):
        assert text in drawn, text


def test_cases_of_another_benchmark_are_not_drawn(scaling: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, plot = (importlib.import_module(f"bench.{name}") for name in ("report", "scaling.plot"))
    with pytest.raises(report.BenchError, match="no case defaults-k"):
        plot.draw({"cores": 2}, [report.Case("rate", 1.0, "GB/s")], str(tmp_path / "a.svg"))
