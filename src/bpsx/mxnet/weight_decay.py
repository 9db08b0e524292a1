"""The momentum of weight decay, where compression has that of gradients: onebit would lose the
decay (as BytePS has it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np


class DecayMomentum:
    """Of one SGD: m = mu m + wd w, and w -= lr mu m besides what the optimizer does.

    Not thread-safe.
    """

    def __init__(self) -> None:
        # by the Parameter's number: on each device, float32
        self.kept: dict[int, list[Any]] = {}

    @contextmanager
    def around(
        self,
        parameters: Sequence[Any],
        mus: Mapping[int, float],
        optimizer: Any,
        updaters: Sequence[Any],
    ) -> Iterator[None]:
        """Inside, ``optimizer`` steps.

        ``mus``: by the numbers of those whose gradients' momentum is added by onebit on the way,
        its factor; ``updaters``: the optimizer's, for each device.
        """
        new = {}
        for i, mu in mus.items():
            weights, wd = _dense(parameters[i]), optimizer._get_wd(i)
            if wd and all(w._fresh_grad for w in weights):  # others are left alone
                new[i] = self._grown(i, weights, mu, wd)
        yield
        for i, momenta in new.items():
            weights = _dense(parameters[i])
            if any(w._fresh_grad for w in weights):
                continue  # an overflow: nothing was done
            self.kept[i] = momenta
            for weight, m, updater in zip(weights, momenta, updaters, strict=True):
                _subtract(weight, optimizer._get_lr(i) * mus[i] * m, updater.states.get(i))

    def _grown(self, i: int, weights: Sequence[Any], mu: float, wd: float) -> list[Any]:
        before = self.kept.get(i) or _nothing(weights)
        return [mu * m + wd * w.astype(np.float32) for m, w in zip(before, weights, strict=True)]

    def expect(self, i: int, parameter: Any, there: bool) -> None:
        """Have one of the Parameter with that number, or none."""
        if not there:
            self.kept.pop(i, None)
        elif i not in self.kept:
            self.kept[i] = _nothing(_dense(parameter))

    def save(self) -> dict[str, np.ndarray]:
        """The first device's, by number."""
        return {str(i): momenta[0].asnumpy() for i, momenta in self.kept.items()}

    def load(self, saved: Mapping[str, np.ndarray], contexts: Sequence[Any]) -> None:
        """Put back what :meth:`save` has given."""
        self.kept = {
            int(i): [mx.nd.array(m, ctx=ctx) for ctx in contexts] for i, m in saved.items()
        }


def _nothing(weights: Sequence[Any]) -> list[Any]:
    return [mx.nd.zeros(w.shape, ctx=w.context) for w in weights]


def _dense(parameter: Any) -> list[Any]:
    """The copies on each device; of the one kind also where npx.set_np() makes arrays of the
    other.
    """
    return [w.as_nd_ndarray() for w in parameter.list_data()]


def _subtract(weight: Any, change: Any, state: Any) -> None:
    """From a weight; of one in half precision that the optimizer has in float32, too
    (multi_precision), from that.
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
