"""The verbs on NumPy arrays, and the one session of the process.

All layers below take the session as an argument.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpsx import errors
from bpsx.api import gpu_arrays, host_arrays
from bpsx.api.arguments import check_handle, check_name, check_priority, checked_root
from bpsx.api.gpu_arrays import is_on_gpu
from bpsx.api.resizing import resumed
from bpsx.api.staged import StagedHandle
from bpsx.compression.manager import Remembered
from bpsx.compression.spec import compression as check_compression
from bpsx.config import ALONE, Config, LaunchedPlace, launched, place_fields
from bpsx.core._handle import Handle, Request, own_pid
from bpsx.dtypes import BY_NAME
from bpsx.scheduler import failing
from bpsx.session import refusals
from bpsx.session.refusals import counted
from bpsx.session.session import Session
from bpsx.system import process_exit, spawned
from bpsx.system._exit_status import set_exit_status
from bpsx.system.tracebacks import public
from bpsx.telemetry.throughput import Speed

#: Exit status of a process ended by SIGINT, as shells count it.
_INTERRUPTED = 130
log = logging.getLogger("bpsx")
#: Characters of an uncaught exception's text that are sent to the other processes.
_LONGEST_STORY = 1000
_lock = threading.RLock()
_session: Session | None = None
_owner_pid = 0
_hooked = False
_order: dict[str, int] = {}  # order of declared names, kept by suspend() for resume()
_remembered: Remembered | None = None  # compression of the declared names, kept likewise
# Whether begin() was given this process's place in its last job, which the environment lacks.
_placed = False
# This process's place on its machine in the suspended job.
_suspended: LocalPlace | None = None
_again = False  # whether this process has been in a job before
_engines: list[Callable[[float], int]] = []  # wait functions passed to add_engine()
#: Seconds between two attempts of resume() to find a new scheduler in the old one's place.
_ASK_AGAIN = 0.2
#: Seconds for which an engine is waited for before the next check whether the job has failed.
_LOOK = 0.2


class LocalPlace(NamedTuple):
    """A worker's place on its machine."""

    local_rank: int
    local_size: int


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
    global _placed
    with _lock:
        if not initialised():
            with failing.told("worker"):
                config, _placed = Config(role="worker", **given), bool(given)
            try:
                _adopt(_next_session(config) if again else Session(config, again=_again))
            except errors.JobOverError as e:
                raise spawned.explained(e, config.rank) from None


def initialised() -> bool:
    """Return whether this process is in a job. Thread-safe.

    It is after :func:`init`, before :func:`shutdown`, and not in a forked child.
    """
    return _session is not None and _owner_pid == os.getpid()


def _adopt(ours: Session) -> None:
    """Make ``ours`` the session of the process. The caller holds the lock."""
    global _session, _owner_pid, _hooked, _suspended, _again
    _session, _suspended, _again = ours, None, True
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
    _leave()


def _leave(remember: bool = False) -> None:
    global _session, _order, _remembered, _suspended
    if not remember:
        _suspended = None
    waited = finish()
    with _lock:
        if remember and initialised():
            ours = session()
            _suspended = LocalPlace(ours.local_rank, ours.local_size)
            _order, _remembered = ours.order, ours.compressing.remembered()
        leaving, _session = _session, None
    if leaving is not None and _owner_pid == os.getpid():
        leaving.close(waited=waited)
        _tell_untold(leaving)


def _tell_untold(ours: Session) -> None:
    """Report a failure of the job that no exception has reported, and set exit status 1."""
    if ours.failure and not ours.told:
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
    _leave(remember=True)


@public
def resume(
    num_workers: int, num_servers: int, global_rank: int | None = None, context: object = None
) -> None:
    """Join another job at the same scheduler address, after :func:`suspend`.

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
        if initialised():
            raise errors.ConfigError("resume: this process is in a job; call suspend() first")
        if _placed:
            raise errors.ConfigError(
                "resume: torchrun has set this process's rank, which bpsx.resume does not know;"
                " call bpsx.torch.resume instead"
            )
        _adopt(_next_session(resumed(num_workers, num_servers, global_rank)))


def _next_session(config: Config) -> Session:
    """Return a session that continues with the suspended one's names and their compression."""
    global _remembered
    end = time.monotonic() + config.rendezvous_timeout
    while True:
        try:
            found, _remembered = Session(config, _order, _remembered, again=True), None
            return found
        except errors.JobOverError:  # the old scheduler still exists
            if time.monotonic() >= end:
                raise
            time.sleep(_ASK_AGAIN)


def _at_exit() -> None:
    """Leave the job when the interpreter exits."""
    global _session
    uncaught, waited = process_exit.uncaught(), 0.0
    if uncaught is None:  # otherwise work is undone, which an engine may wait for
        try:
            waited = finish()
        except KeyboardInterrupt as e:
            uncaught = e
            set_exit_status(_INTERRUPTED)
    ours, _session = _session, None
    if ours is None or _owner_pid != os.getpid():
        return
    ours.close(failure=_story(uncaught) if uncaught is not None else "", waited=waited)
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


refusals.refused = lambda *refused: session().refused(*refused) if initialised() else None


def _local_place() -> Session | LocalPlace:
    """Return this worker's place on its machine.

    Between :func:`suspend` and :func:`resume` that is the former place, from which scripts compute
    their next rank.
    """
    return (
        _suspended
        if _session is None and _suspended is not None and _owner_pid == os.getpid()
        else session()
    )


@public
def rank() -> int:
    """Return this worker's rank, 0 to ``size()`` - 1."""
    return session().rank


@public
def size() -> int:
    """Return the number of worker processes in the job."""
    return session().size


@public
def local_rank() -> int:
    """Return this worker's index on its machine."""
    return _local_place().local_rank


@public
def local_size() -> int:
    """Return the number of worker processes on this machine."""
    return _local_place().local_size


@public
def declare(name: str, compression: Mapping[str, Any] | None = None) -> int:
    """Fix the position of ``name`` in the order of declaration; return the position (0, 1, …).

    Declaring a name again changes only its compression.

    ``compression``: compression of the name's sums, as in :doc:`docs/train/compression.md`. It
    applies from the next push_pull on and must be given on all workers. An empty mapping ends it.
    Raises :class:`~bpsx.errors.ConfigError` (a :class:`ValueError`) unless ``name`` is a string of
    1 to 4096 bytes of UTF-8, and for invalid compression; the message names key, value and what is
    allowed.
    """
    ours = session()
    return ours.declare(
        name,
        None if compression is None else check_compression(compression, f"compression of {name!r}"),
    )


@public
@counted("push_pull")
def push_pull_async(
    array: np.ndarray,
    name: str | None = None,
    average: bool = True,
    priority: int = 0,
    output: np.ndarray | None = None,
    learning_rate: float | None = None,
) -> Handle | StagedHandle:
    """Begin to sum ``array`` over all workers; :func:`synchronize` returns the result.

    In asynchronous training (``BYTEPS_ENABLE_ASYNC``) the servers add ``array`` to their value of
    ``name``, and the result is the value after that.

    Arguments:
    - ``array``: any shape and strides, of a dtype in :data:`bpsx.dtypes.DTYPES` (bfloat16 as in
      ``ml_dtypes``), of any byte order, which may differ between workers. Nothing may write to its
      memory until the end, including other operations. Subclasses count as the elements that they
      hold; a masked array must not have masked elements.
    - ``name``: workers must agree on name, shape, dtype and ``average``. Calls without a name are
      matched by shape and dtype, in the order in which each worker makes them.
    - ``average``: divide by ``size()``; integers round down. Integer sums wrap.
    - ``priority``: a larger priority goes first.
    - ``output``: array for the result, complete once :func:`synchronize` has returned. It has
      ``array``'s shape and dtype (the byte order may differ), is C-contiguous and writeable, and
      may be ``array`` itself or overlap it. By default a new array of ``array``'s dtype.
    - ``learning_rate``: for names declared with ``ef="corrected"``: at least 0 (which corrects
      nothing), the same on all workers.

    Raises :class:`~bpsx.dtypes.UnsupportedDType` (a :class:`TypeError`),
    :class:`~bpsx.errors.ConfigError`. Thread-safe.
    """
    return _push_pull(array, name, average, priority, output, learning_rate, will_wait=False)


@public
@counted("push_pull")
def push_pull(
    array: np.ndarray,
    name: str | None = None,
    average: bool = True,
    priority: int = 0,
    output: np.ndarray | None = None,
    learning_rate: float | None = None,
) -> np.ndarray:
    """Same as :func:`push_pull_async`, and wait; return the sum or average.

    Raises what :func:`synchronize` raises.
    """
    result: np.ndarray = _push_pull(
        array, name, average, priority, output, learning_rate, will_wait=True
    ).wait()
    return result


@public
def poll(handle: Handle | StagedHandle) -> bool:
    """Return whether ``handle``'s operation has ended, without blocking.

    Raises :class:`~bpsx.errors.ConfigError` if ``handle`` is not a handle.
    """
    check_handle(handle, "poll")
    return handle.done()


@public
def synchronize(handle: Handle | StagedHandle) -> Any:
    """Wait for ``handle`` and return its result.

    Raises :class:`~bpsx.errors.PeerLostError`, :class:`~bpsx.errors.MismatchError`,
    :class:`~bpsx.errors.StallError` and other errors of :mod:`bpsx.errors` that made the operation
    fail; :class:`~bpsx.errors.ConfigError` if ``handle`` is not a handle.
    """
    check_handle(handle, "synchronize")
    return handle.wait()


@public
@counted("broadcast")
def broadcast(
    array: np.ndarray, root_rank: int = 0, name: str | None = None, output: np.ndarray | None = None
) -> np.ndarray:
    """Return worker ``root_rank``'s ``array``, bit for bit, on every worker.

    ``array``: of any fixed-size dtype, including structured ones, without masked elements. Shape
    and dtype must agree between workers; the byte order may differ.

    ``output`` as in :func:`push_pull_async`. Raises as :func:`push_pull`.
    """
    ours = session()
    check_name(name, "broadcast")
    root = checked_root(root_rank, "broadcast", ours.size)
    if is_on_gpu(array):
        found: np.ndarray = _broadcast_on_gpu(array, root, name, output)
        return found
    what = name or "array"
    given = host_arrays.movable(array, what)
    memory = host_arrays.copied(given, output, what)
    raw = host_arrays.as_bytes(memory.target)
    shape, code = host_arrays.declared_as(memory.target)
    request = Request(
        name or f"broadcast.noname.{memory.target.dtype}.{given.shape}",
        raw if root == ours.rank else None,
        raw,
        divisor=root,
        broadcast=True,
        will_wait=True,
        owner=memory.output,
        result=memory.output,
    )
    handle = ours.submit(request, shape, code, raw.nbytes)
    result: np.ndarray = memory.handle(handle).wait()
    return result


@public
@counted("seed")
def seed(
    array: np.ndarray, name: str, root_rank: int = 0, output: np.ndarray | None = None
) -> np.ndarray:
    """Set the servers' value of ``name`` to worker ``root_rank``'s ``array``, and return it.

    For asynchronous training. All workers call it, and it waits for all. It overwrites earlier
    pushes; without it the value begins as zeros.

    ``name``, shape and dtype as in the :func:`push_pull` calls that follow; ``output`` as there.
    Raises :class:`~bpsx.errors.ConfigError` in a synchronous job, and as :func:`push_pull`.
    """
    ours = session()
    if not ours.config.asynchronous:
        raise errors.ConfigError(
            "seed: servers hold values only in asynchronous training; set BYTEPS_ENABLE_ASYNC=1 on"
            " all workers and servers"
        )
    check_name(name, "seed")
    root = checked_root(root_rank, "seed", ours.size)
    given, dtype = host_arrays.summand(array, name)
    memory = host_arrays.copied(given, output, name)
    raw = host_arrays.as_bytes(memory.target)
    request = Request(
        name,
        raw if root == ours.rank else None,
        raw,
        divisor=root,
        broadcast=True,
        asynchronous=True,
        will_wait=True,
        owner=memory.output,
        result=memory.output,
    )
    handle = ours.submit(request, given.shape, dtype.code, given.nbytes)
    result: np.ndarray = memory.handle(handle).wait()
    return result


@public
def join() -> int:
    """Declare that this worker has no more data, and wait until all workers have done so.

    Returns the rank that joined last, on all workers.

    This worker's operations in flight end first. From then on the others' sums, averages and
    barriers complete without it, as if it pushed zeros; an average still divides by ``size()``. A
    broadcast whose root has joined raises :class:`~bpsx.errors.JoinedError` on the other workers.
    So does any verb on this worker until all have joined. Afterwards the job continues as before,
    and ``join`` can be used again. The worker that joined last has seen all rounds.

    Raises :class:`~bpsx.errors.PeerLeftError` if a worker has left without joining,
    :class:`~bpsx.errors.PeerLostError`. Thread-safe.
    """
    finish(math.inf)
    return session().join()


@public
def barrier() -> None:
    """Wait until every worker has called it."""
    session().barrier()


@public
def get_pushpull_speed() -> Speed:
    """Return (milliseconds since the Unix epoch, MB/s) of completed tensors since the last call.

    The rate counts the time in which operations were in flight. If none has been since the last
    call, returns that call's result. MB are 10^6 bytes of tensor, counted once.

    The result also has ``sent`` and ``received``: MB/s on this worker's wire in the same time. They
    are lower where gradients are compressed.
    """
    return session().speed()


@public
def trace_start() -> None:
    """Record a timeline of every push_pull that begins from now on, until :func:`trace_stop`.

    Does nothing if a timeline is being recorded. Independent of ``BYTEPS_TRACE_ON``. Thread-safe.
    """
    session().reporter.start()


@public
def trace_stop() -> str | None:
    """End the recording of :func:`trace_start` and return the file's path, in ``BYTEPS_TRACE_DIR``.

    See docs/run/tracing.md. Returns None if nothing was being recorded, or if the file could not be
    written, which the log reports. Thread-safe.
    """
    path = session().reporter.stop()
    return None if path is None else str(path)


def _push_pull(
    array: np.ndarray,
    name: str | None,
    average: bool,
    priority: int,
    output: np.ndarray | None,
    rate: float | None,
    will_wait: bool,
) -> Handle | StagedHandle:
    ours = session()
    if rate is not None and not isinstance(rate, (int, float, np.integer, np.floating)):
        raise errors.ConfigError(
            f"push_pull: learning_rate={rate!r}: must be a number of at least 0"
        )
    check_name(name, "push_pull")
    check_priority(priority, "push_pull")
    if is_on_gpu(array):
        return _push_pull_on_gpu(array, name, average, priority, output, rate, will_wait)
    given, dtype = host_arrays.summand(array, name or "array")
    memory = host_arrays.operands(given, output, name or "array")
    request = Request(
        name or f"push_pull.noname.{dtype.name}.{given.shape}",
        host_arrays.as_words(memory.source),
        host_arrays.as_words(memory.target),
        divisor=ours.size if average else 1,
        asynchronous=ours.config.asynchronous,
        priority=priority,
        will_wait=will_wait,
        rate=-1.0 if rate is None else float(rate),
        result=memory.output,
    )
    return memory.handle(ours.submit(request, given.shape, dtype.code, given.nbytes))


def _push_pull_on_gpu(
    array: Any,
    name: str | None,
    average: bool,
    priority: int,
    output: Any,
    rate: float | None,
    will_wait: bool,
) -> Handle:
    what = name or "array"
    out = gpu_arrays.output_for(array, output, what)
    source, target = (
        gpu_arrays.view(gpu_arrays.contiguous(array, what), what),
        gpu_arrays.view(out, what),
    )
    gpu_arrays.check_overlap(source, target, what)
    return session().push_pull(
        name or f"push_pull.noname.{source.dtype}.{source.shape}",
        source,
        target,
        average=average,
        priority=priority,
        will_wait=will_wait,
        rate=-1.0 if rate is None else float(rate),
        result=out,
    )


def _broadcast_on_gpu(array: Any, root: int, name: str | None, output: Any) -> Any:
    what = name or "array"
    ours = session()
    out = gpu_arrays.output_for(array, output, what)
    source, target = (
        gpu_arrays.view(gpu_arrays.contiguous(array, what), what, moved=True),
        gpu_arrays.view(out, what, moved=True),
    )
    gpu_arrays.check_overlap(source, target, what)
    ours.devices.copy(what, gpu_arrays.as_bytes(source), gpu_arrays.as_bytes(target))
    sent = target if target.dtype in BY_NAME else gpu_arrays.as_bytes(target)
    return ours.broadcast(
        name or f"broadcast.noname.{source.dtype}.{source.shape}",
        sent,
        root,
        result=out,
        asynchronous=False,
    ).wait()
