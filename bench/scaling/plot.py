"""The picture of ``bench shaped``: the time of a push_pull against the number of spare machines.

It has the axes of Figure 13 of BytePS (OSDI'20).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import pictures
from bench.report import BenchError, Case
from bench.scaling import BYTES, MACHINES, WAYS, optimum

#: Label, colour, line and marker by line, from the slowest to the fastest.
_STYLES = {
    "gloo": ("gloo's ring", pictures.GREY, "-", "s"),
    "untuned": ("bpsx, not tuned", pictures.ORANGE, "-", "^"),
    "defaults": ("bpsx, defaults", pictures.BLUE, "-", "o"),
    "optimum": ("the links' limit", pictures.BLACK, ":", ""),
}


def draw(machine: Mapping[str, Any], cases: Sequence[Case], path: str) -> None:
    """Write the picture of ``cases``, measured on ``machine``, to ``path``.

    Raises :class:`BenchError` if they are cases of another benchmark, or matplotlib does not know
    the file name's ending.
    """
    found = {case.case: case for case in cases}
    spares = sorted(int(name[10:]) for name in found if name.startswith("defaults-k"))
    if not spares:
        raise BenchError("--plot: there is no case defaults-k..., as bench shaped reports")
    if f"untuned-k{spares[0]}" not in found:
        raise BenchError("--plot: the picture needs the ways defaults and untuned")
    lines = {
        way: [found[f"{way}-k{k}"].value for k in spares] for way in _STYLES if way != "optimum"
    }
    lines["optimum"] = [found[f"defaults-k{k}"].peer or 0.0 for k in spares]
    figure = pictures.figure(7, 4.6)
    axes = figure.add_axes((0.085, 0.195, 0.625, 0.615))
    _lines(axes, spares, lines)
    calls = len(found[f"defaults-k{spares[-1]}"].samples)
    pictures.frame(
        figure,
        _finding(spares[-1], {way: line[-1] for way, line in lines.items()}),
        _about(_rate(spares[0], lines["optimum"][0])),
        f"python -m bench shaped: medians of {calls} calls in turn; machines imitated on"
        f" {pictures.where(machine)}",
    )
    pictures.save(figure, path)


def _finding(spare: int, seconds: Mapping[str, float]) -> str:
    machines = f"{spare or 'no'} spare machine{'' if spare == 1 else 's'}"
    defaults, untuned = (seconds[way] / seconds["gloo"] for way in ("defaults", "untuned"))
    return f"With {machines} bpsx takes {defaults:.2f} of gloo's time, {untuned:.2f} if not tuned"


def _rate(spare: int, seconds: float) -> float:
    """Return the bits per second of the links on which ``seconds`` are the optimum."""
    return 8 * optimum(MACHINES, spare, BYTES, 1.0) / seconds


def _about(rate: float) -> list[str]:
    return [
        f"Sum of {BYTES / 1e6:.0f} MB over {MACHINES} machines, each with a worker and a server,"
        f" on links of {rate / 1e6:.4g} Mbit/s.",
        f"Not tuned: {' '.join(f'{name}={value}' for name, value in WAYS['untuned'].items())}.",
    ]


def _lines(axes: Any, spares: list[int], lines: Mapping[str, list[float]]) -> None:
    """Draw the lines, each with its name and its last value at its right end."""
    top = 1.12 * max(map(max, lines.values()))
    places = pictures.spread([lines[way][-1] for way in _STYLES], 0.07 * top)
    for (way, (name, colour, line, marker)), place in zip(_STYLES.items(), places):
        axes.plot(spares, lines[way], color=colour, linestyle=line, marker=marker, clip_on=False)
        axes.annotate(
            f"{name}, {lines[way][-1]:.2f} s",
            (spares[-1], lines[way][-1]),
            xytext=(1.03, place),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            fontsize=pictures.SMALL,
            va="center",
        )
    axes.set_ylim(0, top)
    axes.set_xticks(spares)
    axes.set_xlabel("spare machines, with a server only")
    axes.set_ylabel("seconds")
    axes.grid(True, axis="y")
