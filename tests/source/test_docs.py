"""Documentation pages: links lead to existing pages and headings; length of lines and pages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from support.places import ROOT

PAGES = sorted(
    p
    for folder in (".", "docs", "examples", "tests", "bench")
    for p in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^( *)```.*?^\1```[^\n]*$", "", path.read_text(), flags=re.S | re.M)


def anchors(path: Path) -> set[str]:
    """Return the page's headings as GitHub's anchors."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(path), re.M):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        place, _, heading = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link} leads nowhere"
        if heading:
            assert heading in anchors(target), f"{page.relative_to(ROOT)}: no heading {link}"


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading, with `code`\n[there](#a-heading-with-code) [not](other.md)\n")
    assert anchors(page) == {"a-heading-with-code"}
    assert _LINK.findall(prose(page)) == ["#a-heading-with-code", "other.md"]


@pytest.mark.parametrize(
    ("page", "most"),
    [
        (ROOT / "ARCHITECTURE.md", 1800),
        *((page, 1500) for page in sorted((ROOT / "docs" / "internals").glob("*.md"))),
    ],
    ids=lambda p: p.name if isinstance(p, Path) else "",
)
def test_pages_for_developers_are_short(page: Path, most: int) -> None:
    assert len(page.read_text().split()) <= most


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_have_at_most_100_columns(page: Path) -> None:
    """Except rows of tables, headings, and code, which shows what programs print."""
    assert not [
        x for x in prose(page).splitlines() if len(x) > 100 and not x.startswith(("|", "#"))
    ]
