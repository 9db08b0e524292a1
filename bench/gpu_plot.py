"""The picture of ``bench gpu``'s links: a step's time by the links' rate, a panel per network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench import pictures
from bench.report import BenchError, Case

#: What is drawn: the end of the case's name, its value or its peer, a label, a colour, a style.
_LINES = (
    ("", "peer", "DDP", pictures.GREY, "-"),
    ("", "value", "bpsx", pictures.BLUE, "-"),
    ("-powersgd", "value", "DDP, PowerSGD", pictures.GREY, "--"),
    ("-onebit", "value", "bpsx, onebit", pictures.ORANGE, "-"),
    ("-rank4", "value", "bpsx, PowerSGD", pictures.BLUE, "--"),
)
_NAMES = {"vgg16": "VGG-16", "bert-large": "BERT-large"}
_CASE = re.compile(r"links-([\d.]+)gbit-k0-(.+?)(-(?:onebit|topk|dithering|rank4|powersgd|bf16))?")


def draw(machine: Mapping[str, Any], cases: Sequence[Case], path: str) -> None:
    """Draw the steps with a server beside each worker. Raises :class:`BenchError` without any."""
    found: dict[str, dict[str, dict[float, Case]]] = {}  # by network, way and rate
    for case in cases:
        if match := _CASE.fullmatch(case.case):
            ways = found.setdefault(match[2], {})
            ways.setdefault(match[3] or "", {})[float(match[1])] = case
    found = {network: ways for network, ways in found.items() if "" in ways}
    if not found:
        raise BenchError("--plot: there is no case links-<rate>gbit-k0-<network>")
    figure = pictures.figure(9.2, 3.9)
    for i, (network, ways) in enumerate(found.items()):
        share = 0.94 / len(found)
        axes = figure.add_axes((0.06 + i * share, 0.2, share - 0.23, 0.55))
        _panel(axes, _NAMES.get(network, network), ways)
    axes = figure.axes[0]
    axes.set_ylabel("ms a step", fontsize=pictures.SMALL)
    ratios = [case.ratio for ways in found.values() for case in ways[""].values() if case.ratio]
    title = f"By default a step takes {pictures.span(ratios)} of DDP's time"
    about = [
        "A server beside each worker, machines imitated by network namespaces; medians. Both axes",
        "are logarithmic. PowerSGD has rank 4.",
    ]
    pictures.frame(
        figure,
        title,
        about,
        f"python -m bench gpu --only links, {machine['cpu']}, H200, {pictures.where(machine)}",
    )
    pictures.save(figure, path)


def _panel(axes: Any, title: str, ways: Mapping[str, Mapping[float, Case]]) -> None:
    rates = sorted(ways[""])
    ends: list[tuple[float, str, str]] = []
    for way, which, label, colour, style in _LINES:
        points = {r: getattr(ways[way][r], which) for r in rates if r in ways.get(way, {})}
        if points:
            axes.plot(list(points), list(points.values()), style, marker="o", color=colour)
            ends.append((points[max(points)], label, colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.3, high)
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"{title}; links, Gbit/s", fontsize=pictures.SMALL)
    axes.tick_params(labelsize=pictures.SMALL)
    axes.grid(True)
    _label(axes, rates[-1], ends)


def _label(axes: Any, at: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name beside its end."""
    heights = [axes.transData.transform((at, height))[1] for height, _, _ in ends]
    # Pixels; a line of text takes 13 points.
    apart = 13 * axes.figure.dpi / 72
    right = axes.transData.transform((at, ends[0][0]))[0] + apart / 2
    for (height, label, colour), place in zip(ends, pictures.spread(heights, apart)):
        axes.annotate(
            f"{label}: {height:.3g}",
            (at, height),
            axes.transData.inverted().transform((right, place)),
            textcoords="data",
            va="center",
            color=colour,
            fontsize=pictures.SMALL,
            annotation_clip=False,
        )
