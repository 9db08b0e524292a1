"""Exchange of one module's gradients, complete when ``backward()`` returns.

Gradient hooks start it during backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bpsx.plugin import adapter
from bpsx.torch._gradient_state import Event
from bpsx.torch._gradients import Managed
from bpsx.torch.compression import Compressor
from bpsx.torch.exchange import Exchange, GradientOrderError
from bpsx.torch.exchange_round import ExchangeRound, ended, raise_first, zero_gradient
from bpsx.torch.ops import Handle
from bpsx.torch.submit import submit


class _End:
    """Callback that autograd runs when a pass ends.

    It lives as long as the pass: a failed pass releases it without calling it.
    """

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = weakref.ref(averaging)

    def __call__(self) -> None:
        alive = self._averaging()
        if alive is not None:
            alive._pass_ends()


class _ModuleRound(ExchangeRound):
    """A round of one module's gradients.

    ``ours``: the exchanged parameters. ``aside``: by id, the handle and the compressor's context of
    each gradient that this worker has not used.
    """

    def __init__(self, ours: list[Managed]) -> None:
        super().__init__([])
        self.ours = ours
        self.aside: dict[int, tuple[Handle, Any]] = {}


class Averaging(Exchange):
    """Averages the gradients of one module within ``backward()``, without an optimizer.

    A *pass* is one run of autograd's engine, the outermost if runs are nested. The first hook of a
    pass registers a callback for the end of the pass. There the gradients that hooks have not
    pushed are pushed, and all are waited for. A vector travels with the gradients: it counts for
    each parameter the workers that have used it since the last exchange.
    """

    def __init__(
        self,
        names: list[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        name: str,
        active: bool,
    ) -> None:
        self.syncing = True  # False inside no_sync()
        self._name = name
        # This pass requires an exchange, even if it has used no parameter.
        self._due = False
        self.expected = False  # a forward pass has been made that requires an exchange
        # Round in flight; an interruption leaves it open.
        self._round: _ModuleRound | None = None
        self._pass = -1
        self._end: Callable[[], _End | None] = lambda: None
        super().__init__(
            names, compression, 1, active, sparse_as_dense=True, what="DistributedDataParallel"
        )

    # ---- during a pass

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Have the pass that goes through ``outputs`` recognised as the outermost one.

        That works also if the pass uses no parameter of the module.
        """
        if not (self.active and torch.is_grad_enabled()):
            return
        nodes = {t.grad_fn for t in outputs if t.grad_fn is not None}
        if nodes:
            ref, leaf = weakref.ref(self), self._unused_leaf(nodes)

            def entered(_: Any) -> None:
                alive = ref()
                if alive is not None and alive.syncing:
                    alive._enter()
                    alive._due = alive._due or leaf is not None and _accumulates(leaf)

            for node in nodes:
                node.register_prehook(entered)

    def _unused_leaf(self, nodes: Iterable[Any]) -> Any:
        """Return a leaf node below ``nodes`` that is not one of our parameters.

        Returns None if one of our parameters can be reached, since its gradient hook will run then.
        """
        ours = {id(m.parameter) for m in self._managed}
        other = None
        for node in _below(nodes):
            variable = getattr(node, "variable", None)
            if variable is not None:
                if id(variable) in ours:
                    return None
                other = node
        return other

    def _enter(self) -> None:
        """Register the callback for the end of this pass. Called by each hook.

        Raises :class:`GradientOrderError`.
        """
        if self._end() is None:
            self._check_not_stale()
            end = _End(self)
            _call_at_the_end(end)
            self._end = weakref.ref(end)
            self._pass = torch._C._current_graph_task_id()

    def accumulated(self, managed: Managed) -> None:
        """Handle a gradient that backward has added to. Raises :class:`GradientOrderError`."""
        managed.passes_left = 0  # until the next exchange
        if not self.syncing:
            return
        self._enter()
        self._due = True
        if not managed.allows(Event.ADD):
            raise GradientOrderError(
                f"backward added to the gradient of {managed.name!r} after it had been pushed,"
                " within one backward pass. Parameters that are used inside and outside of"
                " torch.utils.checkpoint need use_reentrant=False"
            )
        managed.add()
        if torch._C._current_graph_task_id() == self._pass:
            self._push(managed)
        # A pass within the pass (reentrant checkpointing) may be followed by more additions, so the
        # gradient is pushed at the end.

    def _pass_ends(self) -> None:
        """Push the remaining gradients, and have the end of the round called later.

        The wait comes after all modules of this pass have pushed, because their order may differ
        between workers.
        """
        self._end = lambda: None
        if self.syncing and self._due:
            self._begin_round()
            _call_at_the_end(self._end_round)

    def _check_not_stale(self) -> None:
        if self.under_way:
            raise GradientOrderError(
                "a backward pass failed after gradients had been pushed, so other workers may have"
                " averaged with them. Call the module's synchronize() to take part in that"
                " exchange, or end this worker"
            )

    def check_ready(self) -> None:
        """Raise :class:`GradientOrderError` if a failed pass has left gradients in flight.

        Call it between passes only.
        """
        if torch._C._current_graph_task_id() < 0 and self._end() is None:
            self._check_not_stale()

    # ---- at the end of a pass

    def follow(self) -> None:
        """Apply changes since the last step: suspend() and resume(), unfrozen parameters."""
        session = adapter.session()
        session.require_all("DistributedDataParallel")
        self.active = session.config.distributed
        self.attach()

    def complete(self, discard: bool = False) -> None:
        """Push the remaining gradients and wait for all.

        Raises the first failure, after the last push has ended.
        """
        self._begin_round()
        self._end_round()

    def _begin_round(self) -> None:
        self._due = self.expected = False
        if self._round is None:
            # Passes inside no_sync() may have added to a parameter that was frozen after them.
            self._round = _ModuleRound(
                [m for m in self._managed if m.parameter.requires_grad or self._is_used(m)]
            )
        now = self._round
        if now.pushed:
            return

        def begin(managed: Managed) -> None:
            if self._is_used(managed):
                self._push(managed)
            else:
                now.aside[id(managed)] = self._push_aside(managed)

        self._startup.begin()  # the wait comes when all modules of this pass have started
        try:
            self._count_usage(now, [self._is_used(m) for m in self._managed], self._name)
        except Exception as e:
            now.failures.append(e)
        now.failures += [
            self._try(begin, m) for m in now.ours if not m.is_pushed() and id(m) not in now.aside
        ]
        for managed in self._managed:
            managed.passes_left = 1
        now.pushed = True

    def _end_round(self) -> None:
        now = self._round
        assert now is not None
        self._startup.run()
        now.failures += self._startup.take()
        for managed in now.ours:
            if managed.is_pushed():
                self._await(self._receive, managed, now)
        self._evaluate_usage(now)
        for managed in now.ours:
            if id(managed) in now.aside:
                handle, ctx = now.aside[id(managed)]
                failure = ended(handle)
                del now.aside[id(managed)]
                now.failures.append(failure)
                if failure is None and managed.wanted:
                    self._take(managed, self._compression.decompress(handle.wait(), ctx))
        self._round = None
        raise_first(now.failures)

    def _is_used(self, managed: Managed) -> bool:
        return managed.passes_left == 0 and managed.parameter.grad is not None

    def _push_aside(self, managed: Managed) -> tuple[Handle, Any]:
        """Push a gradient that this worker has not added to, from separate memory.

        It pushes ``grad`` as it is, or zeros. ``grad`` itself must stay unchanged if the other
        workers have not added to theirs either.
        """
        parameter = managed.parameter
        with torch.no_grad():
            plain = (
                zero_gradient(parameter)
                if parameter.grad is None
                else parameter.grad.detach().to_dense().clone()
            )
        wire, ctx = self._compression.compress(plain)
        return (
            submit(wire, wire, managed.info.wire, average=True, priority=managed.info.priority),
            ctx,
        )

    @staticmethod
    def _take(managed: Managed, average: torch.Tensor) -> None:
        if managed.parameter.grad is None:
            managed.parameter.grad = average
        else:
            with torch.no_grad():
                managed.parameter.grad.detach().copy_(average)


def _call_at_the_end(act: Callable[[], None]) -> None:
    """Have autograd's engine call ``act`` when the current pass has ended.

    The call is made on the thread that called ``backward()``, which raises what ``act`` raises.
    ``act`` may request further calls.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def _accumulates(leaf: Any) -> bool:
    """Return whether the current pass adds to the ``grad`` of this leaf.

    ``backward()`` does, ``torch.autograd.grad()`` does not.
    """
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # autograd.grad() with respect to this leaf
        return False


def _below(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph below ``nodes``, depth first, each once."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
