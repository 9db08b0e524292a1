# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""push_pull and broadcast as asynchronous operations of TensorFlow.

Loading this library with ``tensorflow.load_op_library`` registers them; after that it can be imported.
"""
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from bpsx._adapter cimport Handle
from bpsx.core.sync cimport Monitor, atomic_load, atomic_store, lock, monitor_init, unlock
from bpsx.tensorflow.c_api cimport (
    ABORTED, DEADLINE_EXCEEDED, FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT, OK, RESOURCE_EXHAUSTED, Api, Done, find_all, is_known, move, run,
)
from bpsx.tensorflow.calls cimport (
    MAX_DIMS, Call, Calls, Kernel, Part, Tell, drop_tensors, enqueue, free_call, free_kernel, new_call, part_over, settle, take_calls,
)

import atexit

from bpsx import _adapter, errors
from bpsx._adapter import TensorView

cdef extern from *:
    """
    void bpsx_tensorflow_register(void);
    __attribute__((constructor)) static void bpsx_tensorflow_loaded(void) { bpsx_tensorflow_register(); }

    /* What Python keeps of a thread costs a mapping of memory to make: TensorFlow's threads, which stay, are known to it from their first call on. */
    static void bpsx_attach(void) {
        static __thread int attached;
        if (attached) return;
        attached = 1;
        if (PyGILState_GetThisThreadState() == NULL) {
            (void)PyGILState_Ensure();
            (void)PyEval_SaveThread();
        }
    }
    """
    void attach "bpsx_attach"() noexcept nogil

cdef Api api
cdef Calls calls
cdef const char *missing        # in the TensorFlow that is loaded, of what is used here
cdef void *known[2]
cdef int64_t ended              # Python ends: nobody may ask for the GIL any more
cdef int64_t distrusted

# DT_ of TensorFlow's types.proto -> the name of an element type that is summed
cdef dict SUMMED = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 6: "int8", 9: "int64", 14: "bfloat16", 19: "float16"}
# Exceptions as TensorFlow has them. Not UNAVAILABLE, which a tf.function turns into an internal error.
cdef list CODES = [
    (errors.NotInitializedError, FAILED_PRECONDITION), (errors.MismatchError, INVALID_ARGUMENT), (errors.StallError, DEADLINE_EXCEEDED),
    (errors.PeerLostError, ABORTED), (errors.PeerLeftError, ABORTED), (errors.ShutdownError, ABORTED), (errors.ConfigError, INVALID_ARGUMENT),
    (TypeError, INVALID_ARGUMENT), (MemoryError, RESOURCE_EXHAUSTED),
]


# ---- when the library is loaded

cdef public void bpsx_tensorflow_register() noexcept nogil:
    global missing
    if monitor_init(&calls.monitor) != 0:
        missing = b"a mutex"
        return
    missing = find_all(&api)
    if missing != NULL:
        return
    cdef void *op = api.new_op(b"BpsxPushPull")
    api.add_input(op, b"tensors: T")
    api.add_input(op, b"rate: double")
    api.add_output(op, b"sums: T")
    api.add_attr(op, b"T: list({half, bfloat16, float, double, uint8, int8, int32, int64}) >= 0")
    api.add_attr(op, b"names: list(string) >= 0")
    api.add_attr(op, b"priorities: list(int) >= 0")
    api.add_attr(op, b"average: bool")
    register(op, b"BpsxPushPull", shapes_of_sums, make_push_pull)
    op = api.new_op(b"BpsxBroadcast")
    api.add_input(op, b"tensors: T")
    api.add_output(op, b"copies: T")
    api.add_attr(op, b"T: list({half, bfloat16, float, double, uint8, uint16, uint32, uint64, int8, int16, int32, int64, bool, complex64, "
                     b"complex128}) >= 0")
    api.add_attr(op, b"names: list(string) >= 0")
    api.add_attr(op, b"root_rank: int")
    register(op, b"BpsxBroadcast", shapes_of_copies, make_broadcast)


cdef void register(void *op, const char *name, void (*shapes)(void *, void *) noexcept nogil, void *(*make)(void *) noexcept nogil) noexcept nogil:
    global missing
    cdef void *status = api.new_status()
    api.set_stateful(op, True)
    api.set_shapes(op, shapes)
    api.register_op(op, status)
    if api.code(status) == OK:
        api.register_kernel(name, api.new_kernel(name, b"CPU", make, compute, forget), status)
    if api.code(status) != OK:
        missing = b"a place for the operations of bpsx"
    api.delete_status(status)


cdef void copy_shapes(void *context, int64_t n, void *status) noexcept nogil:
    """Outputs have their inputs' shapes."""
    cdef int64_t i
    cdef void *shape = api.new_shape()
    for i in range(n):
        api.get_shape(context, <int>i, shape, status)
        if api.code(status) == OK:
            api.set_shape(context, <int>i, shape, status)
        if api.code(status) != OK:
            break
    api.delete_shape(shape)


cdef void shapes_of_sums(void *context, void *status) noexcept nogil:
    copy_shapes(context, api.n_shapes(context) - 1, status)


cdef void shapes_of_copies(void *context, void *status) noexcept nogil:
    copy_shapes(context, api.n_shapes(context), status)


# ---- kernels

cdef void *make_push_pull(void *making) noexcept nogil:
    return make(making, False)


cdef void *make_broadcast(void *making) noexcept nogil:
    return make(making, True)


cdef void *make(void *making, bint broadcasts) noexcept nogil:
    cdef void *status = api.new_status()
    cdef Kernel *kernel = <Kernel *>calloc(1, sizeof(Kernel))
    if kernel == NULL:
        api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
    else:
        kernel.broadcasts = broadcasts
        read_attributes(making, kernel, status)
    if api.code(status) != OK:
        api.fail_making(making, status)
        if kernel != NULL:
            free_kernel(kernel)
        kernel = NULL
    api.delete_status(status)
    return kernel


cdef void read_attributes(void *making, Kernel *kernel, void *status) noexcept nogil:
    cdef int32_t n = 0, total = 0
    cdef uint8_t average = 0
    api.attr_size(making, b"names", &n, &total, status)
    if api.code(status) != OK:
        return
    kernel.names, kernel.lengths = <char **>calloc(n + 1, sizeof(char *)), <size_t *>calloc(n + 1, sizeof(size_t))
    kernel.storage, kernel.priorities = <char *>malloc(total + 1), <int64_t *>calloc(n + 1, sizeof(int64_t))
    if kernel.names == NULL or kernel.lengths == NULL or kernel.storage == NULL or kernel.priorities == NULL:
        api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
        return
    kernel.n = n
    api.attr_strings(making, b"names", kernel.names, kernel.lengths, n, kernel.storage, total, status)
    if api.code(status) != OK:
        return
    if kernel.broadcasts:
        api.attr_int(making, b"root_rank", &kernel.root, status)
        return
    api.attr_size(making, b"priorities", &n, &total, status)
    if api.code(status) == OK and <uint32_t>n != kernel.n:
        api.set_status(status, INVALID_ARGUMENT, b"bpsx: there have to be as many priorities as names")
    if api.code(status) == OK:
        api.attr_ints(making, b"priorities", kernel.priorities, n, status)
    if api.code(status) == OK:
        api.attr_bool(making, b"average", &average, status)
    kernel.average = average


cdef void forget(void *made) noexcept nogil:
    cdef Kernel *kernel = <Kernel *>made
    if kernel == NULL:
        return
    if kernel.known_as == NULL:
        free_kernel(kernel)
        return
    lock(&calls.monitor)            # what it has of Python's has to wait for the GIL
    kernel.next = calls.forgotten
    calls.forgotten = kernel
    unlock(&calls.monitor)


# ---- a call, up to the core

cdef void compute(void *kernel, void *context, void *done) noexcept nogil:
    """TensorFlow wants an op executed; any of its threads."""
    cdef void *status = api.new_status()
    cdef Call *call = NULL
    if atomic_load(&ended):
        api.set_status(status, ABORTED, b"bpsx: Python is ending, and with it all exchange")
    elif atomic_load(&distrusted) or not is_known(<Done *>done, known):
        api.set_status(status, FAILED_PRECONDITION, b"bpsx: this TensorFlow tells operations in another way whom to call when they are done than "
                                                    b"the one that bpsx knows: use a release that bpsx names in its documentation")
    else:
        call = new_call(<Kernel *>kernel, context)
        if call == NULL:
            api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
        else:
            take_tensors(call, status)
    if api.code(status) != OK:
        api.fail(context, status)
        api.delete_status(status)
        if call != NULL:
            drop_tensors(&api, call)
            free_call(call)
        api.run_done(done)
        return
    api.delete_status(status)
    move(&call.done, <Done *>done)
    if enqueue(&calls, call):
        drain()


cdef void take_tensors(Call *call, void *status) noexcept nogil:
    cdef uint32_t i
    cdef void *rate = NULL
    if <uint32_t>api.n_outputs(call.context) != call.kernel.n:
        api.set_status(status, INVALID_ARGUMENT, b"bpsx: there have to be as many names as tensors")
    for i in range(call.n):
        if api.code(status) != OK:
            return
        take_tensor(call, i, status)
    if api.code(status) == OK and not call.kernel.broadcasts:
        api.get_input(call.context, <int>call.kernel.n, &rate, status)
        if api.code(status) == OK:
            call.rate = (<double *>api.data(rate))[0]
            api.delete_tensor(rate)


cdef void take_tensor(Call *call, uint32_t i, void *status) noexcept nogil:
    """Find input and output: one memory, if nobody else is going to look at the input."""
    cdef int64_t dims[MAX_DIMS]
    cdef void *given = NULL
    cdef int forwarded = -1, index = <int>i, n, d
    cdef Part *part = &call.parts[i]
    part.call = call
    part.tell.run = told
    api.get_input(call.context, index, &given, status)
    if api.code(status) != OK:
        return
    n = min(api.n_dims(given), MAX_DIMS)
    for d in range(n):
        dims[d] = api.dim(given, d)
    api.delete_tensor(given)        # while we hold it, it cannot become the output
    part.target = api.make_output(call.context, &index, 1, index, dims, n, &forwarded, status)
    if api.code(status) == OK and forwarded < 0:
        api.get_input(call.context, index, &part.source, status)
        if api.code(status) == OK and call.kernel.broadcasts:
            memcpy(api.data(part.target), api.data(part.source), api.n_bytes(part.target))
            api.delete_tensor(part.source)
            part.source = NULL


cdef void drain() noexcept nogil:
    """Begin what waits. One thread does it for all: the others would queue for the GIL."""
    cdef Call *call
    cdef Call *following
    attach()
    with gil:
        bury()
        while True:
            call = take_calls(&calls)
            if call == NULL:
                return
            while call != NULL:
                following = call.next
                begin(call)
                call = following


cdef void bury() noexcept:
    """Let go of what calls and kernels that are over have of Python's."""
    cdef Call *call
    cdef Call *next_call
    cdef Kernel *kernel
    cdef Kernel *next_kernel
    cdef uint32_t i
    lock(&calls.monitor)
    call, kernel = calls.over, calls.forgotten
    calls.over, calls.forgotten = NULL, NULL
    unlock(&calls.monitor)
    while call != NULL:
        next_call = call.next
        for i in range(call.n):
            if call.parts[i].handle != NULL:
                Py_DECREF(<Handle>call.parts[i].handle)
        free_call(call)
        call = next_call
    while kernel != NULL:
        next_kernel = kernel.next
        Py_DECREF(<object>kernel.known_as)
        free_kernel(kernel)
        kernel = next_kernel


cdef void begin(Call *call) noexcept:
    """Give all parts to the core. The first that it refuses makes the call fail when those before have ended."""
    cdef uint32_t i, begun = 0
    cdef Handle handle
    try:
        session = _adapter.session() if call.n else None        # an empty call is how loading finds out whether calls work
        names = names_of(call.kernel)
        for i in range(call.n):
            handle = begin_part(session, call, i, names[i])
            Py_INCREF(handle)
            call.parts[i].handle = <void *>handle
            begun += 1
            handle.tell_at_end(&call.parts[i].tell)
    except BaseException as e:
        fail(call, e)
    with nogil:
        for i in range(call.n + 1 - begun):      # those that have not begun, and us
            over(call)


cdef names_of(Kernel *kernel):
    if kernel.known_as == NULL:
        names = [kernel.names[i][:kernel.lengths[i]].decode() for i in range(kernel.n)]
        Py_INCREF(names)
        kernel.known_as = <void *>names
    return <list>kernel.known_as


cdef begin_part(session, Call *call, uint32_t i, str name):
    cdef Part *part = &call.parts[i]
    dtype = SUMMED.get(api.dtype(part.target), "")
    shape = tuple([api.dim(part.target, d) for d in range(api.n_dims(part.target))])
    nbytes = api.n_bytes(part.target)
    if not dtype:       # of a broadcast, to which elements are bytes
        size = 1
        for length in shape:
            size *= length
        dtype, shape = "uint8", (*shape, nbytes // size if size else 0)
    target = TensorView(<uintptr_t>api.data(part.target), nbytes, dtype, shape, None)
    if call.kernel.broadcasts:
        return session.broadcast(name, target, call.kernel.root)
    source = target if part.source == NULL else TensorView(<uintptr_t>api.data(part.source), nbytes, dtype, shape, None)
    return session.push_pull(name, source, target, average=call.kernel.average, priority=call.kernel.priorities[i], rate=call.rate)


# ---- a call, from the core

cdef void told(Tell *tell, int64_t status) noexcept nogil:
    """A part has ended."""
    cdef Part *part = <Part *>tell
    if status < 0:
        with gil:
            fail_part(part)
    over(part.call)


cdef void over(Call *call) noexcept nogil:
    """One less under way."""
    if not part_over(call):
        return
    if call.failed:
        with gil:
            keep_tensors(call)
    drop_tensors(&api, call)
    settle(&api, &calls, call)


cdef void fail_part(Part *part) noexcept:
    try:
        error = (<Handle>part.handle).error()
    except BaseException as e:
        error = e
    fail(part.call, error)


cdef void fail(Call *call, error) noexcept:
    """The first error is what TensorFlow is told."""
    cdef void *status
    if call.failed:
        return
    call.failed = True
    code = INTERNAL
    for kind, found in CODES:
        if isinstance(error, kind):
            code = found
            break
    text = f"{type(error).__name__}: {error}".encode()
    status = api.new_status()
    api.set_status(status, code, text)
    api.fail(call.context, status)
    api.delete_status(status)


cdef class Kept:
    """A tensor of TensorFlow's that the transport may still be sending."""

    cdef void *tensor

    def __dealloc__(self):
        if self.tensor != NULL:
            api.delete_tensor(self.tensor)


cdef void keep_tensors(Call *call) noexcept:
    """Have handles keep their tensors, which the transport may still read, for as long as it does."""
    cdef uint32_t i
    cdef Kept source, target
    for i in range(call.n):
        if call.parts[i].handle == NULL:
            continue
        source, target = Kept.__new__(Kept), Kept.__new__(Kept)
        source.tensor, target.tensor = call.parts[i].source, call.parts[i].target
        call.parts[i].source = call.parts[i].target = NULL
        (<Handle>call.parts[i].handle).owner = source, target


# ---- what Python sees

def check() -> None:
    """Raise :class:`ImportError`, naming what is missing, unless the operations have been registered."""
    if missing != NULL:
        raise ImportError(f"bpsx.tensorflow: the TensorFlow that is loaded lacks {missing.decode()}, which bpsx needs")


def distrust(on: bool) -> None:
    """Have all calls refused, as if TensorFlow's callbacks looked unlike what is known. For tests."""
    atomic_store(&distrusted, on)


@atexit.register
def _end() -> None:
    atomic_store(&ended, 1)
