"""The benchmarks' report: fields of the JSON object, ratios, targets, the table.

Nothing is measured here.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEYS = ["case", "value", "unit", "peer", "ratio", "target", "samples"]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.report")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.machine")


def test_json_is_one_object_with_the_agreed_keys(report: ModuleType) -> None:
    cases = [
        report.median_case("rate", [1.0, 3.0, 2.0], "GB/s", peer=4.0, target=">= 0.70", note="n"),
        report.Case("wall", 9.0, "GB/s"),
    ]
    text = report.as_json("push_pull", {"cores": 2}, cases)
    assert "\n" not in text
    shown = json.loads(text)
    assert list(shown) == ["bench", "machine", "cases"]
    assert (shown["bench"], shown["machine"]) == ("push_pull", {"cores": 2})
    assert [list(c) for c in shown["cases"]] == [KEYS, KEYS]
    assert shown["cases"][0] == {
        "case": "rate",
        "value": 2.0,
        "unit": "GB/s",
        "peer": 4.0,
        "ratio": 0.5,
        "target": ">= 0.70",
        "samples": [1.0, 3.0, 2.0],
    }
    assert shown["cases"][1] == {
        "case": "wall",
        "value": 9.0,
        "unit": "GB/s",
        "peer": None,
        "ratio": None,
        "target": None,
        "samples": [],
    }


def test_a_printed_report_can_be_read(report: ModuleType, tmp_path: Path) -> None:
    cases = [report.Case("rate", 2.0, "GB/s", 4.0, ">= 0.70", [1.0, 3.0]), report.Case("b", 1, "s")]
    (tmp_path / "a.json").write_text(report.as_json("push_pull", {"cores": 2}, cases))
    about, again = report.read(str(tmp_path / "a.json"), "push_pull")
    assert about == {"cores": 2} and [c.as_dict() for c in again] == [c.as_dict() for c in cases]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "a.json: No such file"),
        ("case  value", "a.json is not the output of bench shaped --json"),
        ("[]", "a.json is not the output of bench shaped --json"),
        ('{"bench": "sum", "machine": {}, "cases": []}', "figures of bench sum, not of shaped"),
        ('{"bench": "shaped", "machine": {}, "cases": [{}]}', "is not the output.*'case'"),
    ],
)
def test_an_unreadable_file_is_named(
    report: ModuleType, tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(report.BenchError, match=said):
        report.read(str(tmp_path / "a.json"), "shaped")


def test_ratio_is_value_over_peer(report: ModuleType) -> None:
    assert report.Case("c", 3.0, "ms", peer=1.5).ratio == 2.0
    assert report.Case("c", 3.0, "ms").ratio is None
    assert report.Case("c", 3.0, "ms", peer=0.0).ratio is None


@pytest.mark.parametrize(
    ("value", "peer", "target", "met"),
    [
        (0.7, 1.0, ">= 0.70", True),
        (0.69, 1.0, ">= 0.70", False),
        (1.0, 10.0, "<= 0.10", True),
        (1.1, 10.0, "<= 0.10", False),
        (1.0, 1.0, "< 1", False),
        (2.0, 1.0, "> 1", True),
        (1.9, None, "<= 2", True),  # without a peer the target applies to the value itself
        (2.1, None, "<= 2", False),
        (5.0, 1.0, None, None),
    ],
)
def test_target_is_about_the_ratio(
    report: ModuleType, value: float, peer: float | None, target: str | None, met: bool | None
) -> None:
    assert report.Case("c", value, "x", peer=peer, target=target).met is met


def test_median_is_not_moved_by_one_bad_sample(report: ModuleType) -> None:
    assert report.median_case("c", [1.0, 1.0, 500.0], "us").value == 1.0


def test_a_value_that_is_no_number_is_refused(report: ModuleType) -> None:
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(report.BenchError, match="rate"):
            report.Case("rate", wrong, "GB/s")
        with pytest.raises(report.BenchError, match="rate"):
            report.Case("rate", 1.0, "GB/s", samples=(1.0, wrong))


def test_a_target_that_cannot_be_compared_is_refused(report: ModuleType) -> None:
    with pytest.raises(report.BenchError, match="about 1"):
        report.Case("c", 1.0, "x", target="about 1")


def test_table_has_a_line_per_case_and_says_whether_targets_are_met(report: ModuleType) -> None:
    cases = [
        report.Case("good", 2.0, "x", peer=1.0, target=">= 1"),
        report.Case("bad", 1.0, "x", peer=2.0, target=">= 1"),
        report.Case("bare", 1.0, "x", note="why"),
    ]
    lines = report.as_table("b", {"cores": 2, "torch": None}, cases).splitlines()
    assert lines[0] == "bench b: cores 2"
    assert [line.split()[0] for line in lines[-3:]] == ["good", "bad", "bare"]
    assert "yes" in lines[-3].split() and "no" in lines[-2].split() and lines[-1].endswith("why")


def test_machine_describes_the_conditions_of_a_figure(machine: ModuleType) -> None:
    about = machine.describe()
    assert list(about) == [
        "cores",
        "cpu",
        "kernel",
        "python",
        "bpsx",
        "numpy",
        "numba",
        "pyzmq",
        "torch",
        "load",
    ]
    assert about["cores"] >= 1 and about["numpy"]
    json.dumps(about)


def test_the_kernel_knows_this_process(machine: ModuleType) -> None:
    assert machine.cpu_seconds(os.getpid()) > 0
    assert machine.rss_bytes(os.getpid()) > 1 << 20
    with pytest.raises(OSError):
        machine.rss_bytes(2**22 + 1)


def test_benchmarks_are_listed_without_any_framework() -> None:
    """Listing or running benchmarks loads all their modules, so none may import a framework."""
    script = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('torch', 'tensorflow', 'mxnet'))\n"
        "from bench.__main__ import main\n"
        "sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"push_pull", "torch", "tensorflow"} <= {x.split()[0] for x in done.stdout.splitlines()}
