"""The picture of ``bench compress --end-to-end``: on each link the time of a step and the time
until the accuracy is reached, and the accuracy after each epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import pictures
from bench.end_to_end import BASE, ENOUGH, LINKS, WAYS, WORKERS
from bench.report import BenchError, Case

_LINKS = {"10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s", "200mbit": "200 Mbit/s"}
#: Bottom and height of each row of axes, as parts of the picture's height.
_STEPS, _UNTIL, _EPOCHS = (0.63, 0.19), (0.36, 0.165), (0.107, 0.12)
_JOB = f"{WORKERS} workers and a server train a small network on pictures of digits."
_Found = Mapping[str, Case]


def draw(machine: Mapping[str, Any], cases: Sequence[Case], path: str) -> None:
    """Write the picture of ``cases``, measured on ``machine``, to ``path``.

    Raises :class:`BenchError` if they are cases of another benchmark, or matplotlib does not know
    the file name's ending.
    """
    found = {case.case: case for case in cases}
    links = [link for link in LINKS if f"step-{link}-float32" in found]
    if not links:
        raise BenchError("--plot: there is no case step-..., as compress --end-to-end reports")
    ways = [way for way in WAYS if f"step-{links[0]}-{way}" in found]
    trained = [way for way in ways if way != "alone"]
    figure = pictures.figure(7, 7.6)
    for row, what, shown, unit in ((_STEPS, "step", ways, "ms"), (_UNTIL, "until", trained, "s")):
        columns = _columns(figure, row, 0.245, len(links))
        for axes, link in zip(columns, links):
            on = {way: found.get(f"{what}-{link}-{way}") for way in shown}
            _dots(axes, on, unit, _LINKS[link])
        columns[0].set_yticklabels([_name(way, found, what) for way in shown])
    scores = {way: found[f"accuracy-{way}"].samples for way in trained}
    _epochs(_columns(figure, _EPOCHS, 0.085, len(scores) - 1), scores)
    _heads(figure)
    title, about = _finding(found, links, [way for way in ways if way not in BASE])
    pictures.frame(figure, title, [about, _JOB], _source(machine))
    pictures.save(figure, path)


def _finding(found: _Found, links: list[str], compressed: list[str]) -> tuple[str, str]:
    """Return the ratios of the compressed steps: as title the slowest link's, and the others'."""
    *others, slowest = [
        (
            _LINKS[link],
            pictures.span([found[f"step-{link}-{way}"].ratio or 0 for way in compressed]),
        )
        for link in links
    ]
    return (
        f"With compression a step takes {slowest[1]} of float32's time at {slowest[0]}",
        f"It takes {', '.join(f'{ratios} at {link}' for link, ratios in reversed(others))}.",
    )


def _source(machine: Mapping[str, Any]) -> str:
    slow = " ".join(f"{name}={value}" for name, value in LINKS["200mbit"].items())
    return (
        f"python -m bench compress --end-to-end, {pictures.where(machine)}. On the slower two links"
        f" all ways have\n{slow}."
    )


def _heads(figure: Any) -> None:
    """Write a head so many points above each row."""
    enough = f"{100 * ENOUGH:.0f} %"
    for (bottom, height), gap, text in (
        (_STEPS, 26, "Time of a step, median (in brackets: bytes to and from a worker)"),
        (_UNTIL, 26, f"Training time until {enough} of the test pictures are recognised"),
        (_EPOCHS, 36, f"Accuracy after each epoch (grey: float32, dotted: {enough})"),
    ):
        place = bottom + height + gap / (72 * figure.get_figheight())
        figure.text(0.012, place, text, fontsize=10, fontweight="bold")


def _columns(figure: Any, place: tuple[float, float], left: float, count: int) -> list[Any]:
    """Add a row of axes from ``left`` to the right edge."""
    wide = (0.985 - left) / count
    return [
        figure.add_axes((left + i * wide, place[0], 0.88 * wide, place[1])) for i in range(count)
    ]


def _dots(axes: Any, cases: Mapping[str, Case | None], unit: str, title: str) -> None:
    """Draw a dot with its value for each way, the first at the top."""
    beside = {"fontsize": pictures.SMALL, "va": "center"}
    for i, (way, case) in enumerate(cases.items()):
        if case is None:
            axes.text(0, i, " never", color=pictures.ORANGE, **beside)
            continue
        colour = pictures.GREY if way in BASE else pictures.BLUE
        axes.plot(case.value, i, "o", color=colour, markerfacecolor="w" if way == "alone" else None)
        text = f"{case.value:.{0 if unit == 'ms' else 1}f}"
        axes.annotate(text, (case.value, i), (7, 0), textcoords="offset points", **beside)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_yticks(range(len(cases)), [""] * len(cases))
    axes.set_xlim(0, 1.32 * max((case.value for case in cases.values() if case), default=1))
    axes.locator_params(axis="x", nbins=3)
    axes.tick_params(labelsize=pictures.SMALL, length=0)
    axes.set_title(f"{title}, {unit}", fontsize=pictures.SMALL, loc="left")
    axes.grid(True)


def _name(way: str, found: _Found, what: str) -> str:
    """Return the way's name, beside steps with the bytes that it moves."""
    if way == "alone":
        return "no exchange"
    if what == "until":
        return way
    moved = found[f"wire-{way}"].value
    return f"{way} ({moved:.{1 if moved >= 1 else 2}f} MB)"


def _epochs(row: list[Any], scores: Mapping[str, Sequence[float]]) -> None:
    """Draw the accuracy of each way but float32 in a panel of its own, before float32's."""
    least = min(min(line) for line in scores.values())
    plain = scores["float32"]
    epochs = range(1, len(plain) + 1)
    for axes, way in zip(row, [way for way in scores if way != "float32"]):
        axes.plot(epochs, plain, color=pictures.GREY, linewidth=3, alpha=0.45)
        axes.plot(epochs, scores[way], color=pictures.BLUE, linewidth=1.3)
        axes.axhline(100 * ENOUGH, color=pictures.BLACK, linewidth=0.8, linestyle=":")
        axes.set_title(f"{way}\n{scores[way][-1]:.1f} % at last", fontsize=8, loc="left")
        axes.set_ylim(least - 2, 100)
        axes.locator_params(axis="y", nbins=4)
        axes.set_xticks([1, len(plain)])
        axes.tick_params(labelsize=pictures.SMALL, labelleft=axes is row[0])
        axes.grid(True, axis="y")
    row[0].set_ylabel("%", fontsize=pictures.SMALL)
    row[0].set_xlabel("epoch", fontsize=pictures.SMALL)
