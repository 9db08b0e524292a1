"""Where the sources are, for the house rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "bpsx"


def files(*folders: str, endings: tuple[str, ...] = (".py", ".pyx", ".pxd")) -> list[Path]:
    """All source files below ``folders`` of the repository."""
    return sorted(p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in endings and "__pycache__" not in p.parts)


def module_of(path: Path) -> str:
    """Dotted name of a file below src."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Modules of bpsx that a file imports or cimports, anywhere in it."""
    text = path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bpsx":
                # `from bpsx import api` imports a module, `from bpsx.api import x` a name
                yield from ([f"bpsx.{a.name}" for a in node.names] if node.module == "bpsx" else [node.module])
            elif isinstance(node, ast.Import):
                yield from (a.name for a in node.names if a.name.split(".")[0] == "bpsx")
        return
    for line in text.splitlines():
        words = line.split()
        if len(words) > 3 and words[0] == "from" and words[1].startswith("bpsx") and words[2] in ("import", "cimport"):
            yield f"bpsx.{words[3]}" if words[1] == "bpsx" else words[1]
