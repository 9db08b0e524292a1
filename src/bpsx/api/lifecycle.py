"""The one session of this process: how it begins, and how this process leaves its job.

All layers below take the session as an argument.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bpsx import errors
from bpsx.api.resizing import resumed
from bpsx.api.states import PROCESS, Event, Process
from bpsx.compression.manager import Remembered
from bpsx.config import ALONE, Config, LaunchedPlace, launched, place_fields
from bpsx.core._handle import own_pid
from bpsx.scheduler import failing
from bpsx.session import refusals
from bpsx.session.session import Session
from bpsx.system import process_exit, spawned
from bpsx.system._exit_status import set_exit_status
from bpsx.system.tracebacks import public

#: Exit status of a process ended by SIGINT, as shells count it.
_INTERRUPTED = 130
log = logging.getLogger("bpsx")
#: Characters of an uncaught exception's text that are sent to the other processes.
_LONGEST_STORY = 1000
#: Seconds between two attempts of resume() to find a new scheduler in the old one's place.
_ASK_AGAIN = 0.2
#: Seconds for which an engine is waited for before the next check whether the job has failed.
_LOOK = 0.2


class SuspendedSession(NamedTuple):
    """Parts of a session that suspend() keeps for resume().

    They are this worker's place on its machine, the order of declared names, and their compression.
    """

    local_rank: int
    local_size: int
    order: dict[str, int]
    remembered: Remembered


_lock = threading.RLock()
_changed = threading.Condition(_lock)  # notified when the state changes
_state = Process.OUTSIDE
_state_pid = os.getpid()  # process in which _state was set; a forked child inherits it
_leaver = 0  # identifier of the thread that closes the session
_session: Session | None = None  # set while the state is INSIDE
_owner_pid = 0
_kept: SuspendedSession | None = None  # set from suspend() until the next job or shutdown()
# Whether begin() was given this process's place in its last job, which the environment lacks.
_placed = False
_again = False  # whether this process has been in a job before
_hooked = False
_engines: list[Callable[[float], int]] = []  # wait functions passed to add_engine()


def _move(event: Event) -> Process:
    """Go to the state that follows ``event``, and return it."""
    global _state, _kept
    with _changed:
        _state = PROCESS.after(_state, event)
        if _state is Process.OUTSIDE:
            _kept = None
        _changed.notify_all()
        return _state


def _note_fork() -> None:
    """See whether this is a forked child of the process whose state is known."""
    global _state_pid
    if _state_pid != os.getpid():
        _state_pid = os.getpid()
        _move(Event.FORKED)


@public
def init(lazy: bool = True) -> None:
    """Join the job that the environment describes.

    Does nothing if this process is in a job already. ``lazy`` is accepted for BytePS and ignored.

    Blocks until all workers and servers have joined. Raises :class:`~bpsx.errors.ConfigError` (a
    missing or malformed variable, or another launcher's variables that show other processes),
    :class:`~bpsx.errors.RendezvousError` (a process is missing at the deadline),
    :class:`~bpsx.errors.TransportError`. Thread-safe.
    """
    with _lock:
        if not initialised():
            begin(**launched_fields(launched()))


def launched_fields(ours: LaunchedPlace | None) -> dict[str, Any]:
    """Return this process's place as another launcher has set it.

    Keys are fields of :class:`~bpsx.config.Config`. Returns an empty dictionary for a job of one
    process. Raises :class:`~bpsx.errors.ConfigError` if there are other processes and the
    environment does not say how to find them.
    """
    if ours is None or ours.size == 1:
        return {}
    with_scheduler = Config(role="worker").root_uri is not None
    found = place_fields(ours) if with_scheduler else None
    if found is not None:
        return found
    begun = f"the environment says that this process is one of {ours.size} ({ours.told})"
    if with_scheduler:
        raise errors.ConfigError(
            f"{begun}, but not which machine it is on: bpsx numbers ranks machine by machine, with"
            " the same number of processes on each. Place processes by slot, or set"
            f" DMLC_NUM_WORKER and DMLC_WORKER_ID; {ALONE}"
        )
    raise errors.ConfigError(
        f"{begun}, but not how to reach the job's scheduler and servers. Set DMLC_PS_ROOT_URI,"
        " DMLC_PS_ROOT_PORT and DMLC_NUM_SERVER, or start the script with bpsx-run. A PyTorch"
        " script may call bpsx.torch.init(), which needs only MASTER_ADDR and MASTER_PORT;"
        f" {ALONE}"
    )


def begin(again: bool = False, **given: Any) -> None:
    """Same as :func:`init`, with some fields of :class:`~bpsx.config.Config` given.

    Given fields replace those of the environment. ``again``: use the names that :func:`suspend` has
    kept, and wait for the next job if the last one still exists.
    """

    def enter() -> Session:
        global _placed
        with failing.told("worker"):
            config, _placed = Config(role="worker", **given), bool(given)
        try:
            return _next_session(config) if again else Session(config, again=_again)
        except errors.JobOverError as e:
            raise spawned.explained(e, config.rank) from None

    with _lock:
        _await_end("resume" if again else "init")
        if not initialised():
            _connect(enter)


def _await_end(verb: str) -> None:
    """Wait until a session that another thread closes is closed. The caller holds the lock.

    Raises :class:`~bpsx.errors.ConfigError` if the calling thread itself is in one of the functions
    that change the state, and so cannot wait for its end.
    """
    _note_fork()
    while _state in (Process.LEAVING, Process.SUSPENDING) and _leaver != threading.get_ident():
        _changed.wait()
    if _state not in (Process.OUTSIDE, Process.INSIDE, Process.SUSPENDED):
        raise errors.ConfigError(
            f"{verb}: called while init(), resume(), shutdown() or suspend() runs in the same"
            " thread, as by a signal handler; call it when that has returned"
        )


def _connect(enter: Callable[[], Session]) -> None:
    """Make the session that ``enter`` returns that of this process. The caller holds the lock."""
    _move(Event.INIT_OR_RESUME)
    try:
        ours = enter()
    except BaseException:
        _move(Event.SESSION_CANNOT_BEGIN)
        raise
    _adopt(ours)


def initialised() -> bool:
    """Return whether this process is in a job. Thread-safe.

    It is after :func:`init`, before :func:`shutdown`, and not in a forked child.
    """
    return _session is not None and _owner_pid == os.getpid()


def _adopt(ours: Session) -> None:
    """Make ``ours`` the session of the process. The caller holds the lock."""
    global _session, _owner_pid, _hooked, _kept, _again
    _move(Event.SESSION_BEGINS)
    _session, _kept, _again = ours, None, True
    _owner_pid = os.getpid()
    ours.reporter.close_on_sigterm()
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
    process_exit.hook_child(_at_exit)


def add_engine(wait: Callable[[float], int]) -> None:
    """Register a framework engine to wait for before this process joins or leaves a job.

    For plugins of a framework that keeps our operations until their tensors are ready. ``wait``
    takes a limit in seconds and returns the number of unfinished operations.
    """
    with _lock:
        _engines.append(wait)
        # Run _at_exit before the exit hooks that the plugin has registered: those no longer need
        # the session.
        if _hooked:
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)


def finish(limit: float | None = None) -> float:
    """Wait for the operations that the framework's engine holds.

    The wait ends after ``limit`` seconds (by default ``BPSX_SHUTDOWN_TIMEOUT``), or as soon as the
    job has failed. Returns the seconds waited. Raises nothing of its own. Thread-safe.
    """
    if not (_engines and initialised()):
        return 0.0
    ours = session()
    limit = ours.config.shutdown_timeout if limit is None else limit
    begin = time.monotonic()
    for wait in _engines:
        while wait(_LOOK) and not ours.failure:
            if time.monotonic() >= begin + limit:
                log.warning(
                    "the framework's engine did not finish its operations within %g s"
                    " (BPSX_SHUTDOWN_TIMEOUT)",
                    limit,
                )
                return time.monotonic() - begin
    return time.monotonic() - begin


@public
def shutdown() -> None:
    """Leave the job in good order, after finishing operations in flight.

    Waits at most ``BPSX_SHUTDOWN_TIMEOUT``. Idempotent, thread-safe.

    ``init`` may be called again afterwards. The interpreter's exit calls shutdown automatically.
    Does not raise. If the job has failed and no exception has reported it, a line on standard error
    does, and the process's exit status will be 1.
    """
    _tell_untold(_leave(Event.SHUTDOWN, finish()))


def _leave(event: Event, waited: float, failure: str = "") -> Session | None:
    """Close the session, and return it; None if this process is not in a job.

    ``waited`` and ``failure`` as for :meth:`bpsx.session.session.Session.close`.
    """
    global _session, _kept, _leaver
    with _lock:
        _note_fork()
        ours = _session if _state is Process.INSIDE else None
        if ours is not None and event is Event.SUSPEND:
            order, remembered = ours.order, ours.compressing.remembered()
            _kept = SuspendedSession(ours.local_rank, ours.local_size, order, remembered)
        _session, _leaver = None, threading.get_ident() if ours is not None else _leaver
        _move(event)
    if ours is not None:
        try:
            ours.close(failure=failure, waited=waited)
        finally:
            _move(Event.SESSION_IS_CLOSED)
    return ours


def _tell_untold(ours: Session | None) -> None:
    """Report a failure of the job that no exception has reported, and set exit status 1."""
    if ours is not None and ours.failure and not ours.failure_raised:
        print(f"bpsx: exit status 1, because the job has failed: {ours.failure}", file=sys.stderr)
        set_exit_status(1)
        process_exit.end_child_with(1)


@public
def suspend() -> None:
    """Leave the job in good order, as :func:`shutdown`, and keep names for :func:`resume`.

    The order of declared names is kept, and their compression with residuals and momentum. All
    workers must call it; otherwise those that continue fail without this one. Does nothing before
    :func:`init`.
    """
    _tell_untold(_leave(Event.SUSPEND, finish()))


@public
def resume(
    num_workers: int, num_servers: int, global_rank: int | None = None, context: object = None
) -> None:
    """Join another job at the same scheduler address, after :func:`suspend`.

    Without a :func:`suspend` before it, it is an :func:`init` for a job of that size: there are no
    kept names to go on with.

    The job has ``num_workers`` machines and ``num_servers`` servers. Its scheduler and servers are
    new processes. resume waits for them, and for all workers, up to ``BPSX_RENDEZVOUS_TIMEOUT``.
    ``global_rank`` becomes ``rank()``; by default ``DMLC_WORKER_ID`` decides, as in :func:`init`.
    With several processes per machine it is machine * ``BYTEPS_LOCAL_SIZE`` +
    ``BYTEPS_LOCAL_RANK``. ``context`` is accepted for BytePS and ignored. The environment is not
    changed.

    Raises as :func:`init`, and :class:`~bpsx.errors.ConfigError` for numbers that do not fit, or if
    this process is in a job.
    """
    with _lock:
        _await_end("resume")
        if initialised():
            raise errors.ConfigError("resume: this process is in a job; call suspend() first")
        if _placed:
            raise errors.ConfigError(
                "resume: torchrun has set this process's rank, which bpsx.resume does not know;"
                " call bpsx.torch.resume instead"
            )
        _connect(lambda: _next_session(resumed(num_workers, num_servers, global_rank)))


def _next_session(config: Config) -> Session:
    """Return a session that continues with the suspended one's names and their compression."""
    end = time.monotonic() + config.rendezvous_timeout
    while True:
        try:
            if _kept is None:
                return Session(config, again=True)
            return Session(config, _kept.order, _kept.remembered, again=True)
        except errors.JobOverError:  # the old scheduler still exists
            if time.monotonic() >= end:
                raise
            time.sleep(_ASK_AGAIN)


def _at_exit() -> None:
    """Leave the job when the interpreter exits."""
    uncaught, waited = process_exit.uncaught(), 0.0
    if uncaught is None:  # otherwise work is undone, which an engine may wait for
        try:
            waited = finish()
        except KeyboardInterrupt as e:
            uncaught = e
            set_exit_status(_INTERRUPTED)
    if not initialised():  # another thread that is in init() would hold the lock
        return
    ours = _leave(Event.SHUTDOWN, waited, _story(uncaught) if uncaught is not None else "")
    if uncaught is None:
        _tell_untold(ours)


def _story(uncaught: BaseException) -> str:
    text = f"ended by {errors.in_short(uncaught)}"
    return text if len(text) <= _LONGEST_STORY else text[:_LONGEST_STORY] + " …"


def session() -> Session:
    """Return the process's session.

    Raises :class:`~bpsx.errors.NotInitializedError` before ``init``, after ``shutdown``, and in a
    forked child.
    """
    found = _session
    if found is None:
        raise errors.NotInitializedError("bpsx is not initialised: call init() first")
    if _owner_pid != own_pid():
        raise errors.NotInitializedError(
            f"bpsx was initialised in process {_owner_pid}, and this is its forked child"
            f" {os.getpid()}; call init() in the child before anything else, or use the 'spawn'"
            " start method"
        )
    return found


refusals.count_refused = lambda *call: session().count_refused(*call) if initialised() else None


def local_place() -> Session | SuspendedSession:
    """Return this worker's place on its machine.

    Between :func:`suspend` and :func:`resume` that is the former place, from which scripts compute
    their next rank.
    """
    kept = _kept
    return kept if kept is not None and _owner_pid == os.getpid() else session()
