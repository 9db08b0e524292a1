"""The exchange of one module's gradients: begun by hooks during backward, complete when
``backward()`` returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bpsx.plugin import adapter
from bpsx.torch._gradients import Managed
from bpsx.torch.compression import Compressor
from bpsx.torch.exchange import Exchange, GradientOrderError
from bpsx.torch.exchange_round import Round, ended, raise_first, zero_gradient
from bpsx.torch.ops import Handle, submit


class _End:
    """What autograd calls when a pass ends.

    It lives as long as the pass: a pass that has failed lets go of it without calling it.
    """

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = weakref.ref(averaging)

    def __call__(self) -> None:
        alive = self._averaging()
        if alive is not None:
            alive._pass_ends()


class _Round(Round):
    """``ours``: those that are exchanged. ``aside``, by id: what has been pushed of those that this
    worker has not used, how, and the compressor's context."""

    def __init__(self, ours: list[Managed]) -> None:
        super().__init__([])
        self.ours = ours
        self.aside: dict[int, tuple[Handle, Any]] = {}


class Averaging(Exchange):
    """Averages the gradients of one module within ``backward()``, without an optimizer.

    A *pass* is one run of autograd's engine, the outermost if they are nested. Its first hook has
    the engine call us at its end; there what hooks have not pushed is pushed, and everything is
    waited for. Besides the gradients travels one vector that counts for each parameter the workers
    that have used it since the last exchange.
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
        # by id of Managed: backward has added to its gradient since the last exchange
        self._touched: set[int] = set()
        # this pass calls for an exchange, though it may have used no parameter
        self._due = False
        self.expected = False  # a forward pass has been made that calls for one
        # begun and not ended: an interruption leaves it open
        self._round: _Round | None = None
        self._pass = -1
        self._end: Callable[[], _End | None] = lambda: None
        super().__init__(
            names, compression, 1, active, sparse_as_dense=True, what="DistributedDataParallel"
        )

    # ---- during a pass

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Have the pass that comes through ``outputs`` recognised as the outermost one, also if it
        uses no parameter of ours.
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
        """None if one of our parameters can be reached from ``nodes``: then its hook will tell.

        Else the node of another leaf.
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
        """A hook of ours runs: see to it that the end of the pass is ours.

        Raises :class:`GradientOrderError`.
        """
        if self._end() is None:
            self._check_not_stale()
            end = _End(self)
            _call_at_the_end(end)
            self._end = weakref.ref(end)
            self._pass = torch._C._current_graph_task_id()

    def accumulated(self, managed: Managed) -> None:
        """Backward has added to a gradient. Raises :class:`GradientOrderError`."""
        self._touched.add(id(managed))
        if not self.syncing:
            return
        self._enter()
        self._due = True
        if managed.pushed is not None:
            raise GradientOrderError(
                f"the gradient of {managed.name!r} was added to again within one backward pass,"
                " after it had left: parameters that are used inside and outside of"
                " torch.utils.checkpoint need use_reentrant=False"
            )
        if torch._C._current_graph_task_id() == self._pass:
            self._push(managed)
        # In a pass within the pass (reentrant checkpointing) another one may add to it: it leaves
        # at the end.

    def _pass_ends(self) -> None:
        """Push what is missing now, and wait when all modules of this pass have done so: they may
        come in another order on other workers.
        """
        self._end = lambda: None
        if self.syncing and self._due:
            self._begin_round()
            _call_at_the_end(self._end_round)

    def _check_not_stale(self) -> None:
        if self.under_way:
            raise GradientOrderError(
                "a backward pass has failed after gradients had left, and other workers may have"
                " averaged with them: call the module's synchronize() to take part in that"
                " exchange, or end this worker"
            )

    def check_ready(self) -> None:
        """Raise :class:`GradientOrderError` if a failed pass has left gradients under way.

        Between passes only.
        """
        if torch._C._current_graph_task_id() < 0 and self._end() is None:
            self._check_not_stale()

    # ---- at its end

    def follow(self) -> None:
        """Take notice of what has changed since the last step: suspend() and resume(), parameters
        that have been unfrozen.
        """
        self.active = adapter.session().config.distributed
        self.attach()

    def complete(self, discard: bool = False) -> None:
        """Push what is missing, wait for everything.

        Raises the first failure, after the last push has ended.
        """
        self._begin_round()
        self._end_round()

    def _begin_round(self) -> None:
        self._due = self.expected = False
        if self._round is None:
            self._round = _Round([m for m in self._managed if m.parameter.requires_grad])
        now = self._round
        if now.pushed:
            return

        def begin(managed: Managed) -> None:
            if self._is_used(managed):
                self._push(managed)
            else:
                now.aside[id(managed)] = self._push_aside(managed)

        self._startup.begin()  # and waited for when all modules of this pass have begun
        try:
            self._count(now, [self._is_used(m) for m in self._managed], self._name)
        except Exception as e:
            now.failures.append(e)
        now.failures += [
            self._try(begin, m) for m in now.ours if m.pushed is None and id(m) not in now.aside
        ]
        self._touched = set()
        now.pushed = True

    def _end_round(self) -> None:
        now = self._round
        assert now is not None
        self._startup.run()
        now.failures += self._startup.take()
        for managed in now.ours:
            if managed.pushed is not None:
                self._await(self._receive, managed, now)
        self._heed(now)
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
        return id(managed) in self._touched and managed.parameter.grad is not None

    def _push_aside(self, managed: Managed) -> tuple[Handle, Any]:
        """Push a gradient that this worker has not added to: ``grad`` as it stands or zeros, but
        into other memory, since it stays as it is if the others have not added to theirs either.
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
            submit(wire, wire, managed.named.wire, average=True, priority=managed.named.priority),
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
    """Have autograd's engine call ``act`` when the pass that runs now has ended, on the thread that
    called ``backward()``, which raises what ``act`` raises.

    ``act`` may ask for further calls.
    """
    torch.autograd.Variable._execution_engine.queue_callback(act)


def _accumulates(leaf: Any) -> bool:
    """Whether the pass that runs now adds to the ``grad`` of this leaf: ``backward()`` does,
    ``torch.autograd.grad()`` does not.
    """
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # autograd.grad() with respect to this very leaf
        return False


def _below(nodes: Iterable[Any]) -> Iterator[Any]:
    """The graph below ``nodes``, depth first, each node once."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
