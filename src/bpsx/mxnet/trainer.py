"""DistributedTrainer: gluon's Trainer on several workers."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import mxnet as mx

from bpsx.errors import ConfigError, MismatchError
from bpsx.mxnet import checkpoint
from bpsx.mxnet.async_training import Weights
from bpsx.mxnet.broadcast import PREFIX
from bpsx.mxnet.exchange import BEGINNINGS, Exchange
from bpsx.mxnet.names import name_of
from bpsx.mxnet.ops import add_devices, behind_engine, copy_to_devices, overwrite
from bpsx.mxnet.optimizer import DistributedOptimizer
from bpsx.mxnet.optimizer_state import share
from bpsx.mxnet.startup import refusal_of
from bpsx.mxnet.weight_decay import DecayMomentum
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_root
from bpsx.plugin.async_training import refuse_gradients
from bpsx.plugin.compression_params import Params
from bpsx.plugin.momentum import Momentum, decay_factors
from bpsx.session.refusals import counted_together
from bpsx.system.tracebacks import public, public_methods

log = logging.getLogger("bpsx.mxnet")
_VERB = "DistributedTrainer"
_DECAY = "decay"
#: Optimizers whose momentum is a momentum of gradients.
_WITH_MOMENTUM = (mx.optimizer.SGD, mx.optimizer.NAG)


_Since: TypeAlias = tuple[weakref.ref[Any], int]


def _since() -> _Since:
    """Return the session and its number of entries: a change of either begins the steps anew."""
    session = adapter.session()
    return weakref.ref(session), session.entries


def _check_engine() -> None:
    """Raise :class:`ConfigError` for an engine that ends each operation before the next is made.

    The first one of a step would wait for the others for ever.
    """
    naive = adapter.child_environment().get("MXNET_ENGINE_TYPE") == "NaiveEngine"
    if naive and adapter.session().shrinks:
        raise ConfigError(
            f"{_VERB}: MXNET_ENGINE_TYPE=NaiveEngine makes one exchange after the other, which does"
            " not work with BPSX_ELASTIC=shrink, where a step's exchanges end together. Omit it, or"
            " set BPSX_ELASTIC=servers"
        )


@public_methods
class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A gluon Trainer that applies the gradients of all workers.

    ``params``: the result of ``collect_params()``, a dict or a list of Parameters, the same on all
    workers. ``optimizer``: a name or an optimizer, with ``optimizer_params``. In the first step all
    workers get worker ``root_rank``'s weights. A Parameter whose shape is not known then gets them
    in the step in which its shape is known. ``step(batch_size)`` takes the size of one worker's
    batch; gradients are summed, and divided by ``batch_size`` and the number of workers.
    ``compression_params``: as for :func:`bpsx.torch.DistributedOptimizer`, one for all or by
    Parameters' names; its momentum replaces that of SGD and NAG.

    ``step(..., ignore_stale_grad=True)`` updates Parameters that have a new gradient on any worker.
    ``save_states()`` includes the state of compression, so each worker needs a file of its own. In
    asynchronous training the weights' changes travel, see ``docs/train/async.md``. Sparse
    Parameters and gradients are refused. Raises :class:`~bpsx.errors.ConfigError`,
    :class:`~bpsx.errors.NotInitializedError`, :class:`~bpsx.errors.PeerLostError`. Later failures
    are a :class:`mxnet.MXNetError` where weights, or values computed from them, are waited for. Not
    thread-safe.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        root_rank: int = 0,
        compression_params: Params = None,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            log.warning(
                "%s exchanges gradients itself, so it ignores the DistributedOptimizer around the"
                " optimizer",
                _VERB,
            )
            optimizer = optimizer._optimizer
        if not isinstance(optimizer, (str, mx.optimizer.Optimizer)):
            raise ConfigError(
                f"{_VERB}: optimizer={optimizer!r}: must be a name, such as 'sgd', or an optimizer"
                " of MXNet"
            )
        _check_engine()
        self._root = checked_root(root_rank, _VERB, adapter.session().size)
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        counts: Counter[Any] = Counter(self._params)
        twice = [p.name for p, count in counts.items() if count > 1]
        if twice:
            raise ConfigError(
                f"{_VERB}: these Parameters are given twice: {', '.join(twice[:5])}; give each"
                " Parameter once"
            )
        sparse = [
            p.name for p in self._params if p._stype != "default" or p._grad_stype != "default"
        ]
        if sparse:
            raise ConfigError(
                f"{_VERB}: {', '.join(sparse[:5])}: sparse Parameters and gradients cannot be"
                " sent; omit stype, grad_stype and sparse_grad"
            )
        this: Any = weakref.ref(self)
        self._taken = Momentum(lambda: this()._optimizer, _WITH_MOMENTUM)
        self._exchange = Exchange(self._params, compression_params, self._taken)
        self._weights, self._decay = Weights(), DecayMomentum()
        self._known_to, self._alike = _since(), False
        # The session and entries of the last comparison, and its error.
        self._compared_in, self._refusal = None, ""
        # The number of workers in the sums of allreduce_grads(), an array; None: of all.
        self._summed: Any = None

    # ---- overridden parts of gluon's Trainer

    def _init_kvstore(self) -> None:
        self._kvstore, self._distributed, self._update_on_kvstore, self._kv_initialized = (
            None,
            False,
            False,
            True,
        )

    _params_to_init: list[Any]
    _known_to: _Since
    _compared_in: _Since | None

    def _init_params(self) -> None:
        deferred = []
        for parameter in self._params_to_init:
            if parameter._deferred_init:
                deferred.append(parameter)
            else:
                overwrite(parameter.list_data(), PREFIX + name_of(parameter), root=self._source)
        self._params_to_init = deferred

    def _check_and_rescale_grad(self, scale: float) -> None:
        session = adapter.session()
        if not session.config.asynchronous:
            scale /= session.size if self._summed is None else int(self._summed.asscalar())
        super()._check_and_rescale_grad(scale)

    def _allreduce_grads(self) -> None:
        refuse_gradients(_VERB, "call step()")
        # If workers may be lost, only the sums know how many workers are in them.
        self._summed = self._exchange(self._rate, counts=adapter.session().shrinks)

    def _update(self, ignore_stale_grad: bool = False) -> None:
        known = (
            decay_factors(self._exchange.choices)
            if isinstance(self._optimizer, _WITH_MOMENTUM)
            else {}
        )
        mus = {i: known[name] for i, name in enumerate(self._exchange.names) if name in known}
        with (
            self._taken.off(),
            self._decay.around(self._params, mus, self._optimizer, self._updaters),
        ):
            super()._update(ignore_stale_grad)

    def _rate(self) -> float:
        """Learning rate of the current step."""
        scheduler = self._optimizer.lr_scheduler
        return float(
            self._optimizer.lr if scheduler is None else scheduler(self._optimizer.num_update + 1)
        )

    # ---- public methods

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """As gluon's ``step``, with the gradients of all workers. ``batch_size``: this worker's."""
        self._prepare()
        if adapter.session().config.asynchronous:
            self._exchange.check_async()
            self._check_and_rescale_grad(self._scale / batch_size)
            self._step_asynchronously(ignore_stale_grad)
            return
        self._optimizer.rescale_grad = self._exchange_scaled(batch_size, ignore_stale_grad)
        self._update(ignore_stale_grad)

    @counted_together(*BEGINNINGS)
    @behind_engine
    def _exchange_scaled(self, batch_size: int, ignore_stale_grad: bool) -> float:
        """Exchange gradients for a batch of ``batch_size`` on each worker.

        Returns the factor by which the gradients are still to be multiplied.
        """
        # Scale before the exchange: workers' batches may differ in size, and compression keeps its
        # state in these units. A loss's scale is left to the optimizer where possible: small
        # gradients would be lost in half precision.
        after = 1.0 if self._exchange.compresses else self._scale
        session = adapter.session()
        # If workers may be lost, only the server knows how many workers it sums.
        average = session.shrinks
        scale = self._scale / after / (batch_size * (1 if average else session.size))
        absent = self._exchange.agree_on_users() if ignore_stale_grad else ()
        self._exchange(self._rate, scale, absent, average)
        return after

    def _step_asynchronously(self, ignore_stale_grad: bool) -> None:
        trained = [p for p in self._params if p.grad_req != "null"]
        for parameter in trained:
            gradients = parameter.list_grad()
            add_devices(gradients)
            copy_to_devices(gradients)
        self._weights.step_of(
            self._optimizer,
            lambda: self._update(ignore_stale_grad),
            {name_of(p): p.list_data() for p in trained},
        )

    @counted_together(*BEGINNINGS)
    @behind_engine
    def allreduce_grads(self) -> None:
        """As gluon's, over all workers' devices, for code that uses the sums before update()."""
        self._prepare()
        super().allreduce_grads()

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """As gluon's ``update``, after ``allreduce_grads()``."""
        refuse_gradients(_VERB, "call step()")
        super().update(batch_size, ignore_stale_grad)

    def _prepare(self) -> None:
        session, since = adapter.session(), _since()
        # after resume(), or with workers that have joined, some may never have had these weights
        if self._known_to != since:
            _check_engine()
            self._known_to, self._params_to_init, self._alike = since, list(self._params), False
        if self._compared_in != since:
            self._compared_in, self._refusal = since, refusal_of(self._params)
        if self._refusal:  # in each later step, too, which would mix different Parameters
            raise MismatchError(self._refusal)
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()
        if not self._alike and not session.config.asynchronous:
            self.take_states(self._source)
        self._alike = True

    @property
    def _source(self) -> int:
        """The worker whose weights all get; in a job that workers have joined, the oldest one."""
        return 0 if adapter.session().entries else self._root

    def take_states(self, root: int) -> None:
        """Take the optimizer state of worker ``root``; see :func:`broadcast_optimizer_state`."""
        share(self._params, self._optimizer, self._updaters, self._decay, root)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Context in which gluon's Trainer does not get the root's weights.

        Other workers may not make this call, and this worker's weights may be loaded later.
        """
        waiting, self._params_to_init = self._params_to_init, []
        try:
            yield
        finally:
            self._params_to_init = waiting

    def save_states(self, fname: str) -> None:
        """As gluon's, with the state of compression: each worker needs a file of its own.

        Waits for the operations that the engine has been given.
        """
        adapter.finish()
        with self._by_itself():
            super().save_states(fname)
        if self._exchange.compresses:
            kept = {**self._exchange.keeping.save(), _DECAY: self._decay.save()}
            checkpoint.append(fname, kept)

    def load_states(self, fname: str) -> None:
        """As gluon's; for a file without compression, the state of compression begins anew.

        Raises :class:`~bpsx.errors.ConfigError` if it is no such file, or one of other gradients.
        """
        adapter.finish()
        with self._by_itself():
            try:
                super().load_states(fname)
            except OSError:
                raise
            except Exception as e:  # reading may raise anything
                raise ConfigError(
                    f"load_states: {str(fname)!r} was not written by save_states(): {e}"
                ) from e
        if self._exchange.compresses:
            saved = checkpoint.read(fname)
            self._decay.load(saved.pop(_DECAY, {}), self._contexts)
            self._exchange.load(saved)


@public
def broadcast_optimizer_state(trainer: DistributedTrainer, root_rank: int = 0) -> None:
    """Give all workers' optimizers the state of worker ``root_rank``'s.

    The state is momenta and the like, and counts of updates, which learning rate schedules follow.
    Call it after :func:`bpsx.mxnet.join`, with the worker that ``join`` returns. In the first step
    of a job, also of one that :func:`bpsx.mxnet.resume` has joined, a trainer does so by itself.
    Parameters without a shape have no state yet. The state of compression stays each worker's own.
    Raises :class:`~bpsx.errors.ConfigError`, :class:`~bpsx.errors.NotInitializedError`,
    :class:`mxnet.MXNetError`. Not thread-safe.
    """
    verb = "broadcast_optimizer_state"
    if not isinstance(trainer, DistributedTrainer):
        raise ConfigError(
            f"{verb}: trainer is a {type(trainer).__name__}; expected a DistributedTrainer"
        )
    trainer.take_states(checked_root(root_rank, verb, adapter.session().size))
