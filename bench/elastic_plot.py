"""The picture of ``bench elastic``: how much longer a step takes in which a process is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import pictures
from bench.report import BenchError, Case

_NAMES = {
    "server-gap-digits": "killed, digits",
    "server-gap-large": "killed, 100 MB",
    "silent-gap-digits": "stopped, digits",
    "silent-gap-large": "stopped, 100 MB",
    "worker-gap-digits": "worker, digits",
    "worker-gap-large": "worker, 100 MB",
}
_TARGET = 1.0
_COMMITTED = "committed-"


def draw(machine: Mapping[str, Any], cases: Sequence[Case], path: str) -> None:
    """Draw the gaps of all runs. Raises :class:`BenchError` if there is none."""
    found = {case.case: case for case in cases if case.case in _NAMES}
    if not found:
        raise BenchError("--plot: there is no case server-gap, silent-gap or worker-gap")
    about = [
        "Longest step less the median step before; a stopped server: less the time of silence."
    ]
    about += _committed(cases)
    figure = pictures.figure(7, 1.32 + 0.18 * len(about) + 0.42 * len(found))
    height = 72 * figure.get_figheight()
    axes = figure.add_axes((0.2, 62 / height, 0.77, 1 - (99 + 13 * len(about)) / height))
    for i, case in enumerate(found.values()):
        axes.plot(case.samples, [i] * len(case.samples), "o", color=pictures.BLUE, alpha=0.35)
        axes.plot(case.value, i, "|", color=pictures.BLUE, markersize=16)
        axes.annotate(
            f"{case.value:.3f}",
            (max(case.samples), i),
            (8, 0),
            textcoords="offset points",
            va="center",
            fontsize=pictures.SMALL,
        )
    axes.axvline(_TARGET, color=pictures.GREY, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 1.15 * max(_TARGET, *(max(case.samples) for case in found.values())))
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_yticks(range(len(found)), [_NAMES[name] for name in found])
    axes.set_xlabel("seconds (dotted: the target)", fontsize=pictures.SMALL)
    axes.tick_params(labelsize=pictures.SMALL)
    axes.grid(True, axis="x")
    worst = max(case.value for case in found.values())
    title = f"A job that loses a process stands still for {worst:.2f} s or less (medians)"
    source = f"python -m bench elastic, {pictures.where(machine)}"
    pictures.frame(figure, title, about, source)
    pictures.save(figure, path)


def _committed(cases: Sequence[Case]) -> list[str]:
    """Say how many steps count in which processes die, if that was measured."""
    found = [
        f"{case.value:.3g} % with a death in {case.case.removeprefix(_COMMITTED)} steps"
        for case in cases
        if case.case.startswith(_COMMITTED)
    ]
    return [f"Steps of survivors that count: {', '.join(found)}."] if found else []
