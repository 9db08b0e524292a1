"""DistributedOptimizer: pushes gradients during backward and averages them before the step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import checked_passes
from bpsx.plugin.async_training import refuse_compression
from bpsx.plugin.compression import check_not_both
from bpsx.plugin.compression_params import Params, choose
from bpsx.plugin.exchange import PREFIX
from bpsx.system.tracebacks import public, public_methods, warn
from bpsx.torch import checkpoint
from bpsx.torch.async_training import AsyncExchange
from bpsx.torch.compression import Compression, Compressor, check_compression
from bpsx.torch.dynamo import eager
from bpsx.torch.exchange import Exchange, GradientOrderError
from bpsx.torch.lr_schedulers import current_rates, patch_step_again, take_patched_step
from bpsx.torch.momentum import Momenta
from bpsx.torch.names import Names, names_of

#: At most so many calls lie between GradScaler's read of ``param_groups`` and the wait.
_FRAMES = 4


@public
def DistributedOptimizer(  # noqa: N802  (BytePS's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    compression_params: Params = None,
) -> _DistributedOptimizer:
    """Make ``optimizer`` average gradients over all workers before it steps.

    Returns the same object, now of a subclass of its class. So ``isinstance``, ``param_groups``,
    ``state_dict`` and learning-rate schedulers work as before.

    Call it after ``init()`` and the same way on all workers. Each gradient is pushed as soon as
    backward has finished it; ``step()`` waits for all of them, then steps. Parameters that come
    first in ``named_parameters`` are the most urgent, because the next forward pass needs them
    first.

    Arguments:
    - ``named_parameters``: (name, parameter) pairs, usually ``model.named_parameters()``, naming at
      least all parameters of ``optimizer``. Names, order, shapes and dtypes must be the same on all
      workers. The first step compares them, and a sample of the weights (``BPSX_CHECK_WEIGHTS``).
      Default names are ``push_pull.noname.<group>.<index>``; the second such optimizer's are
      ``push_pull.noname.1.<group>.<index>``, and so on. Create optimizers without names in the same
      order on all workers. Two live distributed optimizers need different names. An optimizer for
      the same parameters under the same names replaces the earlier one, which can step no more.
    - ``compression``: one of :class:`Compression`, for the wire only.
    - ``compression_params``: how servers and workers compress gradients: a mapping as in
      ``docs/train/compression.md``, for example ``{"compressor": "onebit", "ef": "vanilla"}``. It
      applies to all parameters and is the same on all workers. It excludes ``compression``.
    - ``backward_passes_per_step``: number of backward passes whose gradients are added up locally
      before they are pushed. The result is averaged over workers, not over passes; divide the loss
      to average over passes.

    **Looking at gradients.** Gradients are in flight from ``backward()`` to the end of ``step()``.
    Writing to one, or setting ``grad`` to another tensor, then makes the wait raise a
    :class:`GradientOrderError` with the parameter's name. Writes through ``grad.data`` are not
    noticed. Neither are writes to a gradient that is a part of larger memory: views of one flat
    buffer share a write counter, which backward and bpsx increment too. ``synchronize()`` waits for
    gradients. Reading ``param_groups`` does so as well, and a ``step()`` after that neither waits
    nor pushes again. So ``torch.amp.GradScaler`` works unchanged, and an overflow on one worker is
    an overflow on all. Read ``param_groups`` before the first or after the last backward of a step.

    **Parameters without a gradient.** Workers may use different parameters in a step: a worker
    without a gradient counts as zeros. A parameter that no worker has used has no ``grad`` after
    the step and does not move, as in one process. Freeze and unfreeze parameters
    (``requires_grad``) on all workers in the same step; otherwise the step raises
    :class:`~bpsx.errors.MismatchError` on all workers.

    **Sparse gradients**, as of ``nn.Embedding(sparse=True)``, travel as values and indices. Their
    number may differ between workers and may be zero; ``grad`` is then coalesced.
    ``sparse_as_dense=True`` makes them dense first. For SparseAdam, which accepts only sparse
    gradients, ``grad`` is then made sparse again, from the rows that are not zero. A gradient must
    be sparse on all workers that have one, or dense on all; otherwise ``step()`` raises
    :class:`~bpsx.errors.MismatchError` on all workers. (A gradient that has been dense so far is
    sent dense.) A worker that has called :func:`bpsx.torch.join` cannot be left out of a sparse
    exchange: :class:`~bpsx.errors.JoinedError`.

    **Asynchronous training** (``BYTEPS_ENABLE_ASYNC=1``): ``step()`` steps on the worker's own
    gradients and exchanges weights; see ``docs/train/async.md``. There ``synchronize()`` does
    nothing, and ``skip_synchronize()``, ``backward_passes_per_step`` and ``sparse_as_dense`` have
    no effect.

    Copies, deep or serialized, are plain optimizers of the original class, because names and hooks
    belong to the parameters of this optimizer.

    Extra methods: ``synchronize()``, ``skip_synchronize()``, ``set_backward_passes_per_step(n)``.
    With a single worker (unless ``BYTEPS_FORCE_DISTRIBUTED``) nothing is sent or compressed.

    Raises :class:`ConfigError` (a :class:`ValueError`) for names given twice or in use by another
    live optimizer, parameters without a name, LBFGS, and compression in asynchronous training;
    :class:`~bpsx.torch.UnsupportedTensor` and :class:`~bpsx.dtypes.UnsupportedDType` for parameters
    that cannot be sent; :class:`~bpsx.errors.NotInitializedError`. ``backward()`` raises
    :class:`UnsupportedTensor` for gradients that cannot be sent, and :class:`GradientOrderError` if
    it runs again before ``step()``. ``step()`` raises the error that made a push fail, as
    :func:`bpsx.torch.synchronize` does. Not thread-safe.
    """
    return distribute(
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        sparse_as_dense,
        compression_params=compression_params,
    )


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    compression: type[Compressor],
    backward_passes_per_step: int,
    sparse_as_dense: bool,
    average: bool = True,
    compression_params: Params = None,
) -> _DistributedOptimizer:
    """Same as :func:`DistributedOptimizer`; with ``average=False`` gradients are summed instead.

    Asynchronous training does not support sums.
    """
    check_optimizer(optimizer)
    check_options(compression, sparse_as_dense)
    names = names_of(optimizer, named_parameters)
    momenta = Momenta(optimizer, {id(p): name for name, p in names})
    choices = choose(
        compression_params, [name for name, _ in names], "DistributedOptimizer", momenta.by_name()
    )
    check_not_both(compression, choices, "DistributedOptimizer")
    passes = checked_passes(backward_passes_per_step, "DistributedOptimizer")
    exchange = _exchange_for(
        optimizer, names, compression, passes, sparse_as_dense, average, choices
    )
    momenta.take_over(choices)
    mixed = cast("_DistributedOptimizer", mix_in(_DistributedOptimizer, optimizer, exchange))
    if any(c.momentum for c in choices.values()):
        mixed._momenta = momenta
    return mixed


def check_optimizer(optimizer: Any, verb: str = "DistributedOptimizer") -> None:
    """Raise :class:`ConfigError` for an optimizer that cannot be made distributed."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{verb}: optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    if isinstance(optimizer, _DistributedOptimizer):
        raise ConfigError(f"{verb}: this optimizer is distributed already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{verb}: LBFGS evaluates its closure several times per step, each time with other"
            " weights, so its gradients cannot be averaged once per step; use a first-order"
            " optimizer (SGD, Adam, …)"
        )


def check_options(
    compression: Any, sparse_as_dense: Any, verb: str = "DistributedOptimizer"
) -> None:
    """Raise :class:`ConfigError` for an invalid compressor or ``sparse_as_dense``."""
    check_compression(compression, verb)
    adapter.check_flag(sparse_as_dense, "sparse_as_dense", verb)


def mix_in(
    mixin: type[_DistributedOptimizer], optimizer: torch.optim.Optimizer, exchange: Exchange
) -> torch.optim.Optimizer:
    """Put ``mixin`` in front of ``optimizer``'s class and start the exchange of gradients.

    Returns the same object.
    """
    scheduled = take_patched_step(optimizer)
    base = type(optimizer)
    optimizer.__class__ = type(
        base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__}
    )
    mixed = cast("_DistributedOptimizer", optimizer)
    mixed._exchange, mixed._should_synchronize = exchange, True
    if scheduled:
        patch_step_again(optimizer)
    exchange.attach()
    exchange.finalizer = weakref.finalize(optimizer, exchange.detach)
    exchange.finalizer.atexit = False
    return optimizer


if TYPE_CHECKING:

    class _Base:
        """Stands for the user's optimizer class, which follows the mixin in the method order."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            raise NotImplementedError

        def zero_grad(self, set_to_none: bool = True) -> None:
            raise NotImplementedError

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            raise NotImplementedError

        def state_dict(self) -> dict[str, Any]:
            raise NotImplementedError

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise NotImplementedError

else:
    _Base = object


@public_methods
class _DistributedOptimizer(_Base):
    """Mixin in front of the user's optimizer class; see :func:`DistributedOptimizer`."""

    _exchange: Exchange
    _should_synchronize: bool
    _momenta: Momenta | None = None
    #: Whether reading param_groups does not wait now, because no gradient is read.
    _leaves_gradients = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base class's parameter groups.

        Reading them waits for gradients in flight, since the reader may be about to use gradients.
        """
        if not self._leaves_gradients:
            self._exchange.wait_before_read(all_due=is_unscaled())
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Serialize as a plain optimizer: hooks and names belong to this one's parameters."""
        line = type(self).__mro__
        plain = line[line.index(_DistributedOptimizer) + 1]
        return object.__new__, (plain,), super().__getstate__()

    def synchronize(self) -> None:
        """Push the remaining gradients and wait until every ``grad`` holds the average.

        Use it to read or change gradients before the step (clipping, unscaling); then call
        ``step()`` inside :meth:`skip_synchronize`. Raises the error that made a push fail, once all
        pushes have ended.
        """
        exchange = self._exchange
        if exchange.settled:
            exchange.implicit = False
        else:
            exchange.complete()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step()`` takes gradients as they are, after :meth:`synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @contextmanager
    def _leaving_gradients(self) -> Iterator[None]:
        """Context in which reading ``param_groups`` does not wait for gradients in flight."""
        before, self._leaves_gradients = self._leaves_gradients, True
        try:
            yield
        finally:
            self._leaves_gradients = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up before a push.

        Restarts the count of every parameter.
        """
        self._exchange.set_passes(checked_passes(passes, "set_backward_passes_per_step"))

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate ``closure`` if given, wait for the averaged gradients, and step.

        Returns the closure's result. PyTorch's optimizers evaluate the closure once. An optimizer
        of another library (SAM) may evaluate it several times, equally often on all workers; it
        gets averages each time.
        """
        if isinstance(self._exchange, AsyncExchange):
            return self._exchange.step(super().step, closure)
        exchange = self._exchange
        if exchange.active:
            exchange.check_knows(vars(self)["param_groups"])
        if closure is not None and takes_closure(self):
            return self._step_with(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        with self._without_momentum():
            result = super().step()
        return result if closure is None else loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """Let the optimizer evaluate ``closure`` itself, as SAM does after moving the weights.

        An exchange of gradients follows each evaluation, so all workers must evaluate the closure
        equally often.
        """
        if self._exchange.under_way:  # left from a backward pass before step()
            self._settle()

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._settle()
            return loss

        with self._without_momentum():
            return super().step(averaged)

    def _settle(self) -> None:
        """Wait until gradients are averages, as :meth:`step` does before it steps."""
        exchange = self._exchange
        if self._should_synchronize:
            if exchange.synchronized and not exchange.implicit:
                warn(
                    "step() after synchronize() pushes all gradients again; call step() inside"
                    " optimizer.skip_synchronize()"
                )
            if not exchange.settled:
                exchange.complete()
        elif exchange.is_due:
            raise GradientOrderError(
                "step() was called inside skip_synchronize() while gradients are under way or have"
                " still to be pushed; call synchronize() first"
            )
        exchange.use()

    def _without_momentum(self) -> AbstractContextManager[None]:
        return nullcontext() if self._momenta is None else self._momenta.off()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as the base class.

        If gradients are in flight, it first waits for them and discards them. Do that on all
        workers or on none.
        """
        exchange = self._exchange
        if exchange.under_way:
            exchange.complete(discard=True)
        exchange.synchronized = exchange.implicit = False
        exchange.restart_count()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Same as the base class; the new parameters are the least urgent.

        Their generated names are ``push_pull.noname.<group>.<index>``, with this optimizer's
        number. If the optimizer was given names, the generated name contains its first parameter's
        name instead.
        """
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        if self._exchange.choices:
            warn(
                "a group was added to an optimizer with compression_params; the group's gradients"
                " are not compressed"
            )
        exchange = self._exchange
        params = enumerate(self.param_groups[group]["params"])
        exchange.add([(exchange.added_name(group, i), p) for i, p in params])

    def state_dict(self) -> dict[str, Any]:
        """Return the base class's state and the state of gradient compression.

        With ``compression_params``, the entry "bpsx" holds this worker's compression state; on
        worker 0 it also holds the servers' state. That is about twice the gradients' size, or three
        times with momentum. It waits for gradients in flight only for that entry, so without
        ``compression_params`` one worker may call it alone.
        """
        with self._leaving_gradients():
            found = super().state_dict()
        wires = self._wires()
        if wires:
            found[checkpoint.KEY] = checkpoint.save(wires)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Same as the base class, and restore the state of gradient compression.

        Only the worker that saved a compression state restores it; other workers start afresh, with
        a warning. For results bitwise equal to an uninterrupted run, each worker saves and loads a
        state of its own. Load the state on all workers before the next step.
        """
        super().load_state_dict({k: v for k, v in state_dict.items() if k != checkpoint.KEY})
        wires = self._wires()
        if wires:
            checkpoint.load(state_dict.get(checkpoint.KEY, checkpoint.NOTHING), wires)

    def _wires(self) -> dict[str, str]:
        """Return wire names of compressed gradients by parameter name; none is in flight."""
        exchange = self._exchange
        if not exchange.choices or not exchange.active:
            return {}
        if not adapter.initialised():
            warn(
                "state_dict() was called after shutdown(), so it does not contain the compression"
                " state; call it before shutdown()"
            )
            return {}
        exchange.wait_before_read()
        if exchange.under_way:
            warn(
                "state_dict() was called in a signal handler, a backward pass or another thread"
                " while gradients are under way, so it does not contain the compression state"
            )
            return {}
        return {name: PREFIX + name for name in exchange.choices}

    # Optimizer.__setstate__ (load_state_dict) would wrap step() and so run the user's step hooks
    # twice: the base class's step() runs them.
    step.hooked = True  # type: ignore[attr-defined]


def is_unscaled() -> bool:
    """Return whether a GradScaler reads the groups of the caller's optimizer.

    It divides the gradients by its scale and decides from them whether to skip the step, so it must
    see averages, also of gradients that only ``step()`` would push.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name == "_unscale_grads_":
            return True
    return False


def takes_closure(optimizer: _DistributedOptimizer) -> bool:
    """Return whether the optimizer may evaluate a closure otherwise than PyTorch's optimizers do.

    Those evaluate the closure once, first.
    """
    line = type(optimizer).__mro__
    base = line[line.index(_DistributedOptimizer) + 1]
    owner = next(cls for cls in base.__mro__ if "step" in vars(cls))
    return not owner.__module__.startswith("torch.optim.")


def needs_sparse(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer refuses dense gradients."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def _exchange_for(
    optimizer: torch.optim.Optimizer,
    names: Names,
    compression: type[Compressor],
    passes: int,
    sparse_as_dense: bool,
    average: bool,
    choices: dict[str, adapter.CompressionSpec],
) -> Exchange:
    """Create the exchange of gradients, or of weights in asynchronous training.

    Raises :class:`ConfigError`.
    """
    config, what = adapter.session().config, f"DistributedOptimizer ({type(optimizer).__name__})"
    if not config.asynchronous:
        exchange = Exchange(
            names,
            compression,
            passes,
            config.distributed,
            sparse_as_dense,
            average,
            choices,
            current_rates(optimizer),
            what,
            names.ordinal,
        )
        exchange.sparse_again = needs_sparse(optimizer)
        return exchange
    refuse_compression("DistributedOptimizer", compression, choices)
    if not average:
        raise ConfigError(
            "DistributedOptimizer: op=Sum cannot be used with BYTEPS_ENABLE_ASYNC=1, because each"
            " worker steps on its own gradients; omit op"
        )
    return AsyncExchange(names, passes, what, names.ordinal)
