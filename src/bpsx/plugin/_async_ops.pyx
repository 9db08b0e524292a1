# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Calls of frameworks' engines, to the core and back."""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.string cimport memcpy, memset

from bpsx.plugin.adapter cimport Handle, Tell
from bpsx.system.sync cimport (
    atomic_load, atomic_store, lock, monitor_init, notify_all, now_ns, unlock, wait_until,
)
from bpsx.plugin.async_op cimport (
    ABORTED, DEADLINE_EXCEEDED, FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT, RESOURCE_EXHAUSTED,
    TOLD, Call, Calls, Part, Waste, enqueue, free_call, mark_failed, part_over, put_failed,
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
from bpsx.core.waiters import OURS

cdef Calls calls

if monitor_init(&calls.monitor) != 0:
    raise MemoryError("cannot create a mutex")

# What exceptions are to callers. Not UNAVAILABLE, which a tf.function turns into an internal error.
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
    """Have it done; any thread. Its caller is told, here or on another thread."""
    cdef uint32_t i
    for i in range(call.n):
        call.parts[i].tell.run = told
    if call.n == 0:             # how loading finds out whether calls work
        call.caller.settle(call)
        return
    if not calls.served:
        serve()
    if not enqueue(&calls, call):
        give_up(call)


cdef void end_call(Call *call) noexcept nogil:
    """Its caller has let go of all but the call's own memory."""
    put_over(&calls, call)


cdef void throw_away(Waste *waste) noexcept nogil:
    """Nobody needs it any more. What it has of Python's has to wait for the GIL."""
    if waste.held == NULL:
        waste.free(waste)
        return
    lock(&calls.monitor)
    waste.next = calls.waste
    calls.waste = waste
    unlock(&calls.monitor)


# ---- the thread that begins calls. Callers' own threads would do it at less cost, but Python's
# main thread, which eager code calls on, runs signal handlers whenever it runs Python: their
# exceptions would end in the midst of this, and what they call would wait for this.

cdef void serve() noexcept with gil:
    """Start it, once in a process."""
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
            "no thread can be started that begins calls, which wait until one can: %s", e
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
    """Let go of what calls that are over, and what has been thrown away, have of Python's."""
    cdef Call *call
    cdef Call *next_call
    cdef Waste *waste
    cdef Waste *next_waste
    cdef uint32_t i
    lock(&calls.monitor)
    call, waste = calls.over, calls.waste
    calls.over, calls.waste = NULL, NULL
    unlock(&calls.monitor)
    while call != NULL:
        next_call = call.next
        for i in range(call.n):
            if call.parts[i].handle != NULL:
                Py_DECREF(<Handle>call.parts[i].handle)
        if call.held != NULL:
            Py_DECREF(<object>call.held)
        free_call(call)
        call = next_call
    while waste != NULL:
        next_waste = waste.next
        Py_DECREF(<object>waste.held)
        waste.free(waste)
        waste = next_waste


cdef class Plan:

    def __init__(self, names, priorities, average, root, dtypes):
        self.names, self.priorities, self.average, self.root, self.dtypes = list(names), list(
            priorities
        ), average, root, dict(dtypes)


cdef class Kept:

    def __dealloc__(self):
        if self.what != NULL:
            self.free(self.what)


cdef object keep(void *what, void (*free)(void *what) noexcept nogil):
    """For handles, which keep what the transport may still be sending for as long as it does.

    ``what`` may be NULL.
    """
    cdef Kept kept = Kept.__new__(Kept)
    kept.what, kept.free = what, free
    return kept


cdef void begin(Call *call) noexcept:
    """Give all parts to the core.

    The first that it refuses makes the call fail when those before have ended.
    """
    cdef uint32_t i, begun = 0
    cdef Handle handle
    cdef Plan plan
    try:
        plan = <Plan?>call.caller.plan(call)
        session = adapter.session()
        for i in range(call.n):
            handle = begin_part(session, plan, i, &call.parts[i])
            Py_INCREF(handle)
            call.parts[i].handle = <void *>handle
            begun += 1
            handle.tell_at_end(&call.parts[i].tell)
    except BaseException as e:
        fail(call, e)
        mark_failed(&calls, call, TOLD)
    with nogil:
        for i in range(call.n + 1 - begun):         # those that have not begun, and us
            over(call)


cdef begin_part(session, Plan plan, uint32_t i, Part *part):
    shape = tuple([part.dims[d] for d in range(part.n_dims)])
    dtype = plan.dtypes.get(part.dtype, "")
    if not dtype:       # of a broadcast, to which elements are bytes
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
    if plan.root >= 0:      # the root's target has what it gets already; the others push nothing
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


cdef stage(Part *part):
    """Push a copy: the caller's memory is gone when the call has failed, and the transport may
    still be sending then.

    Returns the copy.
    """
    cdef uintptr_t where
    array = np.empty(part.n_bytes, np.uint8)
    where = array.ctypes.data
    with nogil:
        memcpy(<char *>where, part.source, part.n_bytes)
    part.source = <char *>where
    return array


cdef void told(Tell *tell, int64_t status) noexcept nogil:
    """A part has ended."""
    cdef Part *part = <Part *>tell
    if status < 0:
        mark_failed(&calls, part.call, part - part.call.parts + 1)
    over(part.call)


cdef void over(Call *call) noexcept nogil:
    """One less under way."""
    if not part_over(call):
        return
    if call.failed == 0:
        call.caller.settle(call)
    elif not put_failed(&calls, call):
        give_up(call)


cdef void give_up(Call *call) noexcept nogil:
    """Nobody has the GIL any more.

    What the transport may still read stays where it is, and who else waits is told what there is to
    tell.
    """
    if call.failed != TOLD:
        call.caller.fail(call, ABORTED, b"bpsx: Python is ending, and with it all exchange")
    if call.failed and not call.caller.goes_first:
        call.caller.leave(call)
    call.caller.settle(call)


cdef void tell_failed(Call *call) noexcept:
    """The first error is what its caller is told."""
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
    """Tell its caller, whatever that is."""
    code, text = INTERNAL, b"bpsx: an exception that cannot be told"
    try:
        for kind, found in CODES:
            if isinstance(error, kind):
                code = found
                break
        text = f"{type(error).__name__}: {error}".encode(errors="replace")
    except BaseException:       # of an exception's own text
        pass
    call.caller.fail(call, code, text)


@atexit.register
def _end() -> None:
    """From now on nobody may ask for the GIL. What waits is told so first; at most a second."""
    cdef int64_t end = now_ns() + 1_000_000_000
    with nogil:
        lock(&calls.monitor)
        atomic_store(&calls.ended, 1)
        notify_all(&calls.monitor)
        while calls.served and now_ns() < end:
            wait_until(&calls.monitor, end)
        unlock(&calls.monitor)


def _forked() -> None:
    """A child has no thread that begins calls, and calls that its parent waits for are the
    parent's.
    """
    memset(&calls, 0, sizeof(calls))
    monitor_init(&calls.monitor)


os.register_at_fork(after_in_child=_forked)
