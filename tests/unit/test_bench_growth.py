"""``bench growth``: what its cases compare, and its options."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.growth")


@pytest.mark.parametrize(("workers", "nbytes"), [(2, 1e8), (4, 1.5e8), (16, 1.875e8)])
def test_a_link_carries_all_that_is_not_summed_on_its_machine(
    growth: ModuleType, workers: int, nbytes: float
) -> None:
    assert growth.narrowest(workers) == pytest.approx(nbytes)


def test_times_are_compared_with_those_of_the_fewest_workers(growth: ModuleType) -> None:
    plan = growth.Plan("1gbit", "tcp", "reno", 1)
    found = {
        4: {"bpsx": [1.5, 1.5, 9.0], "gloo": [1.8]},  # 10 s/GB, as two workers
        2: {"bpsx": [1.0], "gloo": [1.1]},
        8: {"bpsx": [2.1], "gloo": [2.1]},
    }
    cases = {c.case: c for c in growth.report(plan, found)}
    assert list(cases) == ["growth-2", "gloo-2", "growth-4", "gloo-4", "growth-8", "gloo-8"]
    assert [cases[f"growth-{n}"].value for n in (2, 4, 8)] == pytest.approx([10.0, 10.0, 12.0])
    assert [cases[f"growth-{n}"].peer for n in (2, 4, 8)] == [None, 10.0, 10.0]
    assert [cases[f"growth-{n}"].met for n in (2, 4, 8)] == [None, True, False]
    assert cases["gloo-4"].value == pytest.approx(12.0)
    assert cases["gloo-4"].peer == cases["growth-4"].value
    assert "at least 8" in cases["growth-2"].note


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--workers", "2,1"], "--workers '2,1': expected numbers of workers from 2"),
        (["--rate", "fast"], "--rate 'fast': expected"),
    ],
)
def test_wrong_options_are_named(
    growth: ModuleType, capfd: pytest.CaptureFixture[str], given: list[str], wanted: str
) -> None:
    main = importlib.import_module("bench.__main__").main
    assert main(["growth", *given]) == 1
    assert re.search(re.escape(wanted), capfd.readouterr().err)
