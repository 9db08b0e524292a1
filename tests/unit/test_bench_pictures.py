"""The pictures of the docs are drawn from the figures beside them; labels do not overlap."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = sorted((ROOT / "docs" / "images").glob("*.json"))
#: The benchmark's name, as the figures have it, -> the module that draws its picture.
MODULES = {
    "compress": "bench.end_to_end_plot",
    "cores": "bench.cores_plot",
    "gpu": "bench.gpu_plot",
    "shaped": "bench.scaling.plot",
}


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT))


def texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)<", picture.read_text(encoding="utf-8"))


@pytest.mark.parametrize("figures", FIGURES, ids=[path.stem for path in FIGURES])
def test_a_picture_states_its_figures(figures: Path, tmp_path: Path) -> None:
    bench = json.loads(figures.read_text(encoding="utf-8"))["bench"]
    about, cases = importlib.import_module("bench.report").read(str(figures), bench)
    importlib.import_module(MODULES[bench]).draw(about, cases, str(tmp_path / "again.svg"))
    drawn = texts(figures.with_suffix(".svg"))
    assert drawn == texts(tmp_path / "again.svg") and len(drawn) > 10


@pytest.mark.parametrize(
    ("places", "moved"),
    [
        ([1.0, 9.0], [1.0, 9.0]),
        ([5.0, 5.0], [4.5, 5.5]),
        ([5.5, 1.0, 5.0, 4.5], [6.0, 1.0, 5.0, 4.0]),
    ],
)
def test_labels_move_as_little_as_possible(places: list[float], moved: list[float]) -> None:
    assert importlib.import_module("bench.pictures").spread(places, 1.0) == pytest.approx(moved)
