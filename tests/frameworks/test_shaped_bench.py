"""``python -m bench shaped`` on emulated machines runs, and cleans up however it ends."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _needs_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    if reason := importlib.import_module("bench.network").why_not():
        pytest.skip(reason)


def start(*words: str) -> subprocess.Popen[str]:
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("DMLC_", "BYTEPS_"))
    }
    return subprocess.Popen(
        [sys.executable, "-m", "bench", "shaped", "--quick", *words],
        cwd=ROOT,
        env=clean,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def left_by(pid: int) -> list[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in listed.splitlines() if line.startswith(f"bpsx-{pid}-")]


def test_it_runs_reports_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "shaped.svg"
    bench = start("--rate", "1gbit", "--spare", "1", "--json", "--plot", str(picture))
    out, told = bench.communicate(timeout=280)
    assert bench.returncode == 0, told
    cases = {case["case"]: case for case in json.loads(out)["cases"]}
    assert set(cases) == {"defaults-k1", "by-hand-k1", "untuned-k1", "gloo-k1"}
    assert all(len(case["samples"]) == 2 for case in cases.values())
    # Only the token bucket's initial burst can be faster than the link.
    assert all(cases[f"{way}-k1"]["ratio"] > 0.95 for way in ("defaults", "by-hand", "untuned"))
    assert cases["gloo-k1"]["value"] > 1.1
    drawn = picture.read_text(encoding="utf-8")
    for label in ("bpsx, defaults", "bpsx, not tuned", "gloo's ring", "the links' limit"):
        assert f"{label}, " in drawn
    assert left_by(bench.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_benchmark_leaves_no_namespace(number: signal.Signals) -> None:
    bench = start("--rate", "10mbit", "--spare", "0", "--ways", "defaults")
    assert bench.stderr is not None
    for line in bench.stderr:
        if "first calls" in line:
            break
    assert left_by(bench.pid)
    bench.send_signal(number)
    bench.stderr.read()
    assert bench.wait(timeout=120) == 130 and left_by(bench.pid) == []
