"""``bpsx.elastic``: training with NumPy that goes on when workers are lost or join.

Set ``BPSX_ELASTIC=shrink`` on all processes. docs/train/uneven-and-elastic.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bpsx.errors import ConfigError
from bpsx.plugin import elastic
from bpsx.plugin.elastic import Departed, HostsUpdatedInterrupt, leave, run, steps_of
from bpsx.plugin.objects import Tensors, broadcast_object

__all__ = ["Departed", "HostsUpdatedInterrupt", "State", "leave", "run", "steps"]


def _none(value: Any, what: str) -> None:
    """NumPy's arrays travel as plain values: there are no tensors of a framework."""


def _no_tensor(dtype: str, shape: list[int], raw: bytes) -> np.ndarray:
    raise ValueError("a tensor of a framework")


class State(elastic.State):
    """Values that all workers have to agree on, as attributes: NumPy arrays, numbers, text.

    Other objects are pickled, which needs a job secret. See :class:`bpsx.plugin.elastic.State` for
    the methods.
    """

    def _broadcast(self, values: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = broadcast_object(values, 0, "elastic", Tensors(_none, _no_tensor))
        return found


def steps(number: int, state: State) -> Iterator[int]:
    """Return the numbers of the steps of a training loop, for jobs whose workers come and go.

    ``for step in steps(1000, state)`` is a loop of ``number`` steps from ``state.step`` on, which
    begins with 0. All workers make the same step at the same time. Between two steps workers may
    join and leave: one that joins gets the state from rank 0, and goes on with the step of the
    others. ``rank()`` and ``size()`` change only there. SIGTERM lets this worker leave there:
    :class:`Departed` is raised, in the main thread, unless the script has a handler of its own.

    The loop may exchange what it likes, but no verb may wait for a worker that has been lost: such
    an error ends the loop (:func:`run` goes back to the last commit). Not thread-safe. Raises
    :class:`~bpsx.errors.ConfigError`, and the error that has ended the job.
    """
    if not isinstance(state, State):
        raise ConfigError(f"elastic.steps: state is {type(state).__name__}; expected a bpsx.State")
    return steps_of(State, number, [state], {})
