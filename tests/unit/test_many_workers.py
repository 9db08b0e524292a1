"""The scheduler's cost per message does not depend on the number of workers and tensors.

The cost is counted in calls, not in seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from bench.scheduler import PHASES, Simulated

FEW, MANY, TENSORS = 64, 1024, 6


class _Counter:
    """Counts the steps of Python code: calls and iterations of loops."""

    def __init__(self) -> None:
        self.steps = 0

    def _local(self, frame: Any, event: str, arg: Any) -> Any:
        self.steps += event == "line"
        return self._local

    def of(self, act: Callable[[], object]) -> int:
        before, self.steps = sys.gettrace(), 0
        sys.settrace(lambda frame, event, arg: self._local)
        try:
            act()
        finally:
            sys.settrace(before)
        return self.steps


def steps_per_message(workers: int, processes: int = 1) -> dict[str, float]:
    """Return the average by phase; messages to all nodes are sent once per phase."""
    simulated = Simulated(workers, TENSORS, processes)
    counter, found = _Counter(), {}
    for phase in PHASES:
        sent = list(simulated.phase(phase))
        found[phase] = counter.of(
            lambda sent=sent: [simulated.handle(*message) for message in sent]
        ) / len(sent)
    assert (
        simulated.hub._members.state == "done"
        if processes == 1
        else simulated.hub._members.state in ("running", "done")
    )
    return found


@pytest.mark.parametrize("processes", [1, 8])
def test_the_cost_of_a_message_does_not_grow_with_workers(processes):
    logging.disable(logging.WARNING)
    try:
        few, many = steps_per_message(FEW, processes), steps_per_message(MANY, processes)
    finally:
        logging.disable(logging.NOTSET)
    for phase in PHASES:
        assert many[phase] <= 1.6 * few[phase] + 20, (phase, few[phase], many[phase])
