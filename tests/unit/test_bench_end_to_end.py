"""Report and output of ``bench compress --end-to-end``, without measurements.

One test runs a few real steps.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAYS = ["alone", "float32", "bfloat16", "topk", "randomk"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.end_to_end")


def run(bench: ModuleType, step: float, scores: list[float]) -> Any:
    return bench.Run(
        [step, step, 10.0], 2e6, scores, [10 * step * (i + 1) for i in range(len(scores))]
    )


def runs(bench: ModuleType, topk: float = 0.1) -> Any:
    good = [0.9, 0.96, 0.94]
    ways = {
        "alone": run(bench, 0.05, good),
        "float32": run(bench, 0.5, good),
        "bfloat16": run(bench, 0.2, good),
        "topk": run(bench, topk, [0.8, 0.9, 0.95]),
        "randomk": run(bench, 0.01, [0.8, 0.9, 0.94]),
    }
    return dict.fromkeys(bench.LINKS, ways)


def test_the_report_has_a_case_for_each_link_and_way(bench: ModuleType) -> None:
    cases = {c.case: c for c in bench.report(runs(bench))}
    expected = [f"step-{link}-{way}" for link in bench.LINKS for way in WAYS] + [
        f"{what}-{way}" for what in ("wire", "accuracy") for way in WAYS[1:]
    ]
    expected += [f"until-{link}-{way}" for link in bench.LINKS for way in WAYS[1:4]]
    assert list(cases) == expected, "randomk never gets there"
    step, accuracy, until = (
        cases["step-1gbit-topk"],
        cases["accuracy-topk"],
        cases["until-1gbit-topk"],
    )
    assert (step.value, step.unit, step.ratio) == (
        100,
        "ms",
        0.2,
    ) and "0.50 of bfloat16" in step.note
    assert (accuracy.value, accuracy.peer, accuracy.samples) == (
        95,
        94,
        [80, 90, 95],
    ) and accuracy.note == "after 3 epochs; 95% after 3"
    assert (until.value, until.peer) == (pytest.approx(3), 10) and cases[
        "accuracy-randomk"
    ].note.endswith("never 95%")
    assert cases["wire-topk"].value == 2


def test_the_verdict_says_on_which_links_compression_pays(bench: ModuleType) -> None:
    pays = "10gbit: pays, against the better of float32 and bfloat16: topk (0.75 of the time)"
    assert bench.verdict(runs(bench))[:2] == [
        pays,
        "10gbit: does not pay, against the better of float32 and bfloat16: randomk (never 95%)",
    ]
    lines = bench.verdict(runs(bench, topk=0.15))
    assert (
        len(lines) == len(bench.LINKS)
        and "does not pay" in lines[0]
        and "topk (1.12 of the time), randomk (never 95%)" in lines[0]
    )


def test_nothing_is_said_after_too_little_training(bench: ModuleType) -> None:
    short = dict.fromkeys(bench.LINKS, {way: run(bench, 0.1, [0.5]) for way in WAYS})
    assert [line[:10] for line in bench.verdict(short)] == ["too little"]
    assert not [c for c in bench.report(short) if c.case.startswith("until")]


def test_links_must_not_change_what_is_learnt(bench: ModuleType) -> None:
    bench._check(found := runs(bench))
    found["200mbit"] = {**found["200mbit"], "topk": run(bench, 0.1, [0.8, 0.9, 0.951])}
    with pytest.raises(bench.BenchError, match="topk: the accuracy depends on the link"):
        bench._check(found)


def test_an_unknown_compressor_is_named(bench: ModuleType) -> None:
    with pytest.raises(bench.BenchError, match="'zip'.*onebit, topk"):
        bench.cases("zip", quick=True)


def test_what_is_missing_for_a_plot_is_said_before_anything_is_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress = importlib.import_module("bench.compress")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "bench.end_to_end_plot", raising=False)
    monkeypatch.setattr(bench, "cases", None)
    with pytest.raises(bench.BenchError, match=r"pip install 'bpsx\[plot\]'"):
        compress.run(argparse.Namespace(end_to_end=True, plot="x.svg", only="", quick=True))
    with pytest.raises(bench.BenchError, match="--end-to-end"):
        compress.run(argparse.Namespace(end_to_end=False, plot="x.svg", only="", quick=True))


def test_a_plot_is_drawn(bench: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("bench.end_to_end_plot")
    plot.draw(runs(bench), str(tmp_path / "a.svg"))
    assert "200 Mbit/s" in (tmp_path / "a.svg").read_text()
    with pytest.raises(bench.BenchError, match=r"a\.xyz"):
        plot.draw(runs(bench), str(tmp_path / "a.xyz"))
