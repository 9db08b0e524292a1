"""The combination that CI runs besides its own: each has its turn, and what cannot be had is skipped."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import pytest

from source.places import ROOT

SCRIPT = ROOT / ".ci" / "combination"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("combination", str(SCRIPT))
    spec = importlib.util.spec_from_loader("combination", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "combination", module)     # dataclasses look there
    loader.exec_module(module)
    return module


def test_each_combination_has_its_turn(
        script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(script, "run", lambda combination, folder: ran.append(combination) or 0)
    for number in range(len(script.COMBINATIONS)):
        monkeypatch.setattr(sys, "argv", ["combination", str(number + 7)])
        assert script.main() == 0
    assert {c.name for c in ran} == {c.name for c in script.COMBINATIONS}


def test_an_interpreter_that_is_not_there_is_a_reason_to_skip(
        script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "COMBINATIONS", [script.Combination("the oldest", python="3.99")])
    monkeypatch.setattr(sys, "argv", ["combination", "0"])
    assert script.main() == 0
    assert "the oldest: skipped: no python3.99" in capfd.readouterr().out


def test_a_test_that_fails_fails_the_combination(
        script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """With a `make` that does nothing and a pytest that fails."""
    commands = []

    def ran(command: list[str], **_: object) -> object:
        commands.append(command)
        return type("Done", (), {"returncode": int("pytest" in command), "stdout": ""})

    monkeypatch.setattr(script.subprocess, "run", ran)
    monkeypatch.setattr(script, "copy", lambda *_: None)
    assert script.run(script.Combination("own"), tmp_path) == 1
    assert [c[-1] for c in commands if c[0] == "make"] == [".venv/environment", "demo", ".venv/tests"]


def test_the_few_tests_are_there(script: ModuleType) -> None:
    assert [name for name in script.FEW if not (ROOT / name).is_file()] == []
