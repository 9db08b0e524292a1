"""Asynchronous training with MXNet's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bpsx.errors import ConfigError
from bpsx.mxnet.ops import check_array, overwrite
from bpsx.plugin import async_training


class Weights(async_training.Weights[Sequence[Any]]):
    """Synchronizes the weights of one optimizer with the servers.

    A weight is the list of its copies on this worker's devices.
    """

    def step_of(
        self, optimizer: Any, update: Callable[[], Any], weights: Mapping[str, Sequence[Any]]
    ) -> None:
        """Do as :meth:`step` does. ``optimizer``: the optimizer that ``update`` uses.

        Raises :class:`ConfigError` if the optimizer keeps weights of its own.
        """
        if optimizer.multi_precision and any(
            copies[0].dtype == np.float16 for copies in weights.values()
        ):
            raise ConfigError(
                "multi_precision=True cannot be used with BYTEPS_ENABLE_ASYNC=1, because the"
                " optimizer keeps float32 weights of its own while the servers' weights are the"
                " ones that count; omit it, or train in float32"
            )
        for name, copies in weights.items():
            check_array(copies[0], f"weight {name!r}")
        self.step(update, weights)

    def _take(self, weights: Mapping[str, Sequence[Any]]) -> None:
        for name, copies in weights.items():
            overwrite(copies, name, root=0)

    def _copy(self, name: str, weight: Sequence[Any]) -> Any:
        return weight[0].copy()

    def _push(self, weights: Mapping[str, Sequence[Any]], before: Mapping[str, Any]) -> None:
        for i, (name, copies) in enumerate(weights.items()):
            # A separate array: if an exchange fails, the worker's own weights stay.
            change = before[name]
            change[:] = copies[0] - change
            overwrite([change, *copies], name, priority=-i)
