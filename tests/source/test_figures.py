"""Figures are the same everywhere: docs/compare/figures.md repeats those of other pages.

README.md and docs/compare/libraries.md repeat some of that page's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.places import ROOT

PAGE = ROOT / "docs" / "compare" / "figures.md"
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w]|\.\d)")


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables, without heads."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def numbers(cells: list[str]) -> set[str]:
    """Return the numbers in cells, without those in links."""
    return set(_NUMBER.findall(_LINK.sub("", " | ".join(cells))))


def units(path: Path) -> list[set[str]]:
    """Return the numbers of each paragraph and each row of a page, or of a whole picture."""
    text = path.read_text()
    if path.suffix != ".md":
        return [set(_NUMBER.findall(text))]
    blocks = text.split("\n\n")
    parts = [part for b in blocks for part in (b.splitlines() if b.startswith("|") else [b])]
    return [set(_NUMBER.findall(part)) for part in parts]


def claims() -> Iterator[tuple[str, set[str], list[Path]]]:
    """Yield what each row or paragraph with figures says, its numbers and the pages it names.

    A table without links is from the page that the text before it names.
    """
    pages: list[Path] = []
    for block in PAGE.read_text().split("\n\n"):
        if not block.startswith("|"):
            pages = [(PAGE.parent / link).resolve() for link in _LINK.findall(block)] or pages
            if "took" in block:
                yield block, numbers([block.partition("took")[2]]), pages
            continue
        for cells in rows(block + "\n"):
            own = [(PAGE.parent / link).resolve() for link in _LINK.findall(cells[-1])]
            figures = cells[1:-1] if own else cells[1:]
            yield cells[0], numbers(figures), own or pages


CLAIMS = list(claims())
OF_PAGE = set().union(*(found for _, found, _ in CLAIMS))


@pytest.mark.parametrize(
    ("said", "found", "pages"), CLAIMS, ids=[said.split("\n")[0] for said, _, _ in CLAIMS]
)
def test_figures_stand_on_the_page_that_is_named(
    said: str, found: set[str], pages: list[Path]
) -> None:
    assert found, said
    assert any(found <= unit for page in pages for unit in units(page)), (
        f"{said}: no row or paragraph of {[str(p.relative_to(ROOT)) for p in pages]} has all of "
        f"{sorted(found)}"
    )


def test_a_wrong_figure_is_found() -> None:
    page = ROOT / "docs" / "train" / "gpus.md"
    right, wrong = numbers(["1199 ms", "DDP 1803", "0.67"]), numbers(["1198 ms", "1803", "0.67"])
    assert any(right <= unit for unit in units(page))
    assert not any(wrong <= unit for unit in units(page))


def test_the_readme_and_the_page_have_the_same_figures() -> None:
    figures = (ROOT / "README.md").read_text().partition("## Figures")[2].partition("\n## ")[0]
    sections = [numbers([text]) for text in PAGE.read_text().split("\n## ")]
    in_rows = [numbers(cells) for cells in rows(PAGE.read_text())]
    assert len(list(rows(figures))) >= 5
    for said, ours, peer, ratio, _ in rows(figures):
        found = numbers([ours, peer, ratio])
        assert found <= OF_PAGE, f"{said}: {sorted(found - OF_PAGE)}"
        assert any(found <= one for one in sections), f"{said}: {sorted(found)}"
        first = {_NUMBER.findall(ours)[0], _NUMBER.findall(ratio)[0]}
        assert any(first <= one for one in in_rows), f"{said}: {sorted(first)} in one row"


def test_advice_on_the_choice_of_a_library_rests_on_these_figures() -> None:
    advice = (PAGE.parent / "libraries.md").read_text().partition("## Choose")[2]
    ratios = {number for number in numbers([advice]) if "." in number}
    assert ratios and ratios <= OF_PAGE, sorted(ratios - OF_PAGE)


@pytest.mark.parametrize("page", sorted(PAGE.parent.glob("*.md")), ids=lambda p: p.name)
def test_pages_that_compare_are_short(page: Path) -> None:
    words = [word for word in page.read_text().split() if re.search("[A-Za-z]", word)]
    assert len(words) <= 900
