"""``bpsx.elastic``: training with NumPy that goes on when workers are lost or join.

Set ``BPSX_ELASTIC=shrink`` on all processes. docs/train/uneven-and-elastic.md has an example.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bpsx.plugin import elastic
from bpsx.plugin.elastic import Departed, HostsUpdatedInterrupt, leave, run
from bpsx.plugin.objects import Tensors, broadcast_object

__all__ = ["Departed", "HostsUpdatedInterrupt", "State", "leave", "run"]


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
