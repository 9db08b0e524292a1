"""Gradient exchange of one Trainer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mxnet as mx

from bpsx.errors import ConfigError
from bpsx.mxnet.names import name_of
from bpsx.mxnet.ops import add_devices, overwrite, submit
from bpsx.plugin import adapter
from bpsx.plugin.checkpoint import Keeping
from bpsx.plugin.compression_params import Params, check_names, check_params, choose
from bpsx.plugin.momentum import Momentum

PREFIX = "Gradient."
#: Workers count the users of each gradient under this prefix and the first Parameter's name.
USERS = "Users of gradients from "
#: Prefixes of all names that an exchange uses.
BEGINNINGS = (PREFIX, USERS)
_VERB = "DistributedTrainer"


class Exchange:
    """Sums gradients over a worker's devices and over all workers, in place.

    ``params``: ``compression_params``. ``momentum``: the optimizer's. Not thread-safe.

    Raises :class:`ConfigError`.
    """

    def __init__(self, parameters: Sequence[Any], params: Params, momentum: Momentum) -> None:
        check_params(params, _VERB, momentum.has_value)
        check_names(params, [str(p.name) for p in parameters], _VERB)
        self._params, self._momentum = params, momentum
        self._parameters, self._names = list(parameters), [name_of(p) for p in parameters]
        # compression of the gradients that have one, by name
        self.choices: dict[str, adapter.CompressionSpec] = {}
        # declared names, by session
        self._declared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._begun: set[str] = set()  # names that this exchange has declared in any job
        self.keeping = Keeping([PREFIX + name for name in self._names])

    @property
    def compresses(self) -> bool:
        """Whether compression may keep state of the gradients."""
        return bool(self._params)

    def check_async(self) -> None:
        """Raise :class:`ConfigError` if gradients were to be compressed.

        In asynchronous training changes of weights travel in their place.
        """
        if self._params:
            raise ConfigError(
                f"{_VERB}: compression_params cannot be used with BYTEPS_ENABLE_ASYNC=1, because"
                " servers add what is pushed to the weights, in the weights' own dtype; omit it"
            )

    def of(self, i: int) -> adapter.CompressionSpec | None:
        """Return the compression of the i-th Parameter's gradient, if it has one."""
        return self.choices.get(self._names[i])

    def declare(self) -> None:
        """Declare how gradients travel, once in a job, and again when more Parameters are trained.

        Raises :class:`ConfigError`.
        """
        session = adapter.session()
        known = self._declared.setdefault(session, set())
        trained = self._trained()
        new = [name for name in trained if name not in known]
        if not new:
            return
        own = [str(p.name) for p in self._parameters]  # as users know them
        chosen = choose(self._params, own, _VERB, self._momentum.by_name(own))
        if not session.config.distributed:  # nothing travels
            chosen = {}
        self.choices = {
            name: chosen[o]
            for name, o in zip(self._names, own, strict=True)
            if o in chosen and name in trained
        }
        self._momentum.take_over(trained, self.choices)
        for name in new:
            session.declare(PREFIX + name, self.choices.get(name), anew=name not in self._begun)
        known.update(new)
        self._begun.update(new)
        self.keeping.put_back()

    def follow(self, optimizer: Any, of_gradients: bool) -> None:
        """Follow another optimizer that has replaced the earlier; see :meth:`Momentum.follow`."""
        self._momentum.follow(optimizer, of_gradients)
        if self.choices:
            self._momentum.take_over(self._trained(), self.choices)

    def _trained(self) -> list[str]:
        return [
            name
            for name, p in zip(self._names, self._parameters, strict=True)
            if p.grad_req != "null"
        ]

    def __call__(
        self, rate: Callable[[], float], scale: float = 1.0, absent: Sequence[int] = ()
    ) -> None:
        """Begin to exchange all gradients, times ``scale``; the first ones are the most urgent.

        ``rate``: returns the learning rate; called if compression needs it. ``absent``: indices of
        the Parameters to leave out.
        """
        self.declare()
        now = rate() if any(c.ef == "corrected" for c in self.choices.values()) else -1.0
        for i, parameter in enumerate(self._parameters):
            if parameter.grad_req == "null" or i in absent:
                continue
            gradients = parameter.list_grad()
            add_devices(gradients)
            if scale != 1.0:
                with mx.autograd.pause():
                    gradients[0] *= scale
            overwrite(gradients, PREFIX + self._names[i], priority=-i, rate=now)

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
        submit(counts, USERS + self._names[0])
        users = counts.asnumpy()
        for parameter in (p for p, count in zip(self._parameters, users, strict=True) if count):
            for data, gradient in zip(parameter.list_data(), parameter.list_grad(), strict=True):
                if not data._fresh_grad:
                    gradient[:] = 0
                    data._fresh_grad = True
        return [i for i, count in enumerate(users) if not count]

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue with state that :attr:`keeping` has saved, now or at the first exchange."""
        self.keeping.load(saved, adapter.session() in self._declared)
