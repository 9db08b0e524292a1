"""Gradient exchange of one Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mxnet as mx

from bpsx.mxnet.names import name_of
from bpsx.mxnet.ops import add_devices, overwrite, submit
from bpsx.plugin import adapter
from bpsx.plugin.compression_params import Params, check_names
from bpsx.plugin.exchange import PREFIX, USED_COUNTS, GradientExchange
from bpsx.plugin.momentum import Momentum
from bpsx.plugin.steps import Step

#: Under this prefix and the first parameter's name workers count how many of them are in a step.
WORKER_COUNTS = "Workers with gradients from "
#: Prefixes of all names that an exchange uses.
BEGINNINGS = (PREFIX, USED_COUNTS, WORKER_COUNTS)
_VERB = "DistributedTrainer"


class Exchange(GradientExchange):
    """Sums gradients over a worker's devices and over all workers, in place.

    ``params``: ``compression_params``. ``momentum``: the optimizer's. Not thread-safe.

    Raises :class:`ConfigError`.
    """

    def __init__(self, parameters: Sequence[Any], params: Params, momentum: Momentum) -> None:
        self._parameters, self.names = list(parameters), [name_of(p) for p in parameters]
        self._own = [str(p.name) for p in parameters]  # as users know them
        super().__init__(_VERB, params, has_momentum=momentum.has_value, names=self.names)
        check_names(params, self._own, _VERB)
        self._momentum = momentum

    def __call__(
        self,
        rate: Callable[[], float],
        scale: float = 1.0,
        absent: Sequence[int] = (),
        average: bool = False,
        counts: bool = False,
    ) -> Any:
        """Begin to exchange all gradients, times ``scale``; the first ones are the most urgent.

        ``rate``: returns the learning rate; called if compression needs it. ``absent``: indices of
        the Parameters to leave out. ``average``: average over workers instead of summing.
        ``counts``: return an int32 array that will hold the number of workers that are summed.
        Raises :class:`ConfigError`.
        """
        trained = [
            name
            for name, p in zip(self.names, self._parameters, strict=True)
            if p.grad_req != "null"
        ]
        self.declare_all(
            trained, self._momentum, lambda: dict(zip(self.names, self._own, strict=True))
        )
        now = rate() if self.needs_rate else -1.0
        session, workers = adapter.session(), None
        with Step(session) if session.shrinks else nullcontext() as step:
            for i, parameter in enumerate(self._parameters):
                if parameter.grad_req == "null" or i in absent:
                    continue
                gradients = parameter.list_grad()
                add_devices(gradients)
                if scale != 1.0:
                    with mx.autograd.pause():
                        gradients[0] *= scale
                how = {"average": average, "priority": -i, "rate": now, "step": step}
                overwrite(gradients, PREFIX + self.names[i], **how)
            if counts and self.names:
                workers = mx.nd.ones((1,), dtype="int32", ctx=mx.cpu())
                submit(workers, WORKER_COUNTS + self.names[0], step=step)
        return workers

    def agree_on_users(self) -> list[int]:
        """Set gradients to zero that are new on other workers but not on this one.

        They are then exchanged like new ones. Returns the indices of Parameters without a new
        gradient on any worker.
        """
        if not self._parameters:
            return []
        own = [
            p.grad_req != "null" and any(data._fresh_grad for data in p.list_data())
            for p in self._parameters
        ]
        counts = mx.nd.array(own, dtype="int32", ctx=mx.cpu())
        submit(counts, USED_COUNTS + self.names[0])
        users = counts.asnumpy()
        for parameter in (p for p, count in zip(self._parameters, users, strict=True) if count):
            for data, gradient in zip(parameter.list_data(), parameter.list_grad(), strict=True):
                if not data._fresh_grad:
                    gradient[:] = 0
                    data._fresh_grad = True
        return [i for i, count in enumerate(users) if not count]
