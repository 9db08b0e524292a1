"""The table in tests/README.md covers each module, and all that it names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.places import ROOT, SOURCE, files

TESTS = ROOT / "tests"
TABLE = (TESTS / "README.md").read_text().partition("| subject |")[2].partition("\n\n")[0]
MODULES = [path.relative_to(SOURCE) for path in files("src", endings=(".py", ".pyx"))]


def rows(table: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (subjects, places) of each row; a row without a subject has those of the row above."""
    subjects: list[str] = []
    for line in table.splitlines()[2:]:
        first, *others = line.strip("|").split("|")
        subjects = re.findall("`([^`]+)`", first) or subjects
        yield subjects, re.findall("`([^`]+)`", " ".join(others))


def found(place: str) -> list[Path]:
    """Return the test files of a place in the table: a folder, or files without ``.py``."""
    folder = TESTS / place
    return sorted(folder.glob("test_*.py") if folder.is_dir() else TESTS.glob(f"{place}.py"))


def is_covered(module: Path, subjects: set[str]) -> bool:
    """Return whether a row of the table, or a test file's name, covers ``module``."""
    name = module.with_suffix("")
    above = {str(part) for part in (name, *name.parents)}
    named_after = f"test_{name.name.strip('_')}.py"
    return bool(above & subjects) or any(TESTS.glob(f"*/{named_after}"))


SUBJECTS = {subject for subjects, _ in rows(TABLE) for subject in subjects}
PLACES = sorted({place for _, places in rows(TABLE) for place in places})


# The top folder's __init__ only hands out the names of `api`.
@pytest.mark.parametrize("module", [m for m in MODULES if m != Path("__init__.py")], ids=str)
def test_each_module_has_a_row_or_a_test_of_its_name(module: Path) -> None:
    assert is_covered(module, SUBJECTS), f"add {module} to the table in tests/README.md"


@pytest.mark.parametrize("subject", sorted(SUBJECTS))
def test_each_subject_of_the_table_is_there(subject: str) -> None:
    assert list(SOURCE.glob(f"{subject}*")) or (ROOT / subject).is_dir()


@pytest.mark.parametrize("place", PLACES)
def test_each_place_of_the_table_has_tests(place: str) -> None:
    assert found(place), f"tests/README.md: no tests at {place}"


def test_a_module_without_a_row_is_noticed() -> None:
    assert not is_covered(Path("novel/thing.py"), {"api"})
    assert is_covered(Path("novel/thing.py"), {"novel"})
    assert is_covered(Path("novel/_topology.pyx"), {"api"}), "unit/test_topology.py has its name"
    assert list(rows(" a | b |\n|---|---|\n| `x` | `u` |\n| | `v`, `w` |")) == [
        (["x"], ["u"]),
        (["x"], ["v", "w"]),
    ]
    assert not found("unit/test_nothing_of_the_kind")
