"""Paths of the sources, for the tests of the repository's rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "bpsx"


def files(*folders: str, endings: tuple[str, ...] = (".py", ".pyx", ".pxd")) -> list[Path]:
    """Return all source files below ``folders`` of the repository."""
    return sorted(
        p
        for f in folders
        for p in (ROOT / f).rglob("*")
        if p.suffix in endings and "__pycache__" not in p.parts
    )


def module_of(path: Path) -> str:
    """Return the dotted module name of a file below src."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of bpsx that a file imports or cimports, anywhere in it."""
    read = _python_imports if path.suffix == ".py" else _cython_imports
    return (name for name in read(path) if name.split(".")[0] == "bpsx")


def _python_imports(path: Path) -> Iterator[str]:
    package = module_of(path.parent / "__init__.py").split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(above + ([node.module] if node.module else []))
            yield from {
                _module_in(module, a.name) if node.module else f"{module}.{a.name}"
                for a in node.names
            }
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


def _cython_imports(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        head = re.match(r"\s*(?:from\s+([\w.]+)\s+)?c?import\s+(.*)", line.split("#")[0])
        if head:
            names = [n.split()[0] for n in head[2].strip("( ").split(",") if n.strip()]
            yield from {_module_in(head[1], n) for n in names or [""]} if head[1] else names


def _module_in(package: str, name: str) -> str:
    """Return the module that `from package import name` imports: a module of the package, or the
    package itself.
    """
    place = ROOT / "src" / package.replace(".", "/") / name
    found = name and (
        package == "bpsx"
        or place.is_dir()
        or any(place.with_suffix(s).exists() for s in (".py", ".pyx", ".pxd"))
    )
    return f"{package}.{name}" if found else package
