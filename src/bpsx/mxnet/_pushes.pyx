# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""push_pull and broadcast as asynchronous operations of MXNet's engine."""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc

from bpsx.plugin.adapter cimport Handle
from bpsx.plugin._async_ops cimport CallPlan, end_call, keep, python_ends, submit
from bpsx.plugin.async_op cimport (
    ABORTED, INTERNAL, RESOURCE_EXHAUSTED, Call, Caller, CallPart, drop_dims, free_call, new_call,
    room_for_dims,
)
from bpsx.system.sync cimport Monitor, lock, monitor_init, notify_all, now_ns, unlock, wait_until

import _thread
import os
import sys

from bpsx.plugin import adapter
from bpsx.errors import BpsxError

BEHIND = (
    "an earlier exchange under this name failed to start on this worker, as an earlier error said. "
    "This worker's arrays would now be added to other workers' arrays of different steps. End this "
    "worker, or have all workers leave the job and join a new one"
)

cdef enum:
    CPU = 1                     # Context.kind of the host
    KEPT = 64
    # The operation reports its end to the engine, and occupies none of its threads until then.
    ASYNCHRONOUS = 4

cdef struct Context:            # Device on which an operation runs.
    int kind
    int index

# mxnet::Engine's CallbackOnComplete, to call when an operation is over. No error: NULL.
cdef struct Told:
    void (*function)(void *engine, void *operation, const void *error) noexcept nogil
    void *engine
    void *operation

# std::runtime_error. MXNet's dmlc::Error adds nothing but its name.
cdef struct Error:
    void *parts[2]

# Order of the operations of one name. The core must get them in the order in which the engine got
# them; their arrays may be complete in another order. Guarded by `pushed`.
cdef struct OpOrder:
    int64_t given               # Number of operations given to the engine.
    int64_t due                 # Number of operations given to the core.
    # Operations whose arrays are complete, while an earlier one's is not.
    Push *early
    bint taken                  # A thread is giving operations to the core.
    # Job in which an operation did not begin: all later ones would be added to other workers' other
    # steps.
    int64_t gap_job
    int64_t gap                 # Number of the first such operation.

cdef struct Push:
    Call call                   # First field.
    void *array                 # Handle of its own, which keeps the memory.
    void *mark                  # NULL, or handle of its own of the array for ``good``.
    char *good                  # NULL, or byte to set to 1 if the exchange succeeds.
    Told done
    Error error
    bint failed
    bint skipped                # The engine has left it out: computing its array has failed.
    bint again                  # Its array is already among the failed ones.
    OpOrder *turn
    int64_t number              # Number among the operations of its name.
    Push *next_early

# The engine's reference to an operation. The engine drops it when it is done with the operation,
# executed or not.
cdef struct Ticket:
    Push *push                  # NULL: the operation has been executed.

# MXNet's C API and two functions of the C++ library, by the names in op_library.py.
cdef struct Api:
    int (*copy)(void *array, void **made) noexcept nogil
    int (*free)(void *array) noexcept nogil
    int (*wait)(void *array) noexcept nogil
    int (*data)(void *array, void **data) noexcept nogil
    int (*shape)(void *array, int *n_dims, const int64_t **dims) noexcept nogil
    int (*dtype)(void *array, int *dtype) noexcept nogil
    void (*reorder)(void *array) noexcept nogil
    int (*push)(
        void (*run)(void *where, void *done, void *parameter) noexcept nogil, void *parameter,
        void *deleter, Context *context, void **read, int n_read, void **written, int n_written,
        int *kind, int priority, const char *name, bint waits
    ) noexcept nogil
    const char *(*last_error)() noexcept nogil
    void (*make_error)(Error *where, const char *text) noexcept nogil
    void (*drop_error)(Error *where) noexcept nogil

cdef struct EngineOps:             # Operations that the engine has been given.
    Monitor monitor
    int64_t pending             # Operations that are not over.
    int64_t job                 # Number of the job, from 1.
    # Arrays (owned) of the first operations that failed in this job, and of the first that the
    # engine has left out. The engine knows whether their errors have been reported.
    void *failed[KEPT]
    int n_failed
    void *left_out

cdef extern from "Python.h":
    int PyThreadState_SetAsyncExc(unsigned long thread, object kind) except -1


cdef Api api
cdef EngineOps pushed
cdef Caller of_engine
if monitor_init(&pushed.monitor) != 0:
    raise MemoryError("cannot create a mutex")
of_engine.plan, of_engine.fail, of_engine.settle, of_engine.keep, of_engine.leave = (
    plan_of, fail, settle, keep_array, leave_array
)


# By thread: type of the exception that a signal handler raised while a fork waited.
cdef dict interrupted = {}


def load(found) -> None:
    """Use these addresses, by the names of :class:`Api`."""
    cdef uintptr_t copy = found["copy"], free_ = found["free"], wait_ = found["wait"]
    cdef uintptr_t data = found["data"], shape = found["shape"], dtype = found["dtype"]
    cdef uintptr_t reorder = found["reorder"], push_ = found["push"], last_error = found[
        "last_error"
    ]
    cdef uintptr_t make_error = found["make_error"], drop_error = found["drop_error"]
    api.copy = <int (*)(void *, void **) noexcept nogil>copy
    api.free = <int (*)(void *) noexcept nogil>free_
    api.wait = <int (*)(void *) noexcept nogil>wait_
    api.data = <int (*)(void *, void **) noexcept nogil>data
    api.shape = <int (*)(void *, int *, const int64_t **) noexcept nogil>shape
    api.dtype = <int (*)(void *, int *) noexcept nogil>dtype
    api.reorder = <void (*)(void *) noexcept nogil>reorder
    api.push = <int (*)(
        void (*)(void *, void *, void *) noexcept nogil, void *, void *, Context *, void **, int,
        void **, int, int *, int, const char *, bint
    ) noexcept nogil>push_
    api.last_error = <const char *(*)() noexcept nogil>last_error
    api.make_error = <void (*)(Error *, const char *) noexcept nogil>make_error
    api.drop_error = <void (*)(Error *) noexcept nogil>drop_error


def new_turn() -> int:
    """Make the turn of a name, which keeps the order of its operations. It is never freed."""
    cdef OpOrder *turn = <OpOrder *>calloc(1, sizeof(OpOrder))
    if turn == NULL:
        raise MemoryError("bpsx: no memory for a name")
    return <uintptr_t>turn


def push(
    uintptr_t array, uintptr_t turn, CallPlan plan not None, double rate, int priority,
    uintptr_t mark=0,
) -> None:
    """Have the engine execute ``plan`` on the NDArray with the handle ``array``.

    The operation begins after earlier writes to the array. ``turn``: the name's, from
    :func:`new_turn`; the core gets the operations of one name in the order of these calls.
    ``rate``: the learning rate, negative where there is none. ``priority``: within the engine.
    ``mark``: 0, or the handle of an NDArray of one uint8, to set to 1 if the exchange succeeds.
    Later failures are raised where the array is waited for. Raises :class:`~bpsx.errors.BpsxError`
    if the engine does not take the operation.
    """
    cdef Context context
    cdef int kind = ASYNCHRONOUS, status
    cdef bint given = False
    cdef void *written[2]
    cdef Push *made = <Push *>new_call(<uint32_t>len(plan.names), &of_engine, sizeof(Push))
    cdef Ticket *ticket = <Ticket *>malloc(sizeof(Ticket))
    if made == NULL or ticket == NULL:
        if made != NULL:
            free_call(&made.call)
        free(ticket)
        raise MemoryError("bpsx: no memory for an operation")
    ticket.push, made.turn = made, <OpOrder *>turn
    Py_INCREF(plan)
    made.call.held, made.call.rate = <void *>plan, rate
    made.call.awaited = plan.step is not None
    made.again = isinstance(plan, Refused) and (<Refused>plan).again
    context.kind, context.index = CPU, 0
    with nogil:
        status = api.copy(<void *>array, &made.array)
        if status == 0 and mark != 0:
            status = api.copy(<void *>mark, &made.mark)
        if status == 0:
            # MKL-DNN's arrays have a layout of their own. To ask for their memory in the engine's
            # thread would wait for the engine.
            api.reorder(made.array)
            lock(&pushed.monitor)
            pushed.pending += 1
            made.number = made.turn.given
            made.turn.given += 1
            unlock(&pushed.monitor)
            # From here on the engine owns the ticket, and drops it whatever happens.
            given = True
            written[0], written[1] = made.array, made.mark
            status = api.push(
                run, ticket, <void *>thrown_away, &context, NULL, 0, written,
                1 if made.mark == NULL else 2, &kind, priority, b"bpsx", False
            )
    if not given:
        if made.array != NULL:
            api.free(made.array)
        Py_DECREF(plan)
        free_call(&made.call)
        free(ticket)
    if status != 0:
        raise BpsxError(
            f"MXNet did not accept an operation: {api.last_error().decode(errors='replace')}"
        )


def begin_job() -> None:
    """Forget operations of earlier jobs that failed or were left out. Thread-safe."""
    cdef int i
    with nogil:
        lock(&pushed.monitor)
        pushed.job += 1
        for i in range(pushed.n_failed):
            api.free(pushed.failed[i])
        pushed.n_failed = 0
        if pushed.left_out != NULL:
            api.free(pushed.left_out)
        pushed.left_out = NULL
        unlock(&pushed.monitor)


def left_out() -> bool:
    """Whether the engine has left out an operation because computing its array has failed."""
    cdef bint found
    with nogil:
        lock(&pushed.monitor)
        found = pushed.left_out != NULL
        unlock(&pushed.monitor)
    return found


def why() -> str:
    """Return MXNet's error text for the first operation that it left out.

    Works once; empty if the error has been reported already.
    """
    return untold(pushed.left_out) if pushed.left_out != NULL else ""


def unheard() -> str:
    """Return MXNet's text of the first failed operation if no error has been reported; else empty.

    From then on the error counts as reported.
    """
    texts = [untold(pushed.failed[i]) for i in range(pushed.n_failed)]
    texts = texts or [why()]        # an operation left out after a failure has its error
    return texts[0] if all(texts) else ""


def is_behind(uintptr_t turn) -> bool:
    """Whether an operation of that name did not begin.

    Operations that begin after it, through the engine, fail with :data:`BEHIND`.
    """
    cdef OpOrder *of_name = <OpOrder *>turn
    cdef bint found
    with nogil:
        lock(&pushed.monitor)
        found = of_name.gap_job == pushed.job
        unlock(&pushed.monitor)
    return found


cdef str untold(void *array):
    """Return the error that the engine keeps for code that waits for ``array``; empty: none.

    The engine then counts the error as reported.
    """
    cdef int status
    with nogil:
        status = api.wait(array)
    return api.last_error().decode(errors="replace") if status != 0 else ""


cdef void count_over() noexcept nogil:
    lock(&pushed.monitor)
    pushed.pending -= 1
    if pushed.pending == 0:
        notify_all(&pushed.monitor)
    unlock(&pushed.monitor)


def wait(double seconds) -> int:
    """Wait at most ``seconds`` until all pushed operations are over.

    Returns the number of operations left. Thread-safe.
    """
    cdef int64_t end = now_ns() + <int64_t>(seconds * 1e9), left
    with nogil:
        lock(&pushed.monitor)
        while pushed.pending > 0 and now_ns() < end:
            wait_until(&pushed.monitor, end)
        left = pushed.pending
        unlock(&pushed.monitor)
    return left


def _forked() -> None:
    """Reset the state in a forked child: pending operations are the parent's."""
    pushed.pending = 0
    monitor_init(&pushed.monitor)


def raise_after_fork(kind) -> None:
    """Raise ``kind`` in the calling thread once it has forked.

    For handlers that run before a fork, whose exceptions Python would print and forget.
    """
    interrupted[_thread.get_ident()] = kind


def _raise_interrupted() -> None:
    """Raise the exception that a signal handler raised while this thread's fork waited.

    No other Python code may run in here: it would raise the exception at once, and Python would
    print and forget it.
    """
    kind = interrupted.pop(_thread.get_ident(), None)
    if kind is None:
        return
    if sys.version_info < (3, 13):
        PyThreadState_SetAsyncExc(_thread.get_ident(), kind)
    else:
        _raise_in(sys._getframe(), kind)


def _raise_in(frame, kind) -> None:
    """Have ``frame``, which has called fork(), raise at its next instruction.

    Since 3.13 Python warns of forks with threads after this hook, and discards exceptions that are
    raised while it warns. So an exception set for the next code that runs would be lost.
    """
    before = sys.gettrace()

    def event(*_):
        # The frame holds the last reference to this function: clearing it frees the closure.
        here, tracing, raised = frame, before, kind
        here.f_trace, here.f_trace_opcodes = None, False
        sys.settrace(tracing)
        raise raised

    # the next line event could come after a `try`
    frame.f_trace, frame.f_trace_opcodes = event, True
    sys.settrace(_trace_nothing)


def _trace_nothing(*_) -> None:
    """Trace function that wants no events of new frames."""


os.register_at_fork(after_in_child=_forked, after_in_parent=_raise_interrupted)


cdef class Refused(CallPlan):
    """Fails with ``error`` in place of an exchange.

    ``again``: an operation on the same array has been refused in this job before.
    """
    cdef object error
    cdef bint again

    def __init__(self, error, bint again):
        """``again``: an operation on the same array has been refused in this job before."""
        CallPlan.__init__(self, ["refused"], [0], False, -1, {})
        self.error, self.again = error, again


cdef object plan_of(Call *call):
    cdef Push *made = <Push *>call
    cdef bint behind
    if isinstance(<object>call.held, Refused):
        raise (<Refused>call.held).error
    with nogil:
        lock(&pushed.monitor)
        behind = made.turn.gap_job == pushed.job and made.number > made.turn.gap
        unlock(&pushed.monitor)
    if behind and not adapter.session().failure:       # the session's error says more
        raise BpsxError(BEHIND)
    return <object>call.held


cdef void leave_gap(Push *made) noexcept nogil:
    """Mark the name as behind other workers': the operation does not begin. Call under the lock."""
    if made.turn.gap_job != pushed.job or made.number < made.turn.gap:
        made.turn.gap_job, made.turn.gap = pushed.job, made.number


# ---- in the engine

cdef void run(void *where, void *done, void *parameter) noexcept nogil:
    """Execute an operation, whose array is complete.

    Runs on any of the engine's threads, or on the thread that pushes.
    """
    cdef Ticket *ticket = <Ticket *>parameter
    cdef Push *made = ticket.push
    ticket.push = NULL
    made.done = (<Told *>done)[0]
    if python_ends():
        fail(&made.call, ABORTED, b"bpsx: Python is ending, so nothing can be exchanged")
    elif made.call.n > 0:
        take_array(made)
    come(made)


cdef void thrown_away(void *parameter) noexcept nogil:
    """Drop a ticket; the engine is done with its operation."""
    cdef Ticket *ticket = <Ticket *>parameter
    if ticket.push != NULL:
        ticket.push.skipped = True
        come(ticket.push)
    free(ticket)


cdef void come(Push *made) noexcept nogil:
    """Submit an operation, whose array is complete or never will be, or have it wait.

    It waits for earlier operations of its name; later ones that have waited for it are submitted
    with it. One thread at a time does so for a name, without the lock; operations that come
    meanwhile are left to that thread.
    """
    cdef OpOrder *turn = made.turn
    cdef bint ends
    lock(&pushed.monitor)
    made.next_early, turn.early = turn.early, made
    if not turn.taken:
        turn.taken = True
        made = next_due(turn)
        while made != NULL:
            ends = made.failed or made.skipped
            if ends:
                leave_gap(made)
            if made.skipped and pushed.left_out == NULL:
                pushed.left_out, made.array = made.array, NULL
            unlock(&pushed.monitor)
            if ends:
                settle(&made.call)
            else:
                submit(&made.call)
            lock(&pushed.monitor)
            made = next_due(turn)
        turn.taken = False
    unlock(&pushed.monitor)


cdef Push *next_due(OpOrder *turn) noexcept nogil:
    """Take the next operation in order out of the early ones. NULL: it has not come."""
    cdef Push **at = &turn.early
    cdef Push *found
    while at[0] != NULL:
        found = at[0]
        if found.number == turn.due:
            at[0] = found.next_early
            turn.due += 1
            return found
        at = &found.next_early
    return NULL


cdef void take_array(Push *made) noexcept nogil:
    cdef CallPart *part = &made.call.parts[0]
    cdef const int64_t *dims = NULL         # MXNet's memory, valid until this thread's next call
    cdef int64_t *ours
    cdef void *data = NULL
    cdef int d
    if (
        api.shape(made.array, &part.n_dims, &dims) != 0
        or api.dtype(made.array, &part.dtype) != 0
        or api.data(made.array, &data) != 0
        or made.mark != NULL and api.data(made.mark, <void **>&made.good) != 0
    ):
        fail(&made.call, INTERNAL, api.last_error())
        return
    ours = room_for_dims(part)
    if ours == NULL:
        fail(&made.call, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
        return
    part.n_bytes = size_of(part.dtype)
    for d in range(part.n_dims):
        ours[d] = dims[d]
        part.n_bytes *= dims[d]
    part.source = part.target = <char *>data
    if data == NULL and part.n_bytes:
        fail(&made.call, INTERNAL, b"bpsx: the array has no memory yet; give it values first")


cdef inline size_t size_of(int dtype) noexcept nogil:
    """Bytes of an element, by mshadow's numbers: float32, float64, float16, uint8, int32, int8,
    int64, bool, int16, uint16, uint32, uint64, bfloat16.
    """
    if dtype == 1 or dtype == 6 or dtype == 11:
        return 8
    if dtype == 0 or dtype == 4 or dtype == 10:
        return 4
    return 1 if dtype == 3 or dtype == 5 or dtype == 7 else 2


# ---- back to the engine

cdef void fail(Call *call, int code, const char *text) noexcept nogil:
    cdef Push *made = <Push *>call
    api.make_error(&made.error, text)
    made.failed = True
    lock(&pushed.monitor)
    if call.failed == 0:
        leave_gap(made)
    if (
        made.array != NULL
        and not made.again
        and pushed.n_failed < KEPT
        and api.copy(made.array, &pushed.failed[pushed.n_failed]) == 0
    ):
        pushed.n_failed += 1
    unlock(&pushed.monitor)


cdef void settle(Call *call) noexcept nogil:
    cdef Push *made = <Push *>call
    cdef Told done = made.done
    cdef Error error = made.error       # it may be copied bytewise
    cdef bint failed = made.failed, skipped = made.skipped
    cdef void *array = made.array
    cdef void *mark = made.mark
    cdef uint32_t i
    if made.good != NULL and not failed and not skipped:
        made.good[0] = 1
    for i in range(call.n):
        drop_dims(&call.parts[i])
    end_call(call)
    if not skipped:
        done.function(done.engine, done.operation, &error if failed else NULL)
    if failed:
        api.drop_error(&error)          # the engine has made a copy
    if array != NULL:
        api.free(array)
    if mark != NULL:
        api.free(mark)
    count_over()


cdef void free_array(void *array) noexcept nogil:
    api.free(array)


cdef void keep_array(Call *call) noexcept:
    """Have the handle keep the array for as long as the transport may still read it."""
    cdef Push *made = <Push *>call
    cdef Handle handle
    if call.n > 0 and call.parts[0].handle != NULL:
        handle = <Handle>call.parts[0].handle
        handle.owner = handle.owner, keep(made.array, free_array)
        made.array = NULL


cdef void leave_array(Call *call) noexcept nogil:
    (<Push *>call).array = NULL
