"""Common parts of the benchmarks' pictures: fonts, titles, small print, and saving."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import BenchError

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError as missing:
    raise BenchError(
        f"--plot needs matplotlib ({missing.name} is missing): pip install 'bpsx[plot]'"
    ) from None

#: Colours that colour-blind people can distinguish (Okabe and Ito).
BLUE, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#000000", "#6b6b6b"
#: Sizes of text in points: of the finding, and of its source.
SMALL, SOURCE = 9, 7.5


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches.

    Equal figures give equal bytes (no random ids), and text stays text, which takes a quarter of
    the bytes.
    """
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "bpsx",
            "svg.fonttype": "none",
            "font.size": 10,
            "font.sans-serif": ["Arial", "Helvetica", "DejaVu Sans"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
        }
    )
    return Figure(figsize=(width, height))


def frame(on: Figure, title: str, about: Sequence[str], source: str) -> None:
    """Write the finding above the axes, lines about it below that, and its source at the bottom."""
    height = 72 * on.get_figheight()
    on.text(0.012, 1 - 8 / height, title, fontsize=10.5, fontweight="bold", va="top")
    for i, line in enumerate(about):
        on.text(0.012, 1 - (28 + 13 * i) / height, line, fontsize=SMALL, va="top")
    on.text(0.012, 5 / height, source, fontsize=SOURCE, color=GREY, va="bottom")


def where(machine: Mapping[str, Any]) -> str:
    """Return on how many cores and when the figures were measured."""
    return ", ".join(
        [f"{machine['cores']} cores", *([machine["date"]] if "date" in machine else [])]
    )


def span(figures: Sequence[float]) -> str:
    """Return the smallest and the largest of some ratios, or the only one."""
    ends = list(dict.fromkeys(f"{end:.2f}" for end in (min(figures), max(figures))))
    return " to ".join(ends)


def spread(places: Sequence[float], least: float) -> list[float]:
    """Move places for labels as little as possible until neighbours are ``least`` apart."""
    order = sorted(range(len(places)), key=places.__getitem__)
    groups: list[list[float]] = []  # of neighbours that touch; each group has one mean
    for i, index in enumerate(order):
        groups.append([places[index] - i * least])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            touching = groups.pop()
            groups[-1] += touching
    free = itertools.chain.from_iterable([_mean(group)] * len(group) for group in groups)
    moved = {index: at + i * least for i, (index, at) in enumerate(zip(order, free))}
    return [moved[i] for i in range(len(places))]


def _mean(figures: Sequence[float]) -> float:
    return sum(figures) / len(figures)


def save(drawn: Figure, path: str) -> None:
    """Write the picture. Raises :class:`BenchError` for an ending that matplotlib does not know."""
    try:
        drawn.savefig(path, dpi=144, metadata={"Date": None} if path.endswith(".svg") else None)
    except ValueError as error:
        raise BenchError(f"--plot {path}: {error}") from None
