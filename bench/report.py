"""Report of a benchmark: cases with a value, a peer's value and their ratio.

It is printed as a table for people or as JSON for programs.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TARGET = re.compile(r"(<=|>=|<|>)\s*([0-9.]+)$")


class BenchError(Exception):
    """A benchmark could not run: a process died, a reply did not come, or a sum was wrong."""


@dataclass(frozen=True)
class Case:
    """One row of the report.

    ``value`` and ``peer`` are in ``unit``. ``value`` is the median of ``samples``, or its single
    measurement. ``target`` is a bound such as ``">= 0.70"`` on the ratio, or on the value if there
    is no peer. ``note`` is for the table only.
    """

    case: str
    value: float
    unit: str
    peer: float | None = None
    target: str | None = None
    samples: Sequence[float] = ()
    note: str = ""

    def __post_init__(self) -> None:
        for figure in (self.value, self.peer, *self.samples):
            if figure is not None and not math.isfinite(figure):
                raise BenchError(f"case {self.case}: {figure} is not a figure")
        if self.target is not None and not _TARGET.match(self.target):
            raise BenchError(
                f"case {self.case}: target {self.target!r} is not a comparison with a number"
            )

    @property
    def ratio(self) -> float | None:
        """``value / peer``; None without a peer."""
        return self.value / self.peer if self.peer else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        match = _TARGET.match(self.target)
        assert match is not None
        figure, bound = self.value if self.ratio is None else self.ratio, float(match[2])
        return {
            "<": figure < bound,
            "<=": figure <= bound,
            ">": figure > bound,
            ">=": figure >= bound,
        }[match[1]]

    def as_dict(self) -> dict[str, Any]:
        """Return the case as it appears in the JSON object."""
        return {
            "case": self.case,
            "value": short(self.value),
            "unit": self.unit,
            "peer": short(self.peer),
            "ratio": short(self.ratio),
            "target": self.target,
            "samples": [short(s) for s in self.samples],
        }


#: Function that draws a picture: what is known of the machine, the cases, the file's path.
Draw = Callable[[Mapping[str, Any], Sequence[Case], str], None]


def integers(option: str, text: str, what: str = "integers", least: int = 0) -> list[int]:
    """Convert ``"0,4"`` to [0, 4]. Raises :class:`BenchError`, which names the option.

    ``what``: a word for them, with their unit.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise BenchError(f"{option} {text!r}: expected {what} from {least}, separated by commas")
    return [int(word) for word in words]


def median_case(case: str, samples: Sequence[float], unit: str, **rest: Any) -> Case:
    """Return a case whose value is the median of ``samples``."""
    return Case(case, statistics.median(samples), unit, samples=tuple(samples), **rest)


def short(figure: float | None) -> float | None:
    """Round ``figure`` to six significant digits: more would be noise."""
    return None if figure is None else float(f"{figure:.6g}")


def as_json(bench: str, machine: Mapping[str, Any], cases: Sequence[Case]) -> str:
    """Return the JSON object of a run, on one line."""
    return json.dumps(
        {"bench": bench, "machine": dict(machine), "cases": [c.as_dict() for c in cases]},
        allow_nan=False,
    )


def read(path: str, bench: str) -> tuple[dict[str, Any], list[Case]]:
    """Return the machine and the cases of the JSON object that a run of ``bench`` printed.

    Raises :class:`BenchError` if the file is missing or has something else.
    """
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        if told["bench"] != bench:
            raise BenchError(f"{path} has figures of bench {told['bench']}, not of {bench}")
        cases = [
            Case(*(c[k] for k in ("case", "value", "unit", "peer", "target", "samples")))
            for c in told["cases"]
        ]
        return dict(told["machine"]), cases
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is not the output of bench {bench} --json: {error}") from None


def as_table(bench: str, machine: Mapping[str, Any], cases: Sequence[Case]) -> str:
    """Return the report as a table, with notes and whether each target is met."""
    head = ("case", "value", "unit", "peer", "ratio", "target", "met", "note")
    rows = [head, *(_row(c) for c in cases)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    right = {1, 3, 4}
    lines = [
        "  ".join(
            t.rjust(w) if i in right else t.ljust(w) for i, (t, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    about = ", ".join(f"{k} {v}" for k, v in machine.items() if v is not None)
    return "\n".join([f"bench {bench}: {about}", "", *lines])


def _row(case: Case) -> tuple[str, ...]:
    met = {None: "", True: "yes", False: "no"}[case.met]
    return (
        case.case,
        _figure(case.value),
        case.unit,
        _figure(case.peer),
        _figure(case.ratio),
        case.target or "",
        met,
        case.note,
    )


def _figure(figure: float | None) -> str:
    if figure is None:
        return ""
    return (
        f"{figure:.0f}"
        if abs(figure) >= 1000
        else f"{figure:.3g}"
        if abs(figure) >= 100 or abs(figure) < 0.1
        else f"{figure:.2f}"
    )
