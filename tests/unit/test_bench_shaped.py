"""The bounds to which ``bench shaped`` compares its times."""

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
        ({"rate": "fast"}, "--rate 'fast': allowed"),
        ({"rate": "0mbit"}, "--rate '0mbit'"),
        ({"spare": "0,5"}, "--spare '5': allowed are 0 to 4"),
        ({"spare": "-1"}, "--spare '-1'"),
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
