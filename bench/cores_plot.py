"""The picture of ``bench cores``: rate of a worker by number of cores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench import pictures
from bench.report import BenchError, Case

#: What is drawn: the case's first word, whether its value or its peer, a label, a colour, a style.
_LINES = (
    ("rate", "value", "bpsx", pictures.BLUE, "-"),
    ("gain", "peer", "without I/O threads", pictures.ORANGE, "-"),
    ("zeromq", "peer", "over ZeroMQ", pictures.ORANGE, "--"),
    ("rate", "peer", "gloo", pictures.GREY, "-"),
    ("sockets", "peer", "a quarter of plain sockets", pictures.BLACK, ":"),
)


def draw(machine: Mapping[str, Any], cases: Sequence[Case], path: str) -> None:
    """Draw the rates. Raises :class:`BenchError` if there are none."""
    found = {case.case: case for case in cases}
    counts = sorted(int(m[1]) for name in found if (m := re.fullmatch(r"rate-(\d+)", name)))
    if not counts:
        raise BenchError("--plot: there is no case rate")
    figure = pictures.figure(7, 3.6)
    axes = figure.add_axes((0.08, 0.2, 0.62, 0.6))
    ends: list[tuple[float, str, str]] = []
    top = 0.0
    for kind, which, label, colour, style in _LINES:
        points = {n: getattr(found[f"{kind}-{n}"], which) for n in counts if f"{kind}-{n}" in found}
        if points:
            axes.plot(list(points), list(points.values()), style, marker="o", color=colour)
            ends.append((points[max(points)], label, colour))
            top = max(top, *points.values())
    _label(axes, counts[-1], ends, 1.08 * top)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts], minor=False)
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlabel("cores of the machine", fontsize=pictures.SMALL)
    axes.set_ylabel("GB/s per worker", fontsize=pictures.SMALL)
    axes.tick_params(labelsize=pictures.SMALL)
    axes.grid(True)
    last = found[f"rate-{counts[-1]}"]
    title = f"With {counts[-1]} cores a worker sums {last.value:.1f} GB/s"
    if last.ratio is not None:
        title += f", {last.ratio:.1f} times as much as gloo"
    about = ["Two workers and the servers on one machine, over TCP; medians."]
    pictures.frame(
        figure, title, about, f"python -m bench cores, {machine['cpu']}, {pictures.where(machine)}"
    )
    pictures.save(figure, path)


def _label(axes: Any, at: int, ends: Sequence[tuple[float, str, str]], top: float) -> None:
    """Write each line's name beside its end. ``top``: the vertical axis' length."""
    places = pictures.spread([height for height, _, _ in ends], 0.075 * top)
    for (height, label, colour), place in zip(ends, places):
        axes.annotate(
            f"{label}: {height:.1f}",
            (at, height),
            (1.07 * at, place),
            textcoords="data",
            va="center",
            color=colour,
            fontsize=pictures.SMALL,
            annotation_clip=False,
        )
