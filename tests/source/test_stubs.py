"""Each compiled module has a stub that names all the module offers, without docstrings."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.optional import why_missing
from support.places import SOURCE, files, module_of

COMPILED = [path for path in files("src") if path.suffix == ".pyx"]
#: Built only where libibverbs' headers are installed.
WHERE_HEADERS_ARE = SOURCE / "transports" / "rdma"
#: Prints functions, classes and the classes' attributes of each given module that was built.
_OFFERS = """
import importlib, importlib.util, json, sys

offers = {}
for name in filter(importlib.util.find_spec, sys.argv[1:]):
    here = importlib.import_module(name)
    own = {
        n: v
        for n, v in vars(here).items()
        if not n.startswith("_") and getattr(v, "__module__", None) == name
    }
    offers[name] = {
        n: [a for a in vars(v) if not a.startswith("_")] if isinstance(v, type) else None
        for n, v in own.items()
    }
print(json.dumps(offers))
"""


def framework_of(path: Path) -> str:
    """Return the framework that a module imports, or an empty string."""
    package = path.relative_to(SOURCE).parts[0]
    return package if package in ("torch", "tensorflow", "mxnet") else ""


@functools.cache
def offers(framework: str) -> dict[str, dict[str, list[str] | None]]:
    """Return what the modules of one framework offer; a separate process imports them."""
    names = [module_of(path) for path in COMPILED if framework_of(path) == framework]
    done = subprocess.run(
        [sys.executable, "-c", _OFFERS, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, list[str] | None]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.name)
def test_every_compiled_module_has_a_stub_that_names_all_it_offers(path: Path) -> None:
    stub, framework = path.with_suffix(".pyi"), framework_of(path)
    assert stub.exists(), f"{path.name} has no stub"
    if framework and (reason := why_missing(framework)):
        pytest.skip(reason)
    module = offers(framework).get(module_of(path))
    if module is None and path.parent == WHERE_HEADERS_ARE:
        pytest.skip("built without libibverbs")
    assert module is not None, f"{path.name} was not built"
    tree = ast.parse(stub.read_text())
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    named = set(classes) | {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert set(module) == named, f"{path.name}: {set(module) ^ named}"
    for name, node in classes.items():
        functions = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        targets = [
            target
            for n in node.body
            if isinstance(n, (ast.AnnAssign, ast.Assign))  # fields, and members of an enum
            for target in ([n.target] if isinstance(n, ast.AnnAssign) else n.targets)
        ]
        fields = {target.id for target in targets if isinstance(target, ast.Name)}
        told = {n for n in functions if not n.startswith("_")} | fields
        assert set(module[name] or ()) == told, (
            f"{path.name}: {name}: {set(module[name] or ()) ^ told}"
        )


@pytest.mark.parametrize("path", files("src", endings=(".pyi",)), ids=lambda path: path.name)
def test_docstrings_are_in_the_module_and_not_in_its_stub(path: Path) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    explained = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    ]
    assert not explained, [getattr(node, "name", "module") for node in explained]


def test_the_package_is_marked_as_typed() -> None:
    assert (SOURCE / "py.typed").exists()
