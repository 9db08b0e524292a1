"""``bench install``: seconds of each step of ``make demo``, and the size of its environment.

It works on a copy of this checkout, so that everything is built anew. pip downloads what its cache
lacks: a second run shows what the network costs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.jobs import ROOT, progress
from bench.report import BenchError, Case
from bpsx.config import child_environment

_SECONDS = 1800.0
#: Name of each step, its make target and its note.
_STEPS = (
    ("packages", ".venv/environment", "make an environment with the demo's packages and torch"),
    ("compile", "build", "compile bpsx and install it there"),
    ("demo", "demo", "train on the digits with two workers"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", default=sys.executable, help="Python to use (default: the one that runs this)"
    )
    parser.add_argument(
        "--torch", help="requirement given to pip for torch (default: the Makefile's)"
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case for each step and one for the size. Raises :class:`BenchError` on failure."""
    python = shutil.which(options.python)
    if python is None:
        raise BenchError(f"--python {options.python}: command not found")
    words = [f"PYTHON={python}", *([f"TORCH={options.torch}"] if options.torch else [])]
    with tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=_not_needed)
        cases = [
            Case(name, _seconds(tree, [*words, target]), "s", note=note)
            for name, target, note in _STEPS
        ]
        cases.append(Case("size", _bytes(tree / ".venv") / 1e9, "GB", note="size of .venv on disk"))
    return cases


def _not_needed(folder: str, names: list[str]) -> set[str]:
    """Return the names that the copy leaves out: build results and git's history."""
    made = {".venv", "build", ".git"} if Path(folder) == ROOT else set()
    return made | {name for name in names if name == "__pycache__" or name.startswith(".pytest")}


def _seconds(tree: Path, words: list[str]) -> float:
    progress(f"make {' '.join(words)}")
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            ["make", *words],
            cwd=tree,
            env=child_environment(),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"make {words[-1]} did not finish within {_SECONDS:g} s") from None
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-10:])
        raise BenchError(f"make {words[-1]} failed with status {done.returncode}:\n{end}")
    return time.perf_counter() - begin


def _bytes(folder: Path) -> int:
    """Return the bytes of all files below ``folder``, each file counted once."""
    found = (p.lstat() for p in folder.rglob("*") if not p.is_symlink() and p.is_file())
    return sum({(s.st_dev, s.st_ino): s.st_size for s in found}.values())
