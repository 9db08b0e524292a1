"""The picture of ``bench compress --end-to-end``: accuracy against epochs and against seconds, and
the time of a step on each link.
"""

from __future__ import annotations

from typing import Any

from bench.end_to_end import ENOUGH, WORKERS, Runs
from bench.report import BenchError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError as missing:
    raise BenchError(
        f"--plot needs matplotlib ({missing.name} is missing): pip install 'bpsx[plot]'"
    ) from None

#: Colours that colour-blind people can distinguish (Okabe and Ito), line styles, markers.
_STYLES = {
    "float32": ("#000000", "-", "o"),
    "bfloat16": ("#7f7f7f", "--", "s"),
    "onebit": ("#D55E00", "-", "^"),
    "topk": ("#0072B2", "-", "v"),
    "randomk": ("#CC79A7", "-", "D"),
    "dithering-linear": ("#009E73", "-", "P"),
    "dithering-natural": ("#E69F00", "--", "X"),
}
_LINKS = {"10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
_SLOW = ("1gbit", "200mbit")


def draw(runs: Runs, path: str) -> None:
    """Write the picture to ``path``.

    Raises :class:`BenchError` if matplotlib does not know the file name's ending.
    """
    # The same figures give the same bytes: no date, no random ids. Text stays text, which takes a
    # quarter of the bytes.
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "bpsx",
            "svg.fonttype": "none",
            "font.size": 10,
            "axes.titlesize": 11,
            "font.sans-serif": ["Arial", "Helvetica", "DejaVu Sans"],
        }
    )
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _by_epochs(axes[0, 0], list(runs.values())[-1])
    _steps(axes[0, 1], runs)
    for place, link in zip(axes[1], _SLOW):
        _by_seconds(place, link, runs[link])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )
    try:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)
    except ValueError as error:
        raise BenchError(f"--plot {path}: {error}") from None


def _drawn(axes: Any, way: str, across: list[float], scores: list[float]) -> None:
    colour, line, marker = _STYLES[way]
    # float32's line is thick and below the others, so that lines on the same points stay visible.
    wide = 3.5 if way == "float32" else 1.3
    axes.plot(
        across,
        [100 * s for s in scores],
        line,
        color=colour,
        marker=marker,
        markersize=4,
        linewidth=wide,
        label=way,
    )


def _finish(axes: Any, title: str, across: str, up: str = "test accuracy, %") -> None:
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _enough(axes: Any) -> None:
    axes.axhline(100 * ENOUGH, color="#555555", linewidth=0.8, linestyle=":")


def _plain(axis: Any) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2, 5, 10 and so on."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _by_epochs(axes: Any, ways: dict[str, Any]) -> None:
    for way in (w for w in _STYLES if w in ways):
        _drawn(axes, way, list(range(1, len(ways[way].scores) + 1)), ways[way].scores)
    _enough(axes)
    _finish(axes, f"Accuracy after each epoch ({WORKERS} workers, 1 server)", "epochs")


def _by_seconds(axes: Any, link: str, ways: dict[str, Any]) -> None:
    for way in (w for w in _STYLES if w in ways):
        _drawn(axes, way, ways[way].seconds, ways[way].scores)
    _enough(axes)
    axes.set_xscale("log")
    _plain(axes.xaxis)
    _finish(axes, f"The same against time, links of {_LINKS[link]}", "seconds of training")


def _steps(axes: Any, runs: Runs) -> None:
    ways = [w for w in _STYLES if w in next(iter(runs.values()))]
    wide = 0.85 / len(ways)
    for i, way in enumerate(ways):
        places = [n + (i - (len(ways) - 1) / 2) * wide for n in range(len(runs))]
        heights = [on[way].step for on in runs.values()]
        axes.bar(places, heights, wide * 0.92, color=_STYLES[way][0])
        for place, height in zip(places, heights):
            axes.text(place, height * 1.06, f"{height:.0f}", ha="center", va="bottom", fontsize=7)
    for n, on in enumerate(runs.values()):
        axes.hlines(
            on["alone"].step, n - 0.46, n + 0.46, color="#000000", linewidth=1, linestyle=":"
        )
    axes.set_yscale("log")
    _plain(axes.yaxis)
    axes.set_ylim(10, 2 * max(on["float32"].step for on in runs.values()))
    axes.set_xticks(range(len(runs)), [_LINKS[link] for link in runs])
    _finish(axes, "Step time, median (dotted: without any exchange)", "", "milliseconds")
    axes.grid(False, axis="x")
