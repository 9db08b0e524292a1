"""Momentum of weight decay, where compression adds the momentum of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mxnet as mx
import numpy as np

from bpsx.plugin.momentum import decay_momentum


class _Decayed:
    """A Parameter's copy on one device in :func:`~bpsx.plugin.momentum.decay_momentum`."""

    def __init__(
        self,
        i: int,
        device: int,
        copy: Any,
        mu: float,
        optimizer: Any,
        updater: Any,
        kept: list[Any],
    ) -> None:
        self.mu, self.decay, self.weight = mu, optimizer._get_wd(i), copy.astype(np.float32)
        self.momentum = kept[device]
        self._i, self._device, self._copy, self._kept = i, device, copy, kept
        self._optimizer, self._updater = optimizer, updater

    def end(self, momentum: Any) -> None:
        if self._copy._fresh_grad:
            return  # overflow: the optimizer has done nothing
        self._kept[self._device] = momentum
        change = self._optimizer._get_lr(self._i) * self.mu * momentum
        _subtract(self._copy, change, self._updater.states.get(self._i))


class DecayMomentum:
    """Momentum of one SGD's weight decay. Not thread-safe."""

    def __init__(self) -> None:
        # float32 momenta on each device, by the Parameter's index
        self.kept: dict[int, list[Any]] = {}

    def around(
        self,
        parameters: Sequence[Any],
        mus: Mapping[int, float],
        optimizer: Any,
        updaters: Sequence[Any],
    ) -> AbstractContextManager[None]:
        """Context in which ``optimizer`` steps; applies the momentum of weight decay afterwards.

        ``mus``: the factor of each Parameter whose gradient gets its momentum on the way from
        onebit, by index. ``updaters``: the optimizer's, one for each device.
        """
        found = []
        for i, mu in mus.items():
            copies = _dense(parameters[i])
            # the optimizer does not update others
            if optimizer._get_wd(i) and all(w._fresh_grad for w in copies):
                self.expect(i, parameters[i], True)
                found += [
                    _Decayed(i, device, copy, mu, optimizer, updaters[device], self.kept[i])
                    for device, copy in enumerate(copies)
                ]
        return decay_momentum(found)

    def expect(self, i: int, parameter: Any, there: bool) -> None:
        """Keep or make momenta for Parameter number ``i`` if ``there``; otherwise drop them."""
        if not there:
            self.kept.pop(i, None)
        elif i not in self.kept:
            self.kept[i] = [mx.nd.zeros(w.shape, ctx=w.context) for w in _dense(parameter)]

    def save(self) -> dict[str, np.ndarray]:
        """Return the first device's momenta, by index."""
        return {str(i): momenta[0].asnumpy() for i, momenta in self.kept.items()}

    def load(self, saved: Mapping[str, np.ndarray], contexts: Sequence[Any]) -> None:
        """Restore the momenta that :meth:`save` has returned."""
        self.kept = {
            int(i): [mx.nd.array(m, ctx=ctx) for ctx in contexts] for i, m in saved.items()
        }


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
