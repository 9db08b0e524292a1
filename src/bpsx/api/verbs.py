"""The verbs on NumPy arrays. :mod:`bpsx.api.lifecycle` has those that begin and end a session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bpsx import errors
from bpsx.api import gpu_arrays, host_arrays
from bpsx.api.arguments import check_handle, check_name, check_priority, checked_root
from bpsx.api.gpu_arrays import is_on_gpu
from bpsx.api.lifecycle import finish, local_place, session
from bpsx.api.lifecycle import init as init
from bpsx.api.lifecycle import initialised as initialised
from bpsx.api.lifecycle import resume as resume
from bpsx.api.lifecycle import shutdown as shutdown
from bpsx.api.lifecycle import suspend as suspend
from bpsx.api.staged import StagedHandle
from bpsx.compression.spec import compression as check_compression
from bpsx.core._handle import Handle, Request
from bpsx.dtypes import BY_NAME
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import public
from bpsx.telemetry.throughput import Speed


@public
def rank() -> int:
    """Return this worker's rank, 0 to ``size()`` - 1.

    With ``BPSX_ELASTIC=shrink`` both change when a worker is lost.
    """
    return session().rank


@public
def size() -> int:
    """Return the number of worker processes in the job."""
    return session().size


@public
def local_rank() -> int:
    """Return this worker's index on its machine."""
    return local_place().local_rank


@public
def local_size() -> int:
    """Return the number of worker processes on this machine."""
    return local_place().local_size


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
    number = ours.number_of(root, "broadcast")
    request = Request(
        _apart(name) or f"broadcast.noname.{memory.target.dtype}.{given.shape}",
        raw if number == ours.number else None,
        raw,
        divisor=number,
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


def _apart(name: str | None) -> str | None:
    """The name in the job of a broadcast that leaves the servers' value of ``name`` as it is.

    In asynchronous training workers keep the latest result of each name, for the case that its
    server dies: it has to be the value.
    """
    return f"broadcast.{name}" if name and session().config.asynchronous else name


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
        _apart(name) or f"broadcast.noname.{source.dtype}.{source.shape}",
        sent,
        root,
        result=out,
        asynchronous=False,
    ).wait()
