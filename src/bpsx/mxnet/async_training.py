"""Asynchronous training with MXNet's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from bpsx.errors import ConfigError
from bpsx.mxnet.ops import check_array, copy_to_devices, overwrite, submit
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
            mark = mx.nd.zeros((1,), dtype="uint8", ctx=mx.cpu())
            submit(change, name, priority=-i, mark=mark)
            _assign_if(mark, copies[0], change)
            copy_to_devices(copies)


def _assign_if(mark: Any, weight: Any, value: Any) -> None:
    """Overwrite ``weight`` with ``value``, of its shape, if ``mark`` is not 0.

    Both may be arrays of npx.set_np(), whose reshape() makes copies.

    The engine runs no operation on an array that could not be computed. But once it has raised the
    error anywhere, it forgets it, and runs such operations as are left.
    """
    with mx.autograd.pause():
        here = mx.nd.zeros((1,), dtype="uint8", ctx=weight.context)
        mark.copyto(here)
        row = weight.as_nd_ndarray().reshape((1, -1))
        mx.nd.where(here, value.as_nd_ndarray().reshape((1, -1)), row, out=row)
