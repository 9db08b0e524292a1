"""``bench far``: what its cases compare, and its options."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.far")


def test_the_best_setting_by_hand_is_the_peer(far: ModuleType) -> None:
    partitions = {f"{size} partitions": [70.0] for size in ("small", "middle", "large")}
    found = {"default": [90.0, 96.0], "small": [31.0], "system": [80.0], "ahead": [100.0, 60.0]}
    found |= partitions
    cases = {c.case: (c.value, c.peer, c.met) for c in far.report("1gbit-30", found)}
    assert cases == {"1gbit-30": (93.0, 80.0, True), "1gbit-30-small": (93.0, 31.0, None)}
    cases = {c.case: (c.peer, c.met) for c in far.report("x", {**found, "ahead": [100.0]})}
    assert cases["x"] == (100.0, False)
    cases = {c.case: c.peer for c in far.report("x", {**found, "middle partitions": [99.0]})}
    assert cases["x"] == 99.0


def test_a_wrong_round_trip_is_named(far: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    if why := importlib.import_module("bench.network").why_not():
        pytest.skip(why)
    main = importlib.import_module("bench.__main__").main
    assert main(["far", "--round-trips", "10,-1"]) == 1
    wanted = "--round-trips '10,-1': expected integers of ms from 0"
    assert re.search(re.escape(wanted), capfd.readouterr().err)
