"""The pictures of the docs are drawn from the figures beside them; labels do not overlap."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Picture in docs/images -> the benchmark's name and the module that draws it.
PICTURES = {"compression": ("compress", "bench.end_to_end_plot")}


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT))


def texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)<", picture.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_what_its_figures_give(name: str, tmp_path: Path) -> None:
    bench, module = PICTURES[name]
    images = ROOT / "docs" / "images"
    read = importlib.import_module("bench.report").read
    about, cases = read(str(images / f"{name}.json"), bench)
    importlib.import_module(module).draw(about, cases, str(tmp_path / "again.svg"))
    drawn = texts(images / f"{name}.svg")
    assert drawn == texts(tmp_path / "again.svg") and len(drawn) > 10


@pytest.mark.parametrize(
    ("places", "moved"),
    [
        ([1.0, 9.0], [1.0, 9.0]),
        ([5.0, 5.0], [4.5, 5.5]),
        ([5.5, 1.0, 5.0, 4.5], [6.0, 1.0, 5.0, 4.0]),
    ],
)
def test_labels_move_no_further_than_they_must(places: list[float], moved: list[float]) -> None:
    assert importlib.import_module("bench.pictures").spread(places, 1.0) == pytest.approx(moved)
