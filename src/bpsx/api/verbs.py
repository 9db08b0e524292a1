"""The verbs on NumPy arrays, and the one session of the process.

Everything below takes the session as an argument.
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
from bpsx.config import ALONE, Config, Place, launched, place_fields
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

#: The exit status of who has been sent SIGINT, as shells count it.
_INTERRUPTED = 130
log = logging.getLogger("bpsx")
#: Characters of an uncaught exception that the others are told.
_LONGEST_STORY = 1000
_lock = threading.RLock()
_session: Session | None = None
_owner_pid = 0
_hooked = False
_order: dict[str, int] = {}  # of declared names, kept by suspend() for resume()
_remembered: Remembered | None = None  # how they are compressed, likewise
# this process's place in its last job was given to begin(), and is not in the environment
_placed = False
# this process's place on its machine in the job that it has suspended
_suspended: LocalPlace | None = None
_again = False  # whether this process has been in a job before
_engines: list[Callable[[float], int]] = []  # what add_engine() was given
#: How often resume() asks whether a new scheduler has taken the old one's place.
_ASK_AGAIN = 0.2
#: How long an engine is waited for before it is asked whether the job has failed in the meantime;
#: seconds.
_LOOK = 0.2


class LocalPlace(NamedTuple):
    """A worker's place on its machine."""

    local_rank: int
    local_size: int


@public
def init(lazy: bool = True) -> None:
    """Join the job that the environment describes.

    Does nothing if that was done already. ``lazy`` is upstream's and ignored.

    Blocks until all workers and servers are there. Raises :class:`~bpsx.errors.ConfigError` (a
    missing or malformed variable, or another launcher's that say that there are other processes),
    :class:`~bpsx.errors.RendezvousError` (somebody is missing at the deadline),
    :class:`~bpsx.errors.TransportError`. Thread-safe.
    """
    with _lock:
        if not initialised():
            begin(**launched_fields(launched()))


def launched_fields(ours: Place | None) -> dict[str, Any]:
    """The place that another launcher has given this process, by field of
    :class:`~bpsx.config.Config`; empty for a job of one.

    Raises :class:`~bpsx.errors.ConfigError` if there are others of whom bpsx has not been told how
    to find them.
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
            f"{begun}, but not which machine it is on: bpsx counts ranks machine by machine, with"
            " as many processes on each. Place processes by slot, or set DMLC_NUM_WORKER and"
            f" DMLC_WORKER_ID; {ALONE}"
        )
    raise errors.ConfigError(
        f"{begun}, but DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and DMLC_NUM_SERVER, the scheduler and"
        " servers of their job, are not set: set them, or start the script with bpsx-run, or in a"
        " script of PyTorch's call bpsx.torch.init(), which needs only MASTER_ADDR and"
        f" MASTER_PORT; {ALONE}"
    )


def begin(again: bool = False, **given: Any) -> None:
    """:func:`init` with some fields of :class:`~bpsx.config.Config` given, instead of read from the
    environment.

    ``again``: with the names that :func:`suspend` has kept, and waiting for the next job if the
    last one is still there.
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
    """Whether this process is in a job: after :func:`init`, before :func:`shutdown`, and not in a
    forked child.

    Thread-safe.
    """
    return _session is not None and _owner_pid == os.getpid()


def _adopt(ours: Session) -> None:
    """Make ``ours`` the session of the process. The lock is held."""
    global _session, _owner_pid, _hooked, _suspended, _again
    _session, _suspended, _again = ours, None, True
    _owner_pid = os.getpid()
    ours.reporter.close_on_sigterm()
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
    process_exit.hook_child(_at_exit)


def add_engine(wait: Callable[[float], int]) -> None:
    """For plugins of a framework that keeps operations of ours until their tensors are there: what
    is waited for before this process joins or leaves a job.

    ``wait`` takes how long at most, in seconds, and returns how many operations are left.
    """
    with _lock:
        _engines.append(wait)
        # what the plugin has registered to be done at exit needs the session no more
        if _hooked:
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)


def finish(limit: float | None = None) -> float:
    """Wait for what the framework's engine has been given, no longer than ``limit`` seconds
    (``BPSX_SHUTDOWN_TIMEOUT``), and not at all if the job has failed.

    Returns how many seconds that took. Raises nothing of its own. Thread-safe.
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
                    "there are operations that the framework's engine has not finished in %g s"
                    " (BPSX_SHUTDOWN_TIMEOUT)",
                    limit,
                )
                return time.monotonic() - begin
    return time.monotonic() - begin


@public
def shutdown() -> None:
    """Leave the job in good order: what is under way is finished first (``BPSX_SHUTDOWN_TIMEOUT``).

    Idempotent, thread-safe.

    ``init`` may be called again afterwards. Called by itself when the interpreter ends. Does not
    raise: if the job has failed and no exception has told so, a line on standard error does, and
    the process's exit status will be 1.
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
    """If the job has failed and no exception has told the script, do not let the process end as if
    nothing had happened.
    """
    if ours.failure and not ours.told:
        print(f"bpsx: exit status 1, because the job has failed: {ours.failure}", file=sys.stderr)
        set_exit_status(1)
        process_exit.end_child_with(1)


@public
def suspend() -> None:
    """Leave the job in good order, as :func:`shutdown`, but remember the order of declared names
    for :func:`resume`, and how they are compressed, with residuals and momentum.

    All workers do it, or those that go on fail for want of this one. Does nothing before
    :func:`init`.
    """
    _leave(remember=True)


@public
def resume(
    num_workers: int, num_servers: int, global_rank: int | None = None, context: object = None
) -> None:
    """Join another job, after :func:`suspend`: of ``num_workers`` machines and ``num_servers``
    servers, at the same scheduler address.

    That job's scheduler and servers are new processes; resume waits for them, and for all workers,
    up to ``BPSX_RENDEZVOUS_TIMEOUT``. ``global_rank`` becomes ``rank()``; by default
    ``DMLC_WORKER_ID`` decides, as in :func:`init`. With several processes per machine it is machine
    * ``BYTEPS_LOCAL_SIZE`` + ``BYTEPS_LOCAL_RANK``. ``context`` is upstream's and ignored. The
    environment is not changed.

    Raises as :func:`init`, and :class:`~bpsx.errors.ConfigError` for numbers that fit nothing, or
    if this process is in a job.
    """
    with _lock:
        if initialised():
            raise errors.ConfigError("resume: this process is in a job; call suspend() first")
        if _placed:
            raise errors.ConfigError(
                "resume: torchrun has given this process its place, which bpsx.resume cannot see:"
                " call bpsx.torch.resume"
            )
        _adopt(_next_session(resumed(num_workers, num_servers, global_rank)))


def _next_session(config: Config) -> Session:
    """One that goes on with the names of the suspended one, and has from then on what was kept of
    them.
    """
    global _remembered
    end = time.monotonic() + config.rendezvous_timeout
    while True:
        try:
            found, _remembered = Session(config, _order, _remembered, again=True), None
            return found
        except errors.JobOverError:  # the old scheduler is still there
            if time.monotonic() >= end:
                raise
            time.sleep(_ASK_AGAIN)


def _at_exit() -> None:
    """Leave when the interpreter ends."""
    global _session
    uncaught, waited = process_exit.uncaught(), 0.0
    if uncaught is None:  # else there is work undone, which may be what an engine waits for
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
    """The process's session.

    Raises :class:`~bpsx.errors.NotInitializedError` before ``init``, after ``shutdown``, and in a
    forked child.
    """
    found = _session
    if found is None:
        raise errors.NotInitializedError("bpsx is not initialised: call init() first")
    if _owner_pid != own_pid():
        raise errors.NotInitializedError(
            f"bpsx was initialised in process {_owner_pid} and this is its forked child"
            f" {os.getpid()}: call init() in the child before anything else, or use the 'spawn'"
            " start method"
        )
    return found


refusals.refused = lambda *refused: session().refused(*refused) if initialised() else None


def _local_place() -> Session | LocalPlace:
    """This worker's place on its machine: between :func:`suspend` and :func:`resume` what it was,
    which scripts use to find their next rank.
    """
    return (
        _suspended
        if _session is None and _suspended is not None and _owner_pid == os.getpid()
        else session()
    )


@public
def rank() -> int:
    """This worker's rank, 0 to ``size()`` - 1."""
    return session().rank


@public
def size() -> int:
    """Number of worker processes in the job."""
    return session().size


@public
def local_rank() -> int:
    """This worker's index on its machine."""
    return _local_place().local_rank


@public
def local_size() -> int:
    """Worker processes on this machine."""
    return _local_place().local_size


@public
def declare(name: str, compression: Mapping[str, Any] | None = None) -> int:
    """Fix the place of ``name`` in the order of declaration; returns it (0, 1, …).

    Calling it again changes nothing but compression.

    ``compression``: how its sums travel, as in :doc:`docs/train/compression.md`; from the next
    push_pull on, on all workers. An empty mapping ends it. Raises :class:`~bpsx.errors.ConfigError`
    (a :class:`ValueError`) for what is no name: it has 1 to 4096 bytes of UTF-8; and for
    compression that makes no sense, naming key, value and what is allowed.
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
    """Begin to sum ``array`` over all workers; :func:`synchronize` gives the result.

    In asynchronous training (``BYTEPS_ENABLE_ASYNC``): add ``array`` to the servers' value of
    ``name``; the result is the value after that.

    ``array``: any shape and strides, of a dtype in :data:`bpsx.dtypes.DTYPES` (bfloat16 as in
    ``ml_dtypes``), of any byte order, which workers need not share. Nothing may write to its memory
    until the end, another operation neither. Subclasses count as the elements that they hold; a
    masked array must not have any that is masked. Workers must agree on ``name``, shape, dtype and
    ``average``. Without a name, calls of one shape and dtype are matched in the order in which each
    worker makes them. ``average`` divides by ``size()``; integers round down. Integer sums wrap.
    Larger ``priority`` goes first. ``output``: where the result goes, complete once
    :func:`synchronize` has returned: of ``array``'s shape and type (the byte order may differ),
    C-contiguous, writeable; may be ``array`` itself or overlap it. By default a new array of
    ``array``'s dtype. ``learning_rate``: for names declared with ``ef="corrected"``, from 0 (which
    corrects nothing), the same on all workers.

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
    """As :func:`push_pull_async`, and wait: returns the sum or average.

    Raises what :func:`synchronize` raises.
    """
    result: np.ndarray = _push_pull(
        array, name, average, priority, output, learning_rate, will_wait=True
    ).wait()
    return result


@public
def poll(handle: Handle | StagedHandle) -> bool:
    """Whether ``handle``'s operation has ended.

    Does not block. Raises :class:`~bpsx.errors.ConfigError` for what is no handle.
    """
    check_handle(handle, "poll")
    return handle.done()


@public
def synchronize(handle: Handle | StagedHandle) -> Any:
    """Wait for ``handle`` and return its result.

    Raises :class:`~bpsx.errors.PeerLostError`, :class:`~bpsx.errors.MismatchError`,
    :class:`~bpsx.errors.StallError` and their kin, and :class:`~bpsx.errors.ConfigError` for what
    is no handle.
    """
    check_handle(handle, "synchronize")
    return handle.wait()


@public
@counted("broadcast")
def broadcast(
    array: np.ndarray, root_rank: int = 0, name: str | None = None, output: np.ndarray | None = None
) -> np.ndarray:
    """``array`` as it is on worker ``root_rank``, bit for bit, on every worker.

    Shape and dtype must agree (the byte order may differ); any fixed-size dtype, structured ones
    too, but no masked elements.

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
    """Asynchronous training: set the servers' value of ``name`` to worker ``root_rank``'s
    ``array``, and return it.

    All workers call it, and it waits for all. What has been pushed before is overwritten; without
    it the value begins as zeros.

    ``name``, shape and dtype as in the :func:`push_pull` that follow; ``output`` as there. Raises
    :class:`~bpsx.errors.ConfigError` in a synchronous job, and as :func:`push_pull`.
    """
    ours = session()
    if not ours.config.asynchronous:
        raise errors.ConfigError(
            "seed: servers hold values only in asynchronous training: set BYTEPS_ENABLE_ASYNC=1 on"
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
    """Say that this worker has no more data, and wait until all workers have said so.

    Returns the rank that said it last, on all workers.

    What this worker has under way ends first. From then on the others' sums, averages and barriers
    are complete without it, as if it pushed zeros; an average still divides by ``size()``. A
    broadcast whose root has joined raises :class:`~bpsx.errors.JoinedError` on the others, as does
    any verb on this worker until all have joined. Afterwards everything is as before, so ``join``
    can be used again; the worker that came last has seen all rounds.

    Raises :class:`~bpsx.errors.PeerLeftError` if a worker has left without joining,
    :class:`~bpsx.errors.PeerLostError`. Thread-safe.
    """
    finish(math.inf)
    return session().join()


@public
def barrier() -> None:
    """Wait until every worker is here."""
    session().barrier()


@public
def get_pushpull_speed() -> Speed:
    """(milliseconds since the epoch, MB/s): the rate at which tensors came home since the last
    call, over the time in which any were under way; while none has been since then, what the last
    call returned.

    MB are 10^6 bytes of tensor, counted once.

    What is returned also has ``sent`` and ``received``: MB/s on this worker's wire in the same
    time, which are less where gradients are compressed.
    """
    return session().speed()


@public
def trace_start() -> None:
    """Record a timeline of every push_pull that begins from now on, until :func:`trace_stop`.

    Does nothing if one is being recorded.

    Independent of ``BYTEPS_TRACE_ON``. Thread-safe.
    """
    session().reporter.start()


@public
def trace_stop() -> str | None:
    """End what :func:`trace_start` began and return the path of the file, in ``BYTEPS_TRACE_DIR``;
    see docs/run/tracing.md.

    None if nothing was being recorded or the file could not be written, which the log says.
    Thread-safe.
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
        raise errors.ConfigError(f"push_pull: learning_rate={rate!r}: a number from 0 is needed")
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
