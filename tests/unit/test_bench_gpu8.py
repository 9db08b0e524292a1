"""Plan and report of ``bench gpu8``, without measurements."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # run() sets it
    return importlib.import_module("bench.gpu8")


def test_choices_are_those_of_the_paper_on_four_gpus(bench: ModuleType) -> None:
    none = {"BYTEPS_REDUCE_ROOTS": None, "BYTEPS_PCIE_SWITCH_SIZE": None}
    found = bench.choices(4)
    assert found["default"] == none
    assert {n: v["BYTEPS_REDUCE_ROOTS"] for n, v in found.items() if v["BYTEPS_REDUCE_ROOTS"]} == {
        "all": "0,1,2,3",
        "0": "0",
        "2,3": "2,3",
        "2": "2",
    }
    sizes = {n: v["BYTEPS_PCIE_SWITCH_SIZE"] for n, v in found.items()}
    assert {n: v for n, v in sizes.items() if v} == {"switch4": "4", "switch2": "2"}
    assert set(bench.choices(8)) - set(found) == {"switch8", "4,5", "4"}
    # A machine of two GPUs has no local ranks 1 and 2.
    assert set(bench.choices(2)) == {"default", "all", "0", "1", "switch2"}


def test_each_machine_has_gpus_of_its_own(bench: ModuleType) -> None:
    own = bench.gpu.own(2, 4, None, 2)
    assert [v["CUDA_VISIBLE_DEVICES"] for v in own.values()] == ["0,1", "0,1", "2,3", "2,3"]
    assert [v["NCCL_HOSTID"] for v in own.values()] == ["machine0"] * 2 + ["machine1"] * 2
    own = bench.gpu.own(2, 2, "5,7")
    assert [v["CUDA_VISIBLE_DEVICES"] for v in own.values()] == ["5", "7"]


def test_the_default_is_compared_with_the_best_other_choice(bench: ModuleType) -> None:
    seconds = {
        ("vgg16", "default"): [0.2, 0.3, 0.25],
        ("vgg16", "ddp"): [0.5],
        ("vgg16", "all"): [0.24],
        ("vgg16", "0"): [0.4],
    }
    cases = {c.case: c for c in bench.roots_cases("1x4", seconds)}
    assert cases["roots-1x4-vgg16-default"].ratio == pytest.approx(0.5)
    best = cases["roots-1x4-vgg16-best"]
    assert (best.value, best.peer, best.met) == (250, 240, False) and "all" in best.note
    assert [c.case for c in bench.roots_cases("1x2", {("tiny", "ddp"): [1.0]})] == []


def test_machines_for_which_no_time_is_left_are_named(bench: ModuleType) -> None:
    late = bench.Setup("cpu", 4, ["tiny"], quick=True, end=0.0)
    with pytest.raises(bench.BenchError, match="no time was left for 1x4"):
        list(bench.roots(late))


def test_links_end_in_time(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement begins only if the longest one so far would fit into the time that is left."""
    now = [0.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])

    def measure(setup: Any) -> Iterator[Any]:
        now[0] += 100
        yield bench.Case("links", 1.0, "ms", note=str(setup.networks))

    monkeypatch.setattr(bench.gpu, "links", measure)
    found = bench.links(bench.Setup("cuda", 4, ["bert-large", "gpt2"], quick=True, end=250.0))
    assert [next(found).note, next(found).note] == ["['bert-large']"] * 2
    with pytest.raises(bench.BenchError, match="no time was left for bert-large, 25gbit, k=0"):
        next(found)


def test_costs_are_per_byte_of_a_workers_tensors(bench: ModuleType) -> None:
    found = {
        "bpsx": {"workers": 3.0, "servers": 1.0, "pcie_in": 5e8},
        "ddp": {"workers": 2.0, "servers": 0.0, "pcie_in": 1e8},
    }
    cpu, pcie = bench.cost_cases("1x4", found, 1_000_000_000, 4, "4 GPUs")
    assert (cpu.value, cpu.peer, cpu.unit) == (1.0, 0.5, "s/GB")
    assert (pcie.case, pcie.value, pcie.peer) == ("pcie-1x4-in", 0.5, pytest.approx(0.1))


def _options(**given: Any) -> argparse.Namespace:
    usual = {
        "only": "one,roots",
        "device": "cpu",
        "gpus": None,
        "networks": "tiny",
        "minutes": 1.0,
        "save": None,
        "quick": True,
    }
    return argparse.Namespace(**{**usual, **given})


def test_a_part_that_fails_is_a_case_and_the_others_go_on(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(setup: Any) -> Iterator[Any]:
        yield bench.Case("before", 1.0, "ms")
        raise bench.BenchError("no GPU answers")

    def works(setup: Any) -> Iterator[Any]:
        yield bench.Case("after", 2.0, "ms")

    monkeypatch.setattr(bench, "PARTS", {"one": fails, "roots": works})
    saved = tmp_path / "found.json"
    cases = bench.run(_options(save=str(saved)))
    assert [c.case for c in cases] == ["before", "one-failed", "after"]
    assert cases[1].note == "no GPU answers" and cases[1].met is False
    assert [c["case"] for c in json.loads(saved.read_text())["cases"]] == [c.case for c in cases]


def test_each_part_gets_its_share_of_the_minutes(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(bench.time, "monotonic", lambda: now)
    ends: dict[str, float] = {}
    parts = {
        name: lambda setup, name=name: iter([] if ends.setdefault(name, setup.end) else [])
        for name in bench.PARTS
    }
    monkeypatch.setattr(bench, "PARTS", parts)
    bench.run(_options(only="tests,one,roots,links", minutes=10.0))
    assert sum(end - now for end in ends.values()) == pytest.approx(600)
    ends.clear()
    bench.run(_options(only="links", minutes=10.0))
    assert ends == {"links": now + 600}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": "one,wifi"}, "--only: unknown: wifi; expected tests, one, roots, links"),
        ({"networks": "alexnet"}, "--networks: unknown: alexnet"),
    ],
)
def test_wrong_options_are_named(bench: ModuleType, given: dict[str, Any], said: str) -> None:
    with pytest.raises(bench.BenchError, match=said):
        bench.run(_options(**given))
