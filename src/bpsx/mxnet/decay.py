"""The momentum of weight decay, where compression has that of gradients: onebit would lose the decay (as BytePS has it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np


class DecayMomentum:
    """Of one SGD: m = mu m + wd w, and w -= lr mu m besides what the optimizer does. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Any]] = {}       # by the Parameter's number: on each device

    @contextmanager
    def around(self, parameters: Mapping[int, Any], mu_of: Callable[[int], float], optimizer: Any) -> Iterator[None]:
        """Inside, ``optimizer`` steps. ``parameters``: by number, those whose gradients' momentum is added by onebit on the way."""
        new = {}
        for i, parameter in parameters.items():
            wd = optimizer._get_wd(i)
            if wd:
                weights = [data for data in parameter.list_data() if data._fresh_grad]      # others are left alone
                before = self._kept.get(i) or [mx.nd.zeros_like(w) for w in weights]
                new[i] = weights, [mu_of(i) * m.as_in_context(w.context) + wd * w for m, w in zip(before, weights, strict=False)]
        yield
        for i, (weights, momenta) in new.items():
            if any(data._fresh_grad for data in weights):
                continue            # an overflow: nothing was done
            self._kept[i] = momenta or self._kept.get(i, [])
            for weight, m in zip(weights, momenta, strict=True):
                weight -= optimizer._get_lr(i) * mu_of(i) * m

    def save(self) -> dict[str, np.ndarray]:
        """The first device's, by number."""
        return {str(i): momenta[0].asnumpy() for i, momenta in self._kept.items() if momenta}

    def load(self, saved: Mapping[str, np.ndarray], contexts: list[Any]) -> None:
        """Put back what :meth:`save` has given."""
        self._kept = {int(i): [mx.nd.array(m, ctx=ctx, dtype=m.dtype) for ctx in contexts] for i, m in saved.items()}
