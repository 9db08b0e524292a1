"""Asynchronous training: a worker steps on its own gradients and pushes its weights' changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bpsx.errors import ConfigError
from bpsx.mxnet.ops import check_array, overwrite
from bpsx.plugin import adapter

PREFIX = "Async."


class Weights:
    """Synchronizes the weights of one optimizer with the servers, which hold them.

    The servers start from worker 0's weights. All workers wait for these before the first step; no
    later step waits for another worker. Not thread-safe.
    """

    def __init__(self) -> None:
        # names whose weights the servers hold, by session
        self._seeded: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    def step(
        self, update: Callable[[], Any], weights: Mapping[str, Sequence[Any]], optimizer: Any
    ) -> None:
        """Let ``update`` change ``weights``, push the changes, and take the servers' weights.

        ``weights``: by name, the copies on each device. ``optimizer``: the optimizer that
        ``update`` uses. Raises :class:`ConfigError` if the optimizer keeps weights of its own.
        """
        if optimizer.multi_precision and any(
            copies[0].dtype == np.float16 for copies in weights.values()
        ):
            raise ConfigError(
                "multi_precision=True cannot be used with BYTEPS_ENABLE_ASYNC=1, because the"
                " optimizer keeps float32 weights of its own while the servers' weights are the"
                " ones that count; omit it, or train in float32"
            )
        seeded = self._seeded.setdefault(adapter.session(), set())
        for name, copies in weights.items():
            check_array(copies[0], f"weight {name!r}")
            if name not in seeded:
                overwrite(copies, PREFIX + name, root=0)
                seeded.add(name)
        changes = {name: copies[0].copy() for name, copies in weights.items()}
        update()
        for i, (name, copies) in enumerate(weights.items()):
            # A separate array: if an exchange fails, the worker's own weights stay.
            change = changes[name]
            change[:] = copies[0] - change
            overwrite([change, *copies], PREFIX + name, priority=-i)
