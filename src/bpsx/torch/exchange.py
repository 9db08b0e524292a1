"""Exchange of one optimizer's gradients: hooks push during backward, the step waits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import adapter
from bpsx.plugin.exchange import PREFIX
from bpsx.session.refusals import counted
from bpsx.torch import _settling
from bpsx.torch._bucket import Hook
from bpsx.torch._gradient_state import Event, State
from bpsx.torch._gradients import Managed, version
from bpsx.torch.bucket import GradientInfo, bucket_of, push
from bpsx.torch.compression import Compressor, NoneCompressor
from bpsx.torch.exchange_round import ExchangeRound, ended, raise_first, zero_gradient
from bpsx.torch.gradient_kinds import GradientKind, KindAgreement
from bpsx.torch.names import ExchangeOwner
from bpsx.torch.order_errors import GradientOrderError as GradientOrderError
from bpsx.torch.order_errors import (
    check_not_added,
    frozen_on_some,
    interrupted,
    replaced,
    too_often,
    was_replaced,
    written_to,
)
from bpsx.torch.sparse import DENSE, SparseSum, check_sparse, empty_like
from bpsx.torch.startup import StartupCheck
from bpsx.torch.tensors import check_tensor, mark_written, summable
from bpsx.torch.training_thread import TrainingThread
from bpsx.torch.unused_parameters import UsageCount


class Exchange:
    """Exchange of the gradients of one optimizer.

    The gradient hooks that it registers on parameters do not keep it alive.

    ``active``: whether gradients are pushed: there are other workers to exchange with, or
    compression adds momentum. Updated after ``suspend`` and ``resume`` at every step.

    A worker with a gradient knows whether it is sparse. A worker without one must send the same
    kind as the others. So until every parameter has had a gradient on some worker, :meth:`complete`
    begins with a small sum of the kinds. A parameter that has no gradient on any worker keeps none,
    as in one process; :class:`UsageCount` finds that out.

    Arguments:
    - ``sparse_as_dense``: send every gradient dense.
    - ``average``: average gradients over the workers instead of summing them.
    - ``choices``: compression of each gradient, by parameter name.
    - ``rate``: function that returns a parameter's learning rate.
    - ``what``: name of the owner in messages.
    - ``ordinal``: the optimizer's number, if its names are generated.
    """

    asynchronous = False
    #: Whether it may keep the optimizer alive when there is no other reference to it.
    outlives = False
    #: Whether a parameter that no worker used in the first step counts as dense from then on. Later
    #: steps then need not ask.
    decides_early = False
    #: Whether hooks of bucketed gradients may skip :meth:`accumulated`. In each backward pass all
    #: of them but the first do.
    has_quick_hooks = True

    #: Whether the optimizer accepts only sparse gradients. A gradient that travelled dense is then
    #: made sparse again.
    sparse_again = False

    def __init__(
        self,
        names: list[tuple[str, torch.Tensor]],
        compression: type[Compressor] | None,
        passes: int,
        active: bool,
        sparse_as_dense: bool = False,
        average: bool = True,
        choices: dict[str, adapter.CompressionSpec] | None = None,
        rate: Callable[[torch.Tensor], float] | None = None,
        what: str = "DistributedOptimizer",
        ordinal: int | None = None,
    ) -> None:
        self.owner = ExchangeOwner(what, self, ordinal)
        self.training_thread = TrainingThread()
        # Every grad holds the average, and backward has added nothing since.
        self.synchronized = False
        # The wait was implicit: param_groups were read, synchronize() was not called.
        self.implicit = False
        self._compression, self._passes, self._as_dense, self._average = (
            compression or NoneCompressor,
            passes,
            sparse_as_dense,
            average,
        )
        self.choices, self._rate = choices or {}, rate
        self._adds_momentum = any(c.momentum for c in self.choices.values())
        self.active = active or self._adds_momentum
        self._bucket = bucket_of(average)
        self._managed: list[Managed] = []
        self._known: set[int] = set()  # ids of the parameters
        self._startup = StartupCheck(self.owner, self._managed)
        self._session: adapter.Session | None = None  # in which the kinds were agreed on,
        self._entries = 0  # ... and how often workers had joined
        # Lost workers count in all gradients of a step or in none.
        self._group: adapter.CommitGroup | None = None
        self._begun = False  # backward has run since the last wait
        self._round: ExchangeRound | None = None
        self._late_usage: UsageCount | None = None  # count of the last step, not evaluated yet
        self._kinds = KindAgreement(self._managed, self.decides_early)
        self.finalizer: Any = None  # detaches when the optimizer is deleted
        self.add(names, attach=False)

    def add(self, names: list[tuple[str, torch.Tensor]], attach: bool = True) -> None:
        """Add parameters, each less urgent than all before it."""
        if self.active or self.asynchronous:
            self.owner.claim({name: p for name, p in names if id(p) not in self._known})
        for name, parameter in names:
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                info = GradientInfo(PREFIX + name, f"gradient of {name!r}", -len(self._managed))
                self._managed.append(Managed(name, parameter, info, self._passes))
                if self._session is not None:
                    self._session.group_of([info.wire], self._group)
                if self.active:
                    self._declare(name, parameter)
        if attach:
            self.attach()

    def added_name(self, group: int, index: int) -> str:
        """Return the name of a parameter in a group that is added later."""
        return self.owner.added_name(group, index, self._managed[0].name if self._managed else "")

    def _declare(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.requires_grad:
            what = f"parameter {name!r}"
            check_tensor(parameter, what)
            summable(parameter, what)
        adapter.session().declare(PREFIX + name, self.choices.get(name), anew=True)

    @property
    def under_way(self) -> bool:
        """Whether a gradient has been pushed, or was due to be, and has not been waited for."""
        if self._is_interrupted:
            return True
        return _settling.any_under_way(self._managed)

    @property
    def is_due(self) -> bool:
        """Whether backward has added to gradients that have not been waited for."""
        return self.under_way or (self.active and self._begun)

    @property
    def _is_interrupted(self) -> bool:
        """Whether an interruption has left a wait open."""
        return self._round is not None or self._kinds.under_way or self._startup.under_way

    @property
    def busy(self) -> bool:
        """Whether there are updates or sums to wait for."""
        return self.under_way

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All exchanged parameters, most urgent first."""
        return [m.parameter for m in self._managed]

    @property
    def settled(self) -> bool:
        """Whether every grad still is the average that an implicit wait has left there.

        Or what the script has made of it: after the wait it may assign another tensor.
        """
        return (
            self.implicit
            and self.synchronized
            and all(m.averaged is None or m.parameter.grad is not None for m in self._managed)
        )

    def use(self) -> None:
        """Take note that the step uses the gradients now, and keep none of them any longer."""
        if self.implicit:
            for managed in self._managed:
                managed.averaged = None
        self.synchronized = self.implicit = False

    def check_knows(self, groups: list[dict[str, Any]]) -> None:
        """Raise :class:`ConfigError` if ``groups`` has a parameter that is not exchanged.

        Such a parameter would differ between workers.
        """
        for g, group in enumerate(groups):
            for i, parameter in enumerate(dict.__getitem__(group, "params")):
                if id(parameter) not in self._known:
                    raise ConfigError(
                        f"group {g}, index {i}, shape {tuple(parameter.shape)}: this parameter was"
                        " added to the optimizer's groups directly, so its gradients would not be"
                        " exchanged. Use add_param_group(), or make the optimizer distributed"
                        " afterwards"
                    )

    def attach(self) -> None:
        """Register gradient hooks on parameters that require a gradient and have none yet.

        PyTorch does not allow a hook on a frozen parameter.
        """
        if not self.active or self.owner.replaced_by:
            return
        if not self.owner.names:  # there were no other workers at its creation
            self.owner.claim({m.name: m.parameter for m in self._managed})
        ref = weakref.ref(self)
        for managed in self._managed:
            if managed.hook is None and managed.parameter.requires_grad:
                hook = Hook(ref, weakref.ref(managed), self._bucket, type(self).accumulated)
                for other in (
                    getattr(managed.parameter, "_post_accumulate_grad_hooks", None) or {}
                ).values():
                    if isinstance(other, Hook):
                        other.rival()
                        hook.rival()
                managed.hook = managed.parameter.register_post_accumulate_grad_hook(hook)

    def detach(self) -> None:
        """Remove the hooks and release the names."""
        self.owner.release()
        if self._session is not None:
            self._session.seal(self._group)  # no later step ends the sums that backward began
        for managed in self._managed:
            if managed.hook is not None:
                managed.hook.remove()
                managed.hook = None

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step, and restart the count."""
        self._passes = passes
        self.restart_count()

    def restart_count(self) -> None:
        """Forget the backward passes that have been added up so far."""
        self._bucket.quick = False
        _settling.restart(self._managed, self._passes)

    def accumulated(self, managed: Managed) -> None:
        """Handle a gradient that backward has added to. Raises :class:`GradientOrderError`."""
        if self._is_interrupted:
            raise interrupted(managed)
        if not managed.allows(Event.ADD):
            raise too_often(managed, self._passes, self.owner.what)
        if self.implicit:
            check_not_added(managed)
        if not self._begun:
            self._begun = True
            if not managed.parameter.is_cuda:  # autograd computes those on threads of its own
                self.training_thread.is_here()
            self._follow_job()
        self.synchronized = self.implicit = False
        managed.add()
        managed.passes_left -= 1
        if managed.passes_left == 0:
            if managed.kind is None and not self._as_dense and managed.is_sparse():
                managed.defer()
            else:
                self._push(managed)
        # From here to the wait, the other parameters' hooks need not look at the exchange.
        managed.quick = (
            managed.kind is GradientKind.DENSE
            and not managed.rivalled
            and self._goes_together(managed)
        )
        self._bucket.quick = self.has_quick_hooks

    def _goes_together(self, managed: Managed) -> bool:
        """Return whether a dense gradient of this parameter may join a bucket."""
        return (
            self._compression is NoneCompressor
            and managed.name not in self.choices
            and not managed.sparse_here
        )

    def wait_before_read(self, all_due: bool = False) -> None:
        """Wait for gradients in flight before they are read, so that the reader sees averages.

        Raises as :meth:`complete`. Does nothing in a signal handler, during a backward pass, or on
        another thread than the training thread, where it would disturb the training.

        ``all_due``: the step follows, so gradients that have not been pushed are pushed, too.
        """
        due = self.under_way or (all_due and not self.synchronized)
        if due and self.training_thread.may_wait():
            self.complete()
            self.implicit = self.synchronized
            for managed in self._managed:
                gradient = managed.parameter.grad
                managed.averaged = None if gradient is None else (gradient, version(gradient))

    def complete(self, discard: bool = False) -> None:
        """Push the remaining gradients and wait for all.

        Raises the first failure, after the last push has ended.

        ``discard``: the gradients are going to be discarded, so writes to them in the meantime do
        not matter.
        """
        # resume() may have changed it
        self.active = adapter.session().config.distributed or self._adds_momentum
        if not self.active and not self.under_way:
            return
        with self.training_thread.at_work():
            self._complete(discard)

    def _complete(self, discard: bool) -> None:
        self.attach()
        now = self._open_round()
        self._push_missing(now)
        adapter.session().seal(self._group)
        ours = _settling.pushed_of(self._managed)
        together = _settling.all_together(ours)
        for managed in ours:
            if isinstance(managed.pushed, SparseSum):
                self._evaluate_usage(now)
                managed.pushed.advance()
        if now.usage is not None and together and not now.frozen:
            self._late_usage, now.usage = now.usage, None
        if together and now.usage is None and not discard:
            ours = _settling.settle(ours)
        elif not together and not discard:
            self._evaluate_usage(now)  # before the first wait that may block; see _await
            ours = _settling.settle_here(ours)
        for managed in ours:
            self._await(self._discard if discard else self._receive, managed, now)
        self._evaluate_usage(now)
        for managed in self._managed:
            if not managed.wanted:
                managed.parameter.grad = None
        self._round = None
        self.implicit = False
        raise_first(now.failures)
        self.synchronized = True

    def _open_round(self) -> ExchangeRound:
        """Return the round that an interruption has left open, or a new one.

        For a new round, all workers first agree on the kind of each gradient.
        """
        self._bucket.quick = False
        self.owner.check_current()
        if self._round is None:
            self._startup.run()
            if not self._kinds.under_way:
                self._follow_job()
            agreed = self._kinds.agree()
            _settling.agree(self._managed)
            self._round = ExchangeRound(
                [*self._startup.take(), *agreed, *self._evaluate_late_usage()]
            )
        return self._round

    def _push_missing(self, now: ExchangeRound) -> None:
        """Push the gradients that hooks have not pushed, and start the count of used parameters."""
        if now.pushed:
            return
        with suppress(Exception):  # it is submitted again below, and the failure is raised then
            self._bucket.submit()
        missing = _settling.missing_of(self._managed, self._passes)
        unsure = [m for m in missing if m.parameter.grad is None and m.name in self.choices]
        if not now.begun:
            try:
                self._count_usage(now, _settling.used_of(self._managed), self._managed[0].name)
            except Exception as e:
                now.failures.append(e)
            now.failures += [self._try(self._push, m) for m in missing if m not in unsure]
            self.restart_count()
            self._begun = False
            now.begun = True
        # Pushing zeros would send the residual that compression has kept. If no worker has a
        # gradient, the sum is discarded, and the residual would be lost.
        if unsure:
            self._evaluate_usage(now)
            now.failures += [
                self._try(self._push, m) for m in unsure if m.wanted and m.allows(Event.START)
            ]
        with suppress(Exception):  # the wait raises it
            self._bucket.submit()
        now.pushed = True

    def _count_usage(self, now: ExchangeRound, used: list[bool], name: str) -> None:
        """Start the count of workers that have ``used`` each parameter."""
        if now.usage is None:
            now.frozen = set(map(id, _settling.frozen_of(self._managed, self._passes)))
            now.usage = UsageCount(used, [id(m) not in now.frozen for m in self._managed], name)

    def _await(
        self, receive: Callable[[Managed], None], managed: Managed, now: ExchangeRound
    ) -> None:
        """Let ``receive`` wait for a push.

        Before the first wait that may block, the workers must agree on what is pushed.
        """
        if now.usage is not None and not managed.pushed.done():
            self._evaluate_usage(now)
        now.failures.append(self._try(receive, managed))

    def _evaluate_usage(self, now: ExchangeRound) -> None:
        """Evaluate the count of used parameters.

        It finds the parameters without a gradient on any worker, for which all workers have pushed
        zeros. It also finds parameters that only some workers have frozen, which is an error on all
        workers. The workers that have frozen such a parameter push zeros for it. Otherwise the
        others would wait, and would receive the gradient of a later step.
        """
        if now.usage is None:
            return
        failure = ended(now.usage)
        usage, now.usage = now.usage, None
        if failure is not None:
            now.failures.append(failure)
            return
        if usage.agree:
            _settling.want_all(self._managed)
            return
        for managed, count in zip(self._managed, usage.counts, strict=True):
            # The others push zeros for a parameter that none has used unless they know that before:
            # from the sum of kinds, or because compression has let them wait for this count.
            pushed = count.used > 0 or (managed.wanted and managed.name not in self.choices)
            managed.wanted = count.used > 0
            if count.trained and count.frozen:
                now.failures.insert(0, frozen_on_some(managed, count))
                if pushed and id(managed) in now.frozen:
                    now.failures.append(self._try(self._stand_in, managed))

    def _evaluate_late_usage(self) -> list[Exception]:
        """Evaluate the count of the step before, and return the errors.

        In that step this worker had all gradients and had frozen nothing, so the count could wait.
        Waiting for it there would have meant waiting for the other workers, which gradients on GPUs
        do not need.
        """
        usage = self._late_usage
        if usage is None:
            return []
        failure = ended(usage)  # an interruption leaves it for the next call
        self._late_usage = None
        if failure is not None or not usage.differ:
            return [failure] if failure is not None else []
        return [
            frozen_on_some(m, count)
            for m, count in zip(self._managed, usage.counts)
            if count.trained and count.frozen
        ]

    def _stand_in(self, managed: Managed) -> None:
        """Push zeros for a parameter that this worker has frozen and others train."""
        gradient, managed.parameter.grad = managed.parameter.grad, None
        try:
            self._push(managed)
        finally:
            managed.parameter.grad = gradient
        adapter.session().seal(self._group)
        self._discard(managed)

    @staticmethod
    def _try(act: Callable[[Managed], None], managed: Managed) -> Exception | None:
        """Return the failure of ``act``; raise the exception that interrupted a wait."""
        try:
            act(managed)
        except Exception as e:
            if managed.is_pushed():
                if not managed.pushed.done():
                    raise
                managed.drop()
            return e
        return None

    def _follow_job(self) -> None:
        """In a resumed job, or with workers that have joined, forget what was agreed before."""
        session = adapter.session()
        if session is not self._session:
            self._group = session.group_of(m.info.wire for m in self._managed)
        if session is not self._session or session.entries != self._entries:
            self._session, self._entries, self._late_usage = session, session.entries, None
            self._kinds.forget()
            for managed in self._managed:
                managed.kind, managed.quick = GradientKind.DENSE if self._as_dense else None, False
                if managed.name in self.choices:
                    session.declare(managed.info.wire, self.choices[managed.name])

    def _push(self, managed: Managed) -> None:
        if managed.kind is GradientKind.SPARSE:
            self._push_sparse(managed)
            return
        parameter = managed.parameter
        gradient = parameter.grad
        managed.stands_in = gradient is None
        managed.sparse_here = self.sparse_again and (gradient is None or managed.is_sparse())
        if gradient is None:
            gradient = parameter.grad = zero_gradient(parameter)
        elif gradient.layout is torch.sparse_coo:
            managed.sparse_dim = gradient.sparse_dim()
            gradient = parameter.grad = gradient.detach().to_dense()
        if self._goes_together(managed) and self._bucket.take(managed, gradient):
            return
        chosen = self.choices.get(managed.name)
        rate = (
            self._rate(parameter)
            if self._rate is not None and chosen is not None and chosen.ef == "corrected"
            else -1.0
        )
        managed.start(push(gradient, managed.info, self._average, self._compression, rate))

    @counted("gradient", f"{PREFIX}{{}}.sparse", several=True, argument="managed")
    def _push_sparse(self, managed: Managed) -> None:
        gradient = managed.parameter.grad
        chosen = self.choices.get(managed.name)
        if adapter.session().shrinks:
            raise ConfigError(
                f"{managed.info.what}: it is sparse, which does not work with BPSX_ELASTIC=shrink."
                " Give sparse_as_dense=True, or set BPSX_ELASTIC=servers"
            )
        if chosen is not None and chosen.momentum:
            raise ConfigError(
                f"{managed.info.what}: it is sparse and therefore not compressed, so"
                " compression_params' momentum='nesterov' cannot be added to it. Omit momentum for"
                " this parameter, or give sparse_as_dense=True"
            )
        given = empty_like(managed.parameter, managed.sparse_dim)
        kind = {}
        if gradient is not None and managed.is_sparse():
            check_sparse(gradient, managed.info.what)
            given = gradient
        elif gradient is not None:  # SparseSum reports it to the other workers
            kind["kind"] = DENSE
        begun = SparseSum(
            given, self._average, f"{PREFIX}{managed.name}.sparse", self._compression, **kind
        )
        begun.given = gradient
        managed.start(begun)

    def _discard(self, managed: Managed) -> None:
        managed.pushed.wait()
        managed.drop()

    def _receive(self, managed: Managed) -> None:
        """Wait for a push and store the average in the parameter's ``grad``.

        It does so even if ``grad`` was set to None in the meantime. Raises
        :class:`GradientOrderError` if it was set to another tensor, or written to.
        """
        pushed = managed.pushed
        # After a step of CrossBarrier, ``grad`` may already belong to the next one.
        checks = managed.state is not State.PENDING
        if isinstance(pushed, SparseSum):
            total = pushed.wait()
            managed.receive()
            if checks and was_replaced(managed, pushed.given):
                raise replaced(managed)
            if pushed.dense:  # dense on all workers: push it again, dense from now on
                managed.kind = GradientKind.DENSE
                self._push(managed)
                self._receive(managed)
            else:
                managed.parameter.grad = total
            return
        gradient = pushed.gradient
        received = pushed.wait()
        managed.receive()
        if pushed.ctx is not None or not pushed.own or received.data_ptr() != gradient.data_ptr():
            with torch.no_grad():
                gradient.detach().copy_(self._compression.decompress(received, pushed.ctx))
        else:
            mark_written(gradient)
        was_other = checks and was_replaced(managed, gradient)
        managed.parameter.grad = gradient
        if was_other:
            raise replaced(managed)
        if pushed.written:
            raise written_to(managed)
        if managed.sparse_here:  # from the rows that are not zero
            managed.parameter.grad = gradient.detach().to_sparse(managed.sparse_dim)
