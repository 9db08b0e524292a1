"""The exchange of one optimizer's gradients: hooks that push as backward goes, and the wait before
the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from bpsx.errors import ConfigError, MismatchError
from bpsx.plugin import adapter
from bpsx.session.refusals import counted
from bpsx.torch import _settling
from bpsx.torch._gradients import Hook, Managed, version
from bpsx.torch.bucket import Named, batch_of, push
from bpsx.torch.compression import Compressor, NoneCompressor
from bpsx.torch.exchange_round import Round, ended, raise_first, zero_gradient
from bpsx.torch.looking import Trainer
from bpsx.torch.ops import Handle, check_tensor, mark_written, submit, summable
from bpsx.torch.order_errors import GradientOrderError as GradientOrderError
from bpsx.torch.order_errors import (
    check_not_added,
    frozen_on_some,
    interrupted,
    too_often,
    written_to,
)
from bpsx.torch.owner import PREFIX, ExchangeOwner
from bpsx.torch.sparse import DENSE, SparseSum, check_sparse, empty_like
from bpsx.torch.startup import StartupCheck
from bpsx.torch.unused_parameters import Users

#: Under this, with the first parameter's name, the workers agree on which gradients are sparse.
KINDS = "Kinds of gradients from "


class Kind(Enum):
    """How a parameter's gradient travels, on all workers."""

    DENSE = "dense"
    SPARSE = "sparse"


class Exchange:
    """Moves the gradients of one optimizer.

    The hooks that it hangs on parameters do not keep it alive.

    ``active``: whether there is anybody to exchange with; followed through ``suspend`` and
    ``resume`` at every step.

    Whether a gradient is sparse is known to a worker that has one, and a worker that has none must
    send what the others do. So until every parameter has had a gradient somewhere, :meth:`complete`
    begins with a small sum of who has which kind. ``sparse_as_dense``: nothing travels sparse. A
    parameter that has no gradient on any worker keeps none, as it would in one process;
    :class:`Users` tells. ``average``: whether gradients become averages, or sums. ``choices``: how
    gradients are compressed, by name. ``rate``: a parameter's learning rate. ``what``: whose
    gradients these are, for people. ``ordinal``: of the optimizer, if names are generated.
    """

    asynchronous = False
    #: Whether it may keep the optimizer alive when nobody else does.
    outlives = False
    #: Whether a parameter that nobody has used in the first step counts as dense from then on, so
    #: that no later step has to ask.
    decides_early = False
    #: Whether a hook may leave out :meth:`accumulated`: it does for all of a pass but the first, of
    #: those that go together.
    has_quick_hooks = True

    #: Whether the optimizer takes sparse gradients only: what has travelled as a dense one becomes
    #: sparse again.
    sparse_again = False

    def __init__(
        self,
        names: list[tuple[str, torch.Tensor]],
        compression: type[Compressor] | None,
        passes: int,
        active: bool,
        sparse_as_dense: bool = False,
        average: bool = True,
        choices: dict[str, adapter.Compression] | None = None,
        rate: Callable[[torch.Tensor], float] | None = None,
        what: str = "DistributedOptimizer",
        ordinal: int | None = None,
    ) -> None:
        self.owner = ExchangeOwner(what, self, ordinal)
        self.trainer = Trainer()
        self.active = active
        # every grad holds the average, and backward has added nothing since
        self.synchronized = False
        # ... because somebody has looked, not because synchronize() was called
        self.implicit = False
        self._compression, self._passes, self._as_dense, self._average = (
            compression or NoneCompressor,
            passes,
            sparse_as_dense,
            average,
        )
        self.choices, self._rate = choices or {}, rate
        self._batch = batch_of(average)
        self._managed: list[Managed] = []
        self._known: set[int] = set()  # the parameters' ids
        self._startup = StartupCheck(self.owner, self._managed)
        self._session: object = None  # in which job the kinds were agreed
        self._begun = False  # backward has run since the last wait
        self._round: Round | None = None
        self._late: Users | None = None  # the last step's, not heeded
        # about the kinds of gradients
        self._asking: tuple[list[Managed], torch.Tensor, Handle] | None = None
        self.finalizer: Any = None  # detaches when the optimizer goes
        self.add(names, attach=False)

    def add(self, names: list[tuple[str, torch.Tensor]], attach: bool = True) -> None:
        """Take charge of parameters, each less urgent than all before it."""
        if self.active or self.asynchronous:
            self.owner.claim({name: p for name, p in names if id(p) not in self._known})
        for name, parameter in names:
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                named = Named(PREFIX + name, f"gradient of {name!r}", -len(self._managed))
                self._managed.append(Managed(name, parameter, named, self._passes))
                if self.active:
                    self._declare(name, parameter)
        if attach:
            self.attach()

    def added_name(self, group: int, index: int) -> str:
        """The name of a parameter of a group that is added later."""
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
        if self._round is not None or self._asking is not None or self._startup.under_way:
            return True
        return _settling.any_under_way(self._managed)

    @property
    def busy(self) -> bool:
        """Whether there are updates or sums to wait for."""
        return self.under_way

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All that are exchanged, most urgent first."""
        return [m.parameter for m in self._managed]

    @property
    def settled(self) -> bool:
        """Whether every grad still is the average that an implicit wait has left there."""
        return (
            self.implicit
            and self.synchronized
            and all(m.averaged is None or m.parameter.grad is m.averaged[0] for m in self._managed)
        )

    def check_knows(self, groups: list[dict[str, Any]]) -> None:
        """Raise :class:`ConfigError` for a parameter in ``groups`` that is not exchanged: it would
        differ between workers.
        """
        for g, group in enumerate(groups):
            for i, parameter in enumerate(dict.__getitem__(group, "params")):
                if id(parameter) not in self._known:
                    raise ConfigError(
                        f"group {g}, index {i}, shape {tuple(parameter.shape)}: this parameter was"
                        " put into the optimizer by hand, and its gradients would not be"
                        " exchanged: use add_param_group(), or make the optimizer distributed"
                        " afterwards"
                    )

    def attach(self) -> None:
        """Hang hooks on parameters that require a gradient and have none yet (PyTorch allows no
        hook on a frozen one).
        """
        if not self.active or self.owner.replaced_by:
            return
        if not self.owner.names:  # there was nobody to exchange with when it was made
            self.owner.claim({m.name: m.parameter for m in self._managed})
        ref = weakref.ref(self)
        for managed in self._managed:
            if managed.hook is None and managed.parameter.requires_grad:
                hook = Hook(ref, weakref.ref(managed), self._batch, type(self).accumulated)
                for other in (
                    getattr(managed.parameter, "_post_accumulate_grad_hooks", None) or {}
                ).values():
                    if isinstance(other, Hook):
                        other.rival()
                        hook.rival()
                managed.hook = managed.parameter.register_post_accumulate_grad_hook(hook)

    def detach(self) -> None:
        """Take the hooks off, and free the names."""
        self.owner.release()
        for managed in self._managed:
            if managed.hook is not None:
                managed.hook.remove()
                managed.hook = None

    def set_passes(self, passes: int) -> None:
        """See :meth:`_DistributedOptimizer.set_backward_passes_per_step`."""
        self._passes = passes
        self.restart_count()

    def restart_count(self) -> None:
        """Forget backward passes that have been added up so far."""
        self._batch.quick = False
        _settling.restart(self._managed, self._passes)

    def accumulated(self, managed: Managed) -> None:
        """Backward has added to a gradient. Raises :class:`GradientOrderError`."""
        if self._round is not None or self._asking is not None or self._startup.under_way:
            raise interrupted(managed)
        if managed.pushed is not None or managed.deferred:
            raise too_often(managed, self._passes, self.owner.what)
        if self.implicit:
            check_not_added(managed)
        if not self._begun:
            self._begun = True
            if not managed.parameter.is_cuda:  # those are made on threads of autograd's
                self.trainer.is_here()
            self._follow_job()
        self.synchronized = self.implicit = False
        managed.passes_left -= 1
        if managed.passes_left == 0:
            managed.deferred = managed.kind is None and not self._as_dense and managed.is_sparse()
            if not managed.deferred:
                self._push(managed)
        # From here to the wait the others' hooks need look at nothing of the exchange.
        managed.quick = (
            managed.kind is Kind.DENSE and not managed.rivalled and self._goes_together(managed)
        )
        self._batch.quick = self.has_quick_hooks

    def _goes_together(self, managed: Managed) -> bool:
        """Whether its gradient, if it is dense and on a GPU, begins with others."""
        return (
            self._compression is NoneCompressor
            and managed.name not in self.choices
            and not managed.sparse_here
        )

    def look(self) -> None:
        """Somebody is about to look at gradients: wait for them, so that what is seen is averages.
        Raises as :meth:`complete`.

        Does nothing in a signal handler, during a backward pass, and on another thread than the one
        that trains: there it would disturb the training.
        """
        if self.under_way and self.trainer.may_wait():
            self.complete()
            self.implicit = True
            for managed in self._managed:
                gradient = managed.parameter.grad
                managed.averaged = None if gradient is None else (gradient, version(gradient))

    def complete(self, discard: bool = False) -> None:
        """Push what is missing, wait for everything.

        Raises the first failure, after the last push has ended.

        ``discard``: the gradients are going to be thrown away, so it does not matter what has been
        written to them meanwhile.
        """
        self.active = adapter.session().config.distributed  # resume() may have changed it
        if not self.active and not self.under_way:
            return
        with self.trainer.at_work():
            self._complete(discard)

    def _complete(self, discard: bool) -> None:
        self.attach()
        now = self._open_round()
        self._push_missing(now)
        ours = _settling.pushed_of(self._managed)
        together = _settling.all_together(ours)
        for managed in ours:
            if isinstance(managed.pushed, SparseSum):
                self._heed(now)
                managed.pushed.advance()
        if now.users is not None and together and not now.frozen:
            self._late, now.users = now.users, None
        if together and now.users is None and not discard:
            ours = _settling.settle(ours)
        elif not together and not discard:
            self._heed(now)  # before anything is really waited for: see _await
            ours = _settling.settle_here(ours)
        for managed in ours:
            self._await(self._discard if discard else self._receive, managed, now)
        self._heed(now)
        for managed in self._managed:
            if not managed.wanted:
                managed.parameter.grad = None
        self._round = None
        self.implicit = False
        raise_first(now.failures)
        self.synchronized = True

    def _open_round(self) -> Round:
        """The round that an interruption has left open, or a new one, for which all workers agree
        on what travels how.
        """
        self._batch.quick = False
        self.owner.check_current()
        if self._round is None:
            self._startup.run()
            agreed = self._agree()
            self._round = Round([*self._startup.take(), *agreed, *self._heed_late()])
        return self._round

    def _push_missing(self, now: Round) -> None:
        """Push what hooks have not pushed, and begin to sum who has which gradients."""
        if now.pushed:
            return
        with suppress(Exception):  # it goes again, and is told then
            self._batch.submit()
        missing = _settling.missing_of(self._managed)
        unsure = [m for m in missing if m.parameter.grad is None and m.name in self.choices]
        if not now.begun:
            try:
                self._count(now, _settling.used_of(self._managed), self._managed[0].name)
            except Exception as e:
                now.failures.append(e)
            now.failures += [self._try(self._push, m) for m in missing if m not in unsure]
            self.restart_count()
            self._begun = False
            now.begun = True
        # zeros would bring out what compression has kept, and if nobody has a gradient that would
        # be thrown away
        if unsure:
            self._heed(now)
            now.failures += [
                self._try(self._push, m) for m in unsure if m.wanted and m.pushed is None
            ]
        with suppress(Exception):  # told by the wait
            self._batch.submit()
        now.pushed = True

    def _count(self, now: Round, used: list[bool], name: str) -> None:
        """Begin to sum who has ``used`` what, by parameter."""
        if now.users is None:
            now.frozen = set(map(id, _settling.frozen_of(self._managed)))
            now.users = Users(used, [id(m) not in now.frozen for m in self._managed], name)

    def _await(self, receive: Callable[[Managed], None], managed: Managed, now: Round) -> None:
        """Let ``receive`` wait for a push.

        Before anything is really waited for, the workers have to be at one about what is pushed.
        """
        assert managed.pushed is not None
        if now.users is not None and not managed.pushed.done():
            self._heed(now)
        now.failures.append(self._try(receive, managed))

    def _heed(self, now: Round) -> None:
        """Find out which gradients nobody has had, so that zeros have stood in for them everywhere;
        and what is frozen on some workers only, which fails on all of them.

        Those that have frozen it push zeros, or the others would wait, and be given a later step's
        gradient.
        """
        if now.users is None:
            return
        failure = ended(now.users)
        users, now.users = now.users, None
        if failure is not None:
            now.failures.append(failure)
            return
        if users.agree:
            _settling.want_all(self._managed)
            return
        for managed, count in zip(self._managed, users.counts, strict=True):
            managed.wanted = count.used > 0
            if count.trained and count.frozen:
                now.failures.insert(0, frozen_on_some(managed, count))
                if id(managed) in now.frozen:
                    now.failures.append(self._try(self._stand_in, managed))

    def _heed_late(self) -> list[Exception]:
        """The same for the step before, where this worker had all gradients and froze nothing, so
        that it had nothing to do.

        To wait for the count there would be to wait for the others, and gradients on GPUs come
        without. Returns what has gone wrong.
        """
        users = self._late
        if users is None:
            return []
        failure = ended(users)  # interrupted, it is asked again
        self._late = None
        if failure is not None or not users.differ:
            return [failure] if failure is not None else []
        return [
            frozen_on_some(m, count)
            for m, count in zip(self._managed, users.counts)
            if count.trained and count.frozen
        ]

    def _stand_in(self, managed: Managed) -> None:
        """Push zeros for a parameter that is frozen here and not elsewhere."""
        gradient, managed.parameter.grad = managed.parameter.grad, None
        try:
            self._push(managed)
        finally:
            managed.parameter.grad = gradient
        self._discard(managed)

    @staticmethod
    def _try(act: Callable[[Managed], None], managed: Managed) -> Exception | None:
        """Returns what has gone wrong, and raises what has interrupted a wait."""
        try:
            act(managed)
        except Exception as e:
            if managed.pushed is not None and not managed.pushed.done():
                raise
            managed.pushed = None
            return e
        return None

    def _follow_job(self) -> None:
        """In a job resumed with other workers nobody knows what had been agreed in the one
        before.
        """
        session = adapter.session()
        if session is not self._session:
            self._session, self._late = session, None
            for managed in self._managed:
                managed.kind, managed.quick = Kind.DENSE if self._as_dense else None, False
                if managed.name in self.choices:
                    session.declare(managed.named.wire, self.choices[managed.name])

    def _agree(self) -> list[Exception]:
        """Find out whether gradients travel sparse, where that is not known yet.

        Returns what has gone wrong; all workers push all the same.
        """
        if self._asking is None:
            self._follow_job()
            for m in self._managed:
                m.wanted = True
            unknown = [m for m in self._managed if m.kind is None and m.parameter.requires_grad]
            if not unknown:
                return []
            told = self._kinds(unknown)
            try:
                self._asking = (
                    unknown,
                    told,
                    submit(
                        told, told, f"{KINDS}{self._managed[0].name}", average=False, priority=1
                    ),
                )
            except Exception as e:
                return self._unknown_yet(unknown, e)
        unknown, told, handle = self._asking
        failure = ended(handle)
        self._asking = None
        if failure is not None:
            return self._unknown_yet(unknown, failure)
        return self._decide(unknown, told)

    @staticmethod
    def _kinds(unknown: list[Managed]) -> torch.Tensor:
        """By parameter: workers with a dense gradient (here 0 or 1), with a sparse one, and the
        sparse dimensions of the latter.
        """
        told = torch.zeros(3, len(unknown), dtype=torch.int32, device="cpu")
        for i, m in enumerate(unknown):
            if m.pushed is None and m.is_sparse():
                assert m.parameter.grad is not None
                told[1, i], told[2, i] = 1, m.parameter.grad.sparse_dim()
            elif m.pushed is not None or m.parameter.grad is not None:
                told[0, i] = 1
        return told

    @staticmethod
    def _unknown_yet(unknown: list[Managed], failure: Exception) -> list[Exception]:
        for m in unknown:  # what is there must go out nevertheless: others may wait for it
            m.deferred = False
        return [failure]

    def _decide(self, unknown: list[Managed], told: torch.Tensor) -> list[Exception]:
        """Give each parameter the kind that all workers have ``told``.

        Returns where they differ.
        """
        found: list[Exception] = []
        for m, (dense, sparse, dims) in zip(unknown, told.t().tolist(), strict=True):
            m.deferred = False
            # everybody completes it as a dense one, and then everybody hears of it
            if sparse and dense:
                found.append(
                    MismatchError(
                        f"the gradient of {m.name!r} is sparse on {sparse} workers and dense on"
                        f" {dense}: it must be one or the other on all of them;"
                        " sparse_as_dense=True sends it dense"
                    )
                )
            elif sparse or dense:
                m.kind, m.sparse_dim = (Kind.SPARSE, dims // sparse) if sparse else (Kind.DENSE, 1)
            else:
                m.wanted = False
                if self.decides_early:
                    m.kind = Kind.DENSE
        return found

    def _push(self, managed: Managed) -> None:
        if managed.kind is Kind.SPARSE:
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
        if self._goes_together(managed) and self._batch.take(managed, gradient):
            return
        chosen = self.choices.get(managed.name)
        rate = (
            self._rate(parameter)
            if self._rate is not None and chosen is not None and chosen.ef == "corrected"
            else -1.0
        )
        managed.pushed = push(gradient, managed.named, self._average, self._compression, rate)

    @counted("gradient", f"{PREFIX}{{}}.sparse", several=True, argument="managed")
    def _push_sparse(self, managed: Managed) -> None:
        gradient = managed.parameter.grad
        chosen = self.choices.get(managed.name)
        if chosen is not None and chosen.momentum:
            raise ConfigError(
                f"{managed.named.what}: it is sparse, and is not compressed; compression_params'"
                " momentum='nesterov' cannot be added to it: leave that out for this parameter, or"
                " give sparse_as_dense=True"
            )
        given = empty_like(managed.parameter, managed.sparse_dim)
        kind = {}
        if gradient is not None and managed.is_sparse():
            check_sparse(gradient, managed.named.what)
            given = gradient
        elif gradient is not None:  # the others have to hear of it
            kind["kind"] = DENSE
        managed.pushed = SparseSum(
            given, self._average, f"{PREFIX}{managed.name}.sparse", self._compression, **kind
        )

    def _discard(self, managed: Managed) -> None:
        assert managed.pushed is not None
        managed.pushed.wait()
        managed.pushed = None

    def _receive(self, managed: Managed) -> None:
        """Wait for a push and put the average where the optimizer looks for it, even if ``grad``
        was replaced meanwhile.
        """
        pushed = managed.pushed
        assert pushed is not None
        if isinstance(pushed, SparseSum):
            total = pushed.wait()
            managed.pushed = None
            if pushed.dense:  # on all workers: it goes again, as what it is from now on
                managed.kind = Kind.DENSE
                self._push(managed)
                self._receive(managed)
            else:
                managed.parameter.grad = total
            return
        gradient = pushed.gradient
        received = pushed.wait()
        managed.pushed = None
        if pushed.ctx is not None or not pushed.own or received.data_ptr() != gradient.data_ptr():
            with torch.no_grad():
                gradient.detach().copy_(self._compression.decompress(received, pushed.ctx))
        else:
            mark_written(gradient)
        if managed.parameter.grad is not gradient:
            managed.parameter.grad = gradient
        if pushed.written:
            raise written_to(managed)
        if managed.sparse_here:  # with the rows that are not zero
            managed.parameter.grad = gradient.detach().to_sparse(managed.sparse_dim)
