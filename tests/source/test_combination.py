"""The combinations that CI runs besides its own, one after the other.

Unavailable ones are skipped.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.places import ROOT

SCRIPT = ROOT / ".ci" / "combination"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("combination", str(SCRIPT))
    spec = importlib.util.spec_from_loader("combination", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "combination", module)  # dataclasses look the module up there
    loader.exec_module(module)
    return module


def test_each_combination_has_its_turn(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(script, "run", lambda combination, folder: ran.append(combination) or 0)
    for number in range(len(script.COMBINATIONS)):
        monkeypatch.setattr(sys, "argv", ["combination", str(number + 7)])
        assert script.main() == 0
    assert {c.name for c in ran} == {c.name for c in script.COMBINATIONS}


def test_a_missing_interpreter_skips_the_test(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "COMBINATIONS", [script.Combination("the oldest", python="3.99")])
    monkeypatch.setattr(sys, "argv", ["combination", "0"])
    assert script.main() == 0
    assert "the oldest: skipped: no python3.99" in capfd.readouterr().out


def test_a_test_that_fails_fails_the_combination(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Uses a `make` that prints its arguments, and a pytest that fails."""
    (bin_ := tmp_path / "tree" / ".venv" / "bin").mkdir(parents=True)
    for program, text in (
        (tmp_path / "make", f'echo "$2" >> {tmp_path}/asked'),
        (bin_ / "python", "exit 1"),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(script, "copy", lambda *_: None)
    assert script.run(script.Combination("own"), tmp_path) == 1
    assert (tmp_path / "asked").read_text().split() == [".venv/environment", "demo", ".venv/tests"]


def test_a_step_that_takes_too_long_ends_with_all_it_started(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step that takes too long is ended with all processes that it has started.

    conftest looks for processes that are left.
    """
    (tmp_path / "tree").mkdir()
    (tmp_path / "make").write_text("#!/bin/sh\nsleep 100 & sleep 100\n")
    (tmp_path / "make").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(script, "copy", lambda *_: None)
    monkeypatch.setattr(script, "INSTALL", 0.5)
    with pytest.raises(script.Skipped, match="packages cannot be installed"):
        script.run(script.Combination("own"), tmp_path)


def test_the_selected_tests_exist(script: ModuleType) -> None:
    assert [name for name in script.FEW if not (ROOT / name).is_file()] == []
