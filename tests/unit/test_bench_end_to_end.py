"""Report and output of ``bench compress --end-to-end``, without measurements.

One test runs a few real steps.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture
def main(bench: ModuleType) -> Iterator[Callable[[list[str]], int]]:
    """The command line, which turns SIGTERM into KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("bench.__main__").main
    signal.signal(signal.SIGTERM, before)


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


def test_there_is_no_verdict_after_too_little_training(bench: ModuleType) -> None:
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


def test_a_package_missing_for_a_plot_is_reported_before_measuring(
    bench: ModuleType,
    main: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("end_to_end_plot", "pictures"):
        monkeypatch.delitem(sys.modules, f"bench.{name}", raising=False)
        monkeypatch.delattr(importlib.import_module("bench"), name, raising=False)
    monkeypatch.setattr(bench, "cases", None)
    assert main(["compress", "--end-to-end", "--plot", "x.svg"]) == 1
    assert "pip install 'bpsx[plot]'" in capsys.readouterr().err
    assert main(["compress", "--plot", "x.svg"]) == 1
    assert "--plot goes with --end-to-end" in capsys.readouterr().err


def test_a_plot_is_drawn(bench: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("bench.end_to_end_plot")
    about, cases = {"cores": 2, "date": "2026-11-22"}, bench.report(runs(bench))
    plot.draw(about, cases, str(tmp_path / "a.svg"))
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for text in (
        "With compression a step takes 0.02 to 0.20 of float32's time at 200 Mbit/s",
        "topk (2.0 MB)",
        "500",  # float32's step in milliseconds
        "never",  # randomk does not reach the accuracy
        "94.0 % at last",
        "python -m bench compress --end-to-end, 2 cores, 2026-11-22",
    ):
        assert text in drawn, text
    with pytest.raises(bench.BenchError, match=r"a\.xyz"):
        plot.draw(about, cases, str(tmp_path / "a.xyz"))
    with pytest.raises(bench.BenchError, match="no case step-"):
        plot.draw(about, cases[-1:], str(tmp_path / "a.svg"))


def test_printed_figures_can_be_drawn_again(
    bench: ModuleType,
    main: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The picture of a run, and that of the JSON object that it printed, are the same bytes."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "cases", lambda only, quick: bench.report(runs(bench)))
    words = ["compress", "--end-to-end", "--json", "--plot"]
    assert main([*words, str(tmp_path / "a.svg")]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "a.json").write_text(printed)
    monkeypatch.setattr(bench, "cases", None)
    assert main([*words, str(tmp_path / "b.svg"), "--redraw", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
