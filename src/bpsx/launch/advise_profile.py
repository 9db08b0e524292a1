"""Composition of a training step, read from the timeline of one worker."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpsx.errors import ConfigError
from bpsx.planning.step_model import Gradient

#: Least number of whole steps.
FEWEST = 2
_TOO_FEW = (
    f"fewer than {FEWEST} whole steps were recorded: give a larger --steps, or --seconds for a job"
    " that runs"
)


class Profile(NamedTuple):
    """Medians over the recorded steps.

    ``seconds``: of a whole step. ``sent``: bytes that the worker pushed in a step. ``on_gpu``:
    whether gradients came from a GPU. ``compression``: of any tensor, or empty. ``steps``: their
    number.
    """

    gradients: list[Gradient]
    seconds: float
    sent: int
    on_gpu: bool
    compression: str
    steps: int

    @property
    def ready(self) -> float:
        """Seconds until the last gradient is ready."""
        return max(g.ready for g in self.gradients)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(g.nbytes for g in self.gradients)


class _Pushed(NamedTuple):
    name: str
    begin: float
    end: float
    nbytes: int


def read(path: Path) -> Profile:
    """Read the timeline of a worker.

    Raises :class:`~bpsx.errors.ConfigError` if it has too few steps or its steps overlap, and
    :class:`OSError`.
    """
    text = json.loads(path.read_text())
    return profile(text["traceEvents"], text["otherData"].get("tensors", {}))


def profile(
    events: Iterable[Mapping[str, Any]], tensors: Mapping[str, Mapping[str, Any]]
) -> Profile:
    """Return the profile that a timeline's ``events`` show.

    ``tensors``: name -> ``shape``, ``compression``. As :func:`read`.
    """
    events = list(events)
    steps = _steps([_pushed(e) for e in events if e.get("tid") == "total"])
    # The first step may lack what was pushed before the recording, and the last one its end.
    whole = [steps[i - 1 : i + 1] for i in range(1, len(steps) - 1)]
    usual = {
        name
        for name, times in Counter(p.name for _, now in whole for p in now).items()
        if 2 * times > len(whole)  # others do not belong to every step
    }
    whole = [pair for pair in whole if usual <= {p.name for p in pair[1]}]
    if len(whole) < FEWEST:
        raise ConfigError(_TOO_FEW)
    begins = [max(p.end for p in before) for before, _ in whole]
    ends = [max(p.end for p in now) for _, now in whole]
    firsts = [min(p.begin for p in now) for _, now in whole]
    if sum(first < begin for first, begin in zip(firsts, begins)) * 2 > len(whole):
        raise ConfigError(
            "gradients of a step are pushed before those of the step before it have been summed"
            " (CrossBarrier, or several optimizers): such steps cannot be predicted"
        )
    gradients = []
    for name in sorted(usual):
        found = [
            (p.nbytes, max(0.0, p.begin - begin))
            for (_, now), begin in zip(whole, begins)
            for p in now
            if p.name == name
        ]
        ready = statistics.median(ready for _, ready in found)
        shape = tuple(tensors.get(name, {}).get("shape", ()))
        gradients.append(Gradient(name, max(n for n, _ in found), ready, shape))
    # The compression of the largest tensor that has one: small ones may travel in halves instead.
    kinds = [
        str(tensors.get(g.name, {}).get("compression") or "")
        for g in sorted(gradients, key=lambda g: -g.nbytes)
    ]
    return Profile(
        sorted(gradients, key=lambda g: g.ready),
        statistics.median(end - begin for end, begin in zip(ends, begins)),
        _sent(events, steps[1:-1]),
        any(e["name"].endswith(".COPYD2H") for e in events),
        next((kind for kind in kinds if kind), ""),
        len(whole),
    )


def _pushed(event: Mapping[str, Any]) -> _Pushed:
    begin = event["args"].get("submitted", event["ts"])
    return _Pushed(
        event["args"]["name"].removeprefix("Comm."),
        begin / 1e6,
        (event["ts"] + event["dur"]) / 1e6,
        int(event["args"]["bytes"]),
    )


def _steps(pushed: Sequence[_Pushed]) -> list[list[_Pushed]]:
    """Divide push_pulls into steps: each begins when a tensor comes for the second time."""
    found: list[list[_Pushed]] = []
    names: set[str] = set()
    for one in sorted(pushed, key=lambda p: p.begin):
        if not found or one.name in names:
            found.append([])
            names = set()
        found[-1].append(one)
        names.add(one.name)
    return found


def _sent(events: Iterable[Mapping[str, Any]], steps: Sequence[Sequence[_Pushed]]) -> int:
    """Return the bytes that a worker has pushed in these steps, per step."""
    begin, end = min(p.begin for p in steps[0]), max(p.end for p in steps[-1])
    pushes = [e for e in events if e["name"].endswith(".PUSH") and begin <= e["ts"] / 1e6 <= end]
    return int(sum(e["args"]["bytes"] for e in pushes) // len(steps))
