"""Momentum of weight decay, where compression adds the momentum of gradients.

The compressor onebit would lose the decay. BytePS does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np


class DecayMomentum:
    """Momentum of one SGD's weight decay.

    m = mu m + wd w, and w -= lr mu m in addition to the optimizer's own step. Not thread-safe.
    """

    def __init__(self) -> None:
        # float32 momenta on each device, by the Parameter's index
        self.kept: dict[int, list[Any]] = {}

    @contextmanager
    def around(
        self,
        parameters: Sequence[Any],
        mus: Mapping[int, float],
        optimizer: Any,
        updaters: Sequence[Any],
    ) -> Iterator[None]:
        """Context in which ``optimizer`` steps; applies the momentum of weight decay afterwards.

        ``mus``: the factor of each Parameter whose gradient gets its momentum on the way from
        onebit, by index. ``updaters``: the optimizer's, one for each device.
        """
        new = {}
        for i, mu in mus.items():
            weights, wd = _dense(parameters[i]), optimizer._get_wd(i)
            if wd and all(w._fresh_grad for w in weights):  # the optimizer does not update others
                new[i] = self._grown(i, weights, mu, wd)
        yield
        for i, momenta in new.items():
            weights = _dense(parameters[i])
            if any(w._fresh_grad for w in weights):
                continue  # overflow: the optimizer has done nothing
            self.kept[i] = momenta
            for weight, m, updater in zip(weights, momenta, updaters, strict=True):
                _subtract(weight, optimizer._get_lr(i) * mus[i] * m, updater.states.get(i))

    def _grown(self, i: int, weights: Sequence[Any], mu: float, wd: float) -> list[Any]:
        before = self.kept.get(i) or _nothing(weights)
        return [mu * m + wd * w.astype(np.float32) for m, w in zip(before, weights, strict=True)]

    def expect(self, i: int, parameter: Any, there: bool) -> None:
        """Keep or make momenta for Parameter number ``i`` if ``there``; otherwise drop them."""
        if not there:
            self.kept.pop(i, None)
        elif i not in self.kept:
            self.kept[i] = _nothing(_dense(parameter))

    def save(self) -> dict[str, np.ndarray]:
        """Return the first device's momenta, by index."""
        return {str(i): momenta[0].asnumpy() for i, momenta in self.kept.items()}

    def load(self, saved: Mapping[str, np.ndarray], contexts: Sequence[Any]) -> None:
        """Restore the momenta that :meth:`save` has returned."""
        self.kept = {
            int(i): [mx.nd.array(m, ctx=ctx) for ctx in contexts] for i, m in saved.items()
        }


def _nothing(weights: Sequence[Any]) -> list[Any]:
    return [mx.nd.zeros(w.shape, ctx=w.context) for w in weights]


def _dense(parameter: Any) -> list[Any]:
    """Return the copies on each device, as classic NDArrays even after npx.set_np()."""
    return [w.as_nd_ndarray() for w in parameter.list_data()]


def _subtract(weight: Any, change: Any, state: Any) -> None:
    """Subtract ``change`` from a weight.

    With multi_precision the optimizer has a float32 copy of a float16 weight, which is changed,
    too.
    """
    whole = (
        state[-1]
        if isinstance(state, (list, tuple)) and state and weight.dtype == np.float16
        else None
    )
    if whole is None:
        weight -= change.astype(weight.dtype)
    else:
        whole = whole.as_nd_ndarray()
        whole -= change
        weight[:] = whole.astype(weight.dtype)
