"""The picture of ``bench shaped``: the time of a push_pull against the number of spare machines.

It has the axes of Figure 13 of BytePS (OSDI'20).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.report import BenchError

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError as missing:
    raise BenchError(
        f"--plot needs matplotlib ({missing.name} is missing): pip install 'bpsx[plot]'"
    ) from None

if TYPE_CHECKING:
    from bench.scaling import Division


def draw(found: Mapping[int, Division], rate: str, path: str) -> None:
    """Write the picture to ``path``.

    Raises :class:`BenchError` if matplotlib does not know the file name's ending.
    """
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "bpsx",
            "svg.fonttype": "none",
            "font.size": 10,
            "font.sans-serif": ["Arial", "Helvetica", "DejaVu Sans"],
        }
    )
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    spares = sorted(found)
    ways = (
        ("gloo's ring", "#7f7f7f", "s", [statistics.median(found[k].gloo) for k in spares]),
        ("bpsx", "#0072B2", "o", [statistics.median(found[k].ours) for k in spares]),
    )
    for name, colour, marker, seconds in ways:
        axes.plot(spares, seconds, color=colour, marker=marker, label=name)
    axes.plot(
        spares, [found[k].optimum for k in spares], color="#000000", linestyle=":", label="optimum"
    )
    axes.set_ylim(0, 1.15 * max(max(seconds) for *_, seconds in ways))
    axes.set_xticks(spares)
    axes.set_xlabel("machines with a server only, beside 4 with a worker and a server each")
    axes.set_ylabel("seconds")
    axes.set_title(
        "Sum of 100 MB over 4 machines, links of"
        f" {rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')}, medians"
    )
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    try:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)
    except ValueError as error:
        raise BenchError(f"--plot {path}: {error}") from None
