"""The processes that run the tests import no framework but PyTorch; see tests/support/apart.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.places import ROOT

#: Modules that import TensorFlow or MXNet.
FOREIGN = ("tensorflow", "keras", "mxnet", "bpsx.tensorflow", "bpsx.keras", "bpsx.mxnet")
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def foreign(node: ast.stmt) -> Iterator[str]:
    """Return the modules of another framework that an import statement names."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return (name for name in names if any(f"{name}.".startswith(f"{f}.") for f in FOREIGN))


def run_in_pytest(node: ast.AST) -> bool:
    """Return whether pytest's own process runs a statement, not only workers."""
    if isinstance(node, ast.If):
        return not (isinstance(node.test, ast.Name) and node.test.id == "WORKER")
    if isinstance(node, ast.FunctionDef):
        fixture = any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
        return fixture or node.name.startswith("test_")
    return True


def found(tree: ast.AST) -> Iterator[str]:
    """Return the foreign modules that pytest's process would import."""
    for node in ast.iter_child_nodes(tree):
        if run_in_pytest(node):
            yield from foreign(node) if isinstance(node, ast.stmt) else ()
            yield from found(node)


def modules_of_pytest() -> list[Path]:
    """Return test modules, and the modules beside them that they import without a guard."""
    by_name = {path.stem: path for path in TESTS}
    todo, seen = [p for p in TESTS if p.name.startswith(("test_", "conftest"))], set[Path]()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.split(".")[-1], *(alias.name for alias in node.names)]
                todo += [by_name[n] for n in names if n in by_name]
    return sorted(seen)


@pytest.mark.parametrize("path", modules_of_pytest(), ids=lambda path: path.stem)
def test_pytest_does_not_import_tensorflow_or_mxnet(path: Path) -> None:
    names = sorted(set(found(ast.parse(path.read_text()))))
    assert not names, f"{path.name} imports {names}: do so under `if WORKER:` or in a job"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import keras", ["keras"]),
        ("def test_x():\n    import tensorflow.data", ["tensorflow.data"]),
        ("from bpsx import mxnet", ["bpsx.mxnet"]),
        (
            "@pytest.fixture\ndef job():\n    from bpsx.tensorflow import ops",
            ["bpsx.tensorflow", "bpsx.tensorflow.ops"],
        ),
        ("def job_x():\n    import tensorflow", []),
        ("if WORKER:\n    import tensorflow", []),
        ("import tensorflow_models, torch", []),
    ],
)
def test_the_rule_detects_a_violation(text: str, names: list[str]) -> None:
    assert list(found(ast.parse(text))) == names


def test_a_process_with_two_frameworks_is_noticed() -> None:
    """A process with two frameworks is noticed.

    The test uses modules with their names, because a real pair may crash.
    """
    source = (
        "import sys, types\nfrom support import apart\n"
        "sys.modules.update(torch=types.ModuleType('torch'))\napart.assert_only('torch')\n"
        "sys.modules.update(tensorflow=types.ModuleType('tensorflow'))\n"
        "apart.assert_only('torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT / "tests",
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert "this process has loaded tensorflow; it may have torch only" in done.stderr
