# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Asynchronous operations of a framework's engine, executed by the core."""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.string cimport memcpy, memset

from bpsx.plugin.adapter cimport EndCallback, Handle
from bpsx.system.sync cimport (
    atomic_load, atomic_store, lock, monitor_init, notify_all, now_ns, unlock, wait_until,
)
from bpsx.plugin.async_op cimport (
    ABORTED, DEADLINE_EXCEEDED, FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT, RESOURCE_EXHAUSTED,
    TOLD, Call, Calls, CallPart, Waste, enqueue, free_call, mark_failed, part_over, put_failed,
    put_over, wait_for_calls,
)

import _thread
import atexit
import logging
import os

import numpy as np

from bpsx import errors

from bpsx.plugin import adapter
from bpsx.plugin.adapter import TensorView
from bpsx.plugin.steps import Step
from bpsx.core.waiters import OURS

cdef Calls calls

if monitor_init(&calls.monitor) != 0:
    raise MemoryError("cannot create a mutex")

# Status code of each exception. UNAVAILABLE is not used: a tf.function turns it into an internal
# error.
cdef list CODES = [
    (errors.NotInitializedError, FAILED_PRECONDITION), (errors.JoinedError, FAILED_PRECONDITION),
    (errors.MismatchError, INVALID_ARGUMENT), (errors.StallError, DEADLINE_EXCEEDED),
    (errors.PeerLostError, ABORTED), (errors.PeerLeftError, ABORTED),
    (errors.ShutdownError, ABORTED), (errors.ConfigError, INVALID_ARGUMENT),
    (TypeError, INVALID_ARGUMENT), (MemoryError, RESOURCE_EXHAUSTED)
]


cdef bint python_ends() noexcept nogil:
    return atomic_load(&calls.ended)


cdef void submit(Call *call) noexcept nogil:
    """Start a call; any thread may do so. ``settle`` then runs on this thread or another."""
    cdef uint32_t i
    for i in range(call.n):
        call.parts[i].at_end.run = part_ended
    if call.n == 0:             # an empty call: a plugin tests on loading whether calls work
        call.caller.settle(call)
        return
    queue(call)


cdef void queue(Call *call) noexcept nogil:
    """Have the serving thread begin a call, also an empty one, after those queued before."""
    if not calls.served:
        serve()
    if not enqueue(&calls, call):
        give_up(call)


cdef void end_call(Call *call) noexcept nogil:
    """Finish a call; its caller has released everything but the call's own memory."""
    put_over(&calls, call)


cdef void throw_away(Waste *waste) noexcept nogil:
    """Free ``waste``. If it holds a Python object, the serving thread frees both, with the GIL."""
    if waste.held == NULL:
        waste.free(waste)
        return
    lock(&calls.monitor)
    waste.next = calls.waste
    calls.waste = waste
    unlock(&calls.monitor)


# ---- the thread that begins calls. Beginning them on the callers' own threads would cost less. But
# eager code calls on Python's main thread, which runs signal handlers whenever it runs Python.
# Their exceptions would be raised in the middle of this code, and calls from a handler would wait
# for it.

cdef void serve() noexcept with gil:
    """Start the serving thread, once in a process."""
    cdef bint ours
    lock(&calls.monitor)
    ours, calls.served = not calls.served, True
    unlock(&calls.monitor)
    if not ours:
        return
    try:
        _thread.start_new_thread(_serve, ())
    except BaseException as e:
        lock(&calls.monitor)
        calls.served = False
        unlock(&calls.monitor)
        logging.getLogger("bpsx").error(
            "cannot start the thread that begins calls; calls wait until it can be started: %s", e
        )


def _serve() -> None:
    cdef Call *first = NULL
    cdef Call *failed = NULL
    cdef Call *following
    cdef bint go_on = True
    OURS.add(_thread.get_ident())
    while go_on:
        with nogil:
            go_on = wait_for_calls(&calls, &first, &failed)
        bury()
        while failed != NULL:
            following = failed.next
            tell_failed(failed)
            failed = following
        while first != NULL:
            following = first.next
            begin(first)
            first = following
    lock(&calls.monitor)
    calls.served = False
    notify_all(&calls.monitor)
    unlock(&calls.monitor)


cdef void bury() noexcept:
    """Release the Python objects of finished calls and of waste."""
    cdef Call *call
    cdef Call *next_call
    cdef Waste *waste
    cdef Waste *next_waste
    cdef uint32_t i
    lock(&calls.monitor)
    call, waste = calls.over, calls.waste
    calls.over, calls.waste, calls.uncounted = NULL, NULL, False
    unlock(&calls.monitor)
    while call != NULL:
        next_call = call.next
        count(call)
        step = step_of(call)
        if step is not None:
            step.end()
        for i in range(call.n):
            if call.parts[i].handle != NULL:
                Py_DECREF(<Handle>call.parts[i].handle)
        if call.step != NULL:
            Py_DECREF(<object>call.step)
        if call.held != NULL:
            Py_DECREF(<object>call.held)
        free_call(call)
        call = next_call
    while waste != NULL:
        next_waste = waste.next
        Py_DECREF(<object>waste.held)
        waste.free(waste)
        waste = next_waste


cdef class CallPlan:
    """Describes the exchange that a call asks for.

    ``names`` and ``priorities`` (larger is more urgent): one of each per tensor. ``root``: rank of
    a broadcast's root, or -1 for a sum, or with ``average`` an average. ``dtypes``: the element
    types that can be summed (names in :mod:`bpsx.dtypes`), by the caller's numbers for them.
    ``step``: the :class:`~bpsx.plugin.steps.Step` that the call belongs to. Without one the call's
    sums are a step of their own, unless a ``key`` from 0 on says which step of one name each.
    """

    def __init__(self, names, priorities, average, root, dtypes, step=None):
        self.names, self.priorities, self.average, self.root, self.dtypes = list(names), list(
            priorities
        ), average, root, dict(dtypes)
        self.step, self.key = step, -1


cdef class OwnedMemory:
    """Owns memory that the transport may still be sending, and frees it with the last reference."""

    def __dealloc__(self):
        if self.what != NULL:
            self.free(self.what)


cdef object keep(void *what, void (*free)(void *what) noexcept nogil):
    """Wrap ``what`` in an object that calls ``free`` with its last reference.

    A handle refers to the object for as long as the transport may still be sending the memory.
    ``what`` may be NULL.
    """
    cdef OwnedMemory owned = OwnedMemory.__new__(OwnedMemory)
    owned.what, owned.free = what, free
    return owned


cdef void begin(Call *call) noexcept:
    """Submit all parts of a call to the core.

    The first part that the core refuses makes the call fail once the earlier parts have ended.
    """
    cdef uint32_t left, begun = 0
    try:
        begin_parts(call, &begun)
    except BaseException as e:
        fail(call, e)
        mark_failed(&calls, call, TOLD)
    count(call)
    with nogil:
        # Parts that have not begun, and this function's count; the last one may free the call.
        left = call.n + 1 - begun
        while left:
            left -= 1
            over(call)


cdef begin_parts(Call *call, uint32_t *begun):
    """Submit the parts of a call, and count them in ``begun``."""
    cdef uint32_t i
    cdef Handle handle
    cdef CallPlan plan = <CallPlan?>call.caller.plan(call)
    session = adapter.session()
    step = plan.step
    if step is None and session.shrinks and plan.root < 0:
        if plan.key >= 0:
            step = Step.of_key(session, plan.key, plan.names[0])
        elif call.n > 1:
            step = Step.of_one(session)
        if step is not None:
            Py_INCREF(step)
            call.step = <void *>step
    if step is not None:
        session.group_of(plan.names, step.group)
    try:
        for i in range(call.n):
            handle = begin_part(session, plan, i, &call.parts[i])
            Py_INCREF(handle)
            call.parts[i].handle = <void *>handle
            begun[0] += 1
            handle.call_at_end(&call.parts[i].at_end)
    finally:
        if step is not None:
            session.disband(plan.names)


cdef object step_of(Call *call):
    if call.step != NULL:
        return <object>call.step
    plan = <object>call.held if call.held != NULL else None
    return (<CallPlan>plan).step if isinstance(plan, CallPlan) else None


cdef void count(Call *call) noexcept:
    """Tell a call's step that it has begun, or never will."""
    if not call.counted:
        call.counted = True
        step = step_of(call)
        if step is not None:
            step.count()


cdef begin_part(session, CallPlan plan, uint32_t i, CallPart *part):
    shape = tuple([part.dims[d] for d in range(part.n_dims)])
    dtype = plan.dtypes.get(part.dtype, "")
    if not dtype:       # a broadcast, which treats elements as bytes
        size = 1
        for length in shape:
            size *= length
        dtype, shape = "uint8", (*shape, part.n_bytes // size if size else 0)
    if plan.root >= 0 and part.source != part.target:
        with nogil:
            memcpy(part.target, part.source, part.n_bytes)
        part.source = part.target
    owner = stage(part) if part.call.caller.goes_first and plan.root in (-1, session.rank) else None
    source = TensorView(<uintptr_t>part.source, part.n_bytes, dtype, shape, owner)
    # The root's target already holds the result, and the other workers push nothing.
    if plan.root >= 0:
        return session.broadcast(plan.names[i], source, plan.root)
    target = (
        source
        if part.source == part.target
        else TensorView(<uintptr_t>part.target, part.n_bytes, dtype, shape, owner)
    )
    return session.push_pull(
        plan.names[i], source, target, average=plan.average, priority=plan.priorities[i],
        rate=part.call.rate
    )


cdef stage(CallPart *part):
    """Have the part push a copy of its source, and return the copy.

    When a call fails, the caller frees its memory while the transport may still be sending.
    """
    cdef uintptr_t where
    array = np.empty(part.n_bytes, np.uint8)
    where = array.ctypes.data
    with nogil:
        memcpy(<char *>where, part.source, part.n_bytes)
    part.source = <char *>where
    return array


cdef void part_ended(EndCallback *at_end, int64_t status) noexcept nogil:
    """Handle the end of a part; the core calls this."""
    cdef CallPart *part = <CallPart *>at_end
    if status < 0:
        mark_failed(&calls, part.call, part - part.call.parts + 1)
    over(part.call)


cdef void over(Call *call) noexcept nogil:
    """Count one part as ended; after the last one, settle the call or queue its error report."""
    if not part_over(call):
        return
    if call.failed == 0:
        call.caller.settle(call)
    elif not put_failed(&calls, call):
        give_up(call)


cdef void give_up(Call *call) noexcept nogil:
    """Settle a call while Python ends and no thread can take the GIL.

    Memory that the transport may still read is leaked. The caller gets an error that needs no
    Python.
    """
    if call.failed != TOLD:
        call.caller.fail(call, ABORTED, b"bpsx: Python is shutting down; the exchange is cancelled")
    if call.failed and not call.caller.goes_first:
        call.caller.leave(call)
    call.caller.settle(call)


cdef void tell_failed(Call *call) noexcept:
    """Report the first error of a failed call to its caller, then settle the call."""
    if call.failed != TOLD:
        try:
            error = (<Handle>call.parts[call.failed - 1].handle).error()
        except BaseException as e:
            error = e
        fail(call, error)
    if not call.caller.goes_first:
        call.caller.keep(call)
    with nogil:
        call.caller.settle(call)


cdef void fail(Call *call, error) noexcept:
    """Report ``error`` to the caller, whatever exception it is."""
    code, text = INTERNAL, b"bpsx: an exception whose text cannot be read"
    try:
        for kind, found in CODES:
            if isinstance(error, kind):
                code = found
                break
        text = f"{type(error).__name__}: {error}".encode(errors="replace")
    except BaseException:       # raised by the exception's own text
        pass
    call.caller.fail(call, code, text)


@atexit.register
def _end() -> None:
    """At exit, bar calls from the GIL, and wait up to a second for the serving thread to end."""
    cdef int64_t end = now_ns() + 1_000_000_000
    with nogil:
        lock(&calls.monitor)
        atomic_store(&calls.ended, 1)
        notify_all(&calls.monitor)
        while calls.served and now_ns() < end:
            wait_until(&calls.monitor, end)
        unlock(&calls.monitor)


def _forked() -> None:
    """Reset the state in a forked child: pending calls and the serving thread are its parent's."""
    memset(&calls, 0, sizeof(calls))
    monitor_init(&calls.monitor)


os.register_at_fork(after_in_child=_forked)
