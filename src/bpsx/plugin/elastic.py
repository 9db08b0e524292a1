"""Training that goes on when workers are lost, leave or join: state, and a loop around the script.

Names and arguments are those of Horovod's elastic API, so that its users know them.
docs/internals/elastic-joins.md has the protocol beneath.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from bpsx.api.lifecycle import finish, session, shutdown
from bpsx.errors import ConfigError, PeerLostError, says_root_lost
from bpsx.plugin.adapter import as_integer
from bpsx.plugin.departure import Departed, depart, heeding_sigterm, leave

__all__ = ["Departed", "HostsUpdatedInterrupt", "State", "leave", "run", "steps_of"]
_Result = TypeVar("_Result")


class HostsUpdatedInterrupt(Exception):  # noqa: N818 - Horovod's name
    """Workers have joined, left or were lost; :func:`run` begins the training function anew.

    ``skip_sync``: no worker has joined, so all have the same state already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("workers have joined the job, left it or were lost")
        self.skip_sync = skip_sync


class State:
    """The values that all workers have to agree on, as attributes of this object.

    Not thread-safe. A subclass for a framework sends models and optimizers, too.
    """

    step: int
    #: Names of attributes that are no values.
    _OWN: tuple[str, ...] = ("_saved", "_names", "_callbacks", "_departures")
    #: Exceptions of the framework whose text may be that of an error of bpsx.
    _FOREIGN: tuple[type[Exception], ...] = ()
    #: Advice in an error: how to send an object that cannot be a value.
    _INSTEAD = ""

    def __init__(self, **values: Any) -> None:
        self._check_names(values)
        self._check_values(values)
        self._names = list(values)
        self._callbacks: list[Callable[[], None]] = []
        self._departures: list[Callable[[], None]] = []
        self._saved: dict[str, Any] = {}
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    # ---- for the script

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have ``callbacks`` called before the next sync if workers have joined, left or were lost.

        They may read the new ``rank()`` and ``size()``, and adapt learning rates and data. All
        workers call them at the same boundary.
        """
        self._callbacks += callbacks

    def register_departure_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have ``callbacks`` called on this worker when it has left the job: to save a checkpoint.

        It leaves after SIGTERM or :func:`leave`. ``rank()`` and ``size()`` are those of before, and
        nothing can be exchanged any more. If all workers leave at once, all call theirs.
        """
        self._departures += callbacks

    def commit(self) -> None:
        """Save the state in memory, and let workers join or leave; see :meth:`check_host_updates`.

        It copies all values. Raises as :meth:`check_host_updates`.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let workers join or leave, here, between two steps.

        All workers must call it (or :meth:`commit`) equally often. Raises
        :class:`HostsUpdatedInterrupt` if workers have joined, left or were lost, on all workers in
        the same call; :class:`Departed` on a worker that leaves; and the error that has ended the
        job.
        """
        self._settle()
        finish(math.inf)  # a framework's engine may hold exchanges of the step before
        change = session().pass_boundary()
        changed, entered = bool(change.lost or change.leaving), bool(change.entered)
        if change.leaving:
            self.save()  # a worker may die in what follows
        while change.leaving:
            self.regroup()  # with those that leave
            change = session().pass_boundary()
            entered = entered or bool(change.entered)
        if change.left:
            depart(self._departures, shutdown)
        if changed or entered or change.lost:
            raise HostsUpdatedInterrupt(skip_sync=not entered)

    # ---- for subclasses, run() and steps_of()

    def count_steps(self) -> None:
        """Have a value ``step``, which begins with 0, unless there is one.

        Raises :class:`ConfigError` if it is no integer.
        """
        if not hasattr(self, "step"):
            self._names.append("step")
            self.step = 0
        if "step" not in self._names or as_integer(self.step) is None:
            raise ConfigError(
                f"elastic.steps: {type(self).__name__}.step is {type(self.step).__name__}; expected"
                " an int, as it counts the steps"
            )

    def save(self) -> None:
        """Keep a copy of all values, for :meth:`restore`."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Go back to what was saved last."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Get all values from rank 0, which has been in the job for longest; then save them.

        All workers must call it. Raises as the broadcasts do.
        """
        if self._names:
            values = self._broadcast({name: getattr(self, name) for name in self._names})
            for name in self._names:
                setattr(self, name, values[name])
        self.save()

    def _settle(self) -> None:
        """Wait for gradients in flight, before workers join that have not pushed any."""

    def regroup(self) -> None:
        """Agree on what is left to do, before a worker leaves and after one was lost or has left.

        All workers call it, also the one that leaves.
        """

    def _broadcast(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's ``values``."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new workers; called by :meth:`on_reset` before the callbacks."""

    def on_reset(self) -> None:
        """Called by :func:`run` when workers have joined, left or were lost."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def has_lost_sender(self, error: Exception) -> bool:
        """Whether ``error`` says that a worker was lost while it sent values to this one.

        Other losses are not made good by another broadcast: a worker that has left in good order,
        or an operation that needs all workers.
        """
        return isinstance(error, (PeerLostError, *self._FOREIGN)) and says_root_lost(str(error))

    @staticmethod
    def _is_part(value: Any) -> bool:
        """Whether scripts use ``value`` where it is, as a model, so that a copy would not do."""
        return False

    def _check_values(self, values: Mapping[str, Any]) -> None:
        """Raise :class:`ConfigError` for a value that workers would get a copy of, in vain."""
        if wrong := [name for name, value in values.items() if self._is_part(value)]:
            raise ConfigError(
                f"{type(self).__name__}: {wrong[0]} is {type(values[wrong[0]]).__name__}, which"
                f" your script uses where it is; other workers would get a copy. {self._INSTEAD}"
            )

    def _check_names(self, names: Mapping[str, Any]) -> None:
        """Raise :class:`ConfigError` for a name that this object needs itself."""
        if wrong := [name for name in names if hasattr(type(self), name) or name in self._OWN]:
            raise ConfigError(
                f"{type(self).__name__}: {wrong[0]!r} cannot be the name of a value, as"
                f" {type(self).__name__} itself has it"
            )


class PartsState(State):
    """A State that has parts, too: models, optimizers and the like, also as attributes.

    Subclasses say how a framework copies and sends them.
    """

    _OWN = (*State._OWN, "_parts", "_kept")

    def __init__(self, parts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._check_names(parts)
        self._parts, self._kept = dict(parts), dict[str, Any]()
        for name, part in parts.items():
            setattr(self, name, part)
        super().__init__(**values)

    def save(self) -> None:
        """Keep a copy of all, for :meth:`restore`; on the devices on which they are."""
        super().save()
        self._kept = {name: self._copied(part) for name, part in self._parts.items()}

    def restore(self) -> None:
        """Go back to what was saved last."""
        super().restore()
        for name, kept in self._kept.items():
            self._put_back(self._parts[name], kept)

    def sync(self) -> None:
        """Get all from rank 0, which has been in the job for longest; then save it.

        All workers must call it. Raises as the broadcasts do.
        """
        for name, part in self._parts.items():
            self._send(f"elastic.{name}", part)
        super().sync()

    def _copied(self, part: Any) -> Any:
        """Return a copy of the state of ``part``."""
        raise NotImplementedError

    def _put_back(self, part: Any, kept: Any) -> None:
        """Give ``part`` the state that :meth:`_copied` has returned."""
        raise NotImplementedError

    def _send(self, name: str, part: Any) -> None:
        """Give ``part`` rank 0's state. Names on the wire begin with ``name``."""
        raise NotImplementedError


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a training function so that it goes on when workers are lost, leave or join.

    ``func(state, *args, **more)`` begins where ``state`` (a :class:`State`) says. It calls
    ``state.commit()`` between steps. When workers have joined, that call ends ``func`` on all
    workers; they get the state from rank 0 and call ``func`` again. A worker that joins begins with
    the state of rank 0, too. After the loss of a worker ``func`` is called again with the state as
    it is. If a broadcast fails because its sender has died, all go back to the last commit.

    SIGTERM lets this worker leave at its next ``state.commit()``, which then raises
    :class:`Departed`: in the main thread, unless the script has a handler of its own.

    ``bpsx.init()`` comes before. Raises what ``func`` raises, and the error that has ended the job.
    """

    @functools.wraps(func)
    def loop(state: State, *args: Any, **more: Any) -> _Result:
        if not isinstance(state, State):
            raise ConfigError(
                f"elastic.run: the first argument of {func.__name__}() is"
                f" {type(state).__name__}; expected a State"
            )
        session().expect_boundaries()  # Rank 0 is the root of the first sync and stays it.
        with heeding_sigterm():
            return _repeat(lambda: func(state, *args, **more), state, state.sync)

    return loop


def steps_of(kind: type[State], number: Any, given: Sequence[Any], more: Any) -> Iterator[int]:
    """Return the numbers of the steps of a training loop, as a framework's ``steps`` gives them.

    ``given`` and ``more``: a state, or the arguments of ``kind``, from which one is made. See
    :func:`bpsx.plugin.arrays_elastic.steps`.
    """
    last = as_integer(number)
    if last is None or last < 0:
        raise ConfigError(f"elastic.steps: number is {number!r}; expected an int of 0 or more")
    if given and isinstance(given[0], State):
        if len(given) > 1 or more:
            raise ConfigError(
                "elastic.steps: expected a state, or models and the like from which it makes one;"
                " not both"
            )
        state = given[0]
    else:
        state = kind(*given, **more)
    state.count_steps()
    return _steps(state, last)


def _steps(state: State, last: int) -> Iterator[int]:
    boundary: Callable[[], None] = state.sync
    session().expect_boundaries()  # Rank 0 is the root of the first sync and stays it.
    with heeding_sigterm():
        while True:
            _repeat(lambda: None, state, boundary)
            if state.step >= last:
                return
            yield state.step
            state.step += 1
            boundary = state.check_host_updates


def _repeat(func: Callable[[], _Result], state: State, boundary: Callable[[], None]) -> _Result:
    """Call ``boundary``, then ``func``, and both again after changes of the workers."""
    while True:
        try:
            boundary()
            return func()
        except HostsUpdatedInterrupt as e:
            # If a worker dies while the workers agree, none loses the steps so far.
            state.save()
            boundary = state.regroup if e.skip_sync else state.sync
        except Exception as e:
            if not state.has_lost_sender(e) or session().failure:
                raise
            finish(math.inf)
            if session().await_agreement().left:
                depart(state._departures, shutdown)
            state.restore()
            boundary = state.sync
        state.on_reset()
