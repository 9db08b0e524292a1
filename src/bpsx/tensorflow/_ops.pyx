# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""push_pull and broadcast as asynchronous operations of TensorFlow.

``tensorflow.load_op_library`` loads this library and thereby registers them; after that it can be
imported.
"""
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, malloc

from bpsx.plugin.adapter cimport Handle
from bpsx.plugin._async_ops cimport CallPlan, end_call, keep, python_ends, submit, throw_away
from bpsx.plugin.async_op cimport (
    ABORTED, FAILED_PRECONDITION, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, Call, Caller, Part,
    free_call, new_call, room_for_dims,
)
from bpsx.system.sync cimport atomic_load, atomic_store
from bpsx.tensorflow.c_api cimport OK, Api, Done, find_all, is_known, move, run
from bpsx.tensorflow.operation cimport Execution, Kernel, drop_tensors, free_kernel

cdef extern from *:
    """
    void bpsx_tensorflow_register(void);
    __attribute__((constructor)) static void bpsx_tensorflow_loaded(void) {
        bpsx_tensorflow_register(); }
    """

# Names of element types, by their numbers DT_ in types.proto.
cdef dict DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 6: "int8", 9: "int64", 14: "bfloat16",
    19: "float16"
}

cdef Api api
cdef Caller of_operation
# Symbol that bpsx needs and the loaded TensorFlow lacks; NULL: none.
cdef const char *missing
cdef void *known[2]
cdef int64_t distrusted


# ---- when the library is loaded

cdef public void bpsx_tensorflow_register() noexcept nogil:
    global missing
    missing = find_all(&api)
    if missing != NULL:
        return
    of_operation.plan, of_operation.fail, of_operation.settle = plan_of, fail, settle
    of_operation.keep, of_operation.leave = keep_tensors, leave_tensors
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
    api.add_attr(
        op, b"T: list({half, bfloat16, float, double, uint8, uint16, uint32, uint64, int8, int16, "
        b"int32, int64, bool, complex64, complex128}) >= 0"
    )
    api.add_attr(op, b"names: list(string) >= 0")
    api.add_attr(op, b"root_rank: int")
    register(op, b"BpsxBroadcast", shapes_of_copies, make_broadcast)


cdef void register(
    void *op, const char *name, void (*shapes)(void *, void *) noexcept nogil,
    void *(*make)(void *) noexcept nogil
) noexcept nogil:
    global missing
    cdef void *status = api.new_status()
    api.set_stateful(op, True)
    api.set_shapes(op, shapes)
    api.register_op(op, status)
    if api.code(status) == OK:
        api.register_kernel(name, api.new_kernel(name, b"CPU", make, compute, forget), status)
    if api.code(status) != OK:
        missing = b"the registration of bpsx's operations"
    api.delete_status(status)


cdef void copy_shapes(void *context, int64_t n, void *status) noexcept nogil:
    """Give outputs the shapes of their inputs."""
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
        kernel.broadcasts, kernel.waste.free = broadcasts, free_kernel
        read_attributes(making, kernel, status)
    if api.code(status) != OK:
        api.fail_making(making, status)
        if kernel != NULL:
            free_kernel(&kernel.waste)
        kernel = NULL
    api.delete_status(status)
    return kernel


cdef void read_attributes(void *making, Kernel *kernel, void *status) noexcept nogil:
    cdef int32_t n = 0, total = 0
    cdef uint8_t average = 0
    api.attr_size(making, b"names", &n, &total, status)
    if api.code(status) != OK:
        return
    kernel.names, kernel.lengths = <char **>calloc(n + 1, sizeof(char *)), <size_t *>calloc(
        n + 1, sizeof(size_t)
    )
    kernel.storage, kernel.priorities = <char *>malloc(total + 1), <int64_t *>calloc(
        n + 1, sizeof(int64_t)
    )
    if (
        kernel.names == NULL
        or kernel.lengths == NULL
        or kernel.storage == NULL
        or kernel.priorities == NULL
    ):
        api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
        return
    kernel.n = n
    api.attr_strings(
        making, b"names", kernel.names, kernel.lengths, n, kernel.storage, total, status
    )
    if api.code(status) != OK:
        return
    if kernel.broadcasts:
        api.attr_int(making, b"root_rank", &kernel.root, status)
        if api.code(status) == OK and kernel.root < 0:
            api.set_status(
                status, INVALID_ARGUMENT, b"bpsx: root_rank must be the rank of a worker"
            )
        return
    api.attr_size(making, b"priorities", &n, &total, status)
    if api.code(status) == OK and <uint32_t>n != kernel.n:
        api.set_status(
            status, INVALID_ARGUMENT, b"bpsx: there must be one priority per name"
        )
    if api.code(status) == OK:
        api.attr_ints(making, b"priorities", kernel.priorities, n, status)
    if api.code(status) == OK:
        api.attr_bool(making, b"average", &average, status)
    kernel.average = average


cdef void forget(void *made) noexcept nogil:
    if made != NULL:
        throw_away(&(<Kernel *>made).waste)


cdef object plan_of(Call *call):
    cdef Kernel *kernel = (<Execution *>call).kernel
    if kernel.waste.held == NULL:
        names = [kernel.names[i][:kernel.lengths[i]].decode() for i in range(kernel.n)]
        plan = CallPlan(
            names, [kernel.priorities[i] for i in range(kernel.n)], kernel.average,
            kernel.root if kernel.broadcasts else -1, DTYPES
        )
        Py_INCREF(plan)
        kernel.waste.held = <void *>plan
    return <object>kernel.waste.held


# ---- a call, from TensorFlow to the core

cdef void compute(void *kernel, void *context, void *done) noexcept nogil:
    """Execute an operation; TensorFlow calls this on any of its threads."""
    cdef void *status = api.new_status()
    cdef Call *call = NULL
    if python_ends():
        api.set_status(status, ABORTED, b"bpsx: Python is shutting down; the exchange is cancelled")
    elif atomic_load(&distrusted) or not is_known(<Done *>done, known):
        api.set_status(
            status, FAILED_PRECONDITION,
            b"bpsx: the operations of this TensorFlow report completion in a different way than "
            b"bpsx supports; use a release that the documentation of bpsx lists"
        )
    else:
        call = new_call((<Kernel *>kernel).n, &of_operation, sizeof(Execution))
        if call == NULL:
            api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
        else:
            (<Execution *>call).context, (<Execution *>call).kernel = context, <Kernel *>kernel
            take_tensors(<Execution *>call, status)
    if api.code(status) != OK:
        api.fail(context, status)
        api.delete_status(status)
        if call != NULL:
            drop_tensors(&api, call)
            free_call(call)
        api.run_done(done)
        return
    api.delete_status(status)
    move(&(<Execution *>call).done, <Done *>done)
    submit(call)


cdef void take_tensors(Execution *made, void *status) noexcept nogil:
    cdef uint32_t i
    cdef void *rate = NULL
    if <uint32_t>api.n_outputs(made.context) != made.kernel.n:
        api.set_status(status, INVALID_ARGUMENT, b"bpsx: there must be one name per tensor")
    for i in range(made.kernel.n):
        if api.code(status) != OK:
            return
        take_tensor(made, i, status)
    if api.code(status) == OK and not made.kernel.broadcasts:
        api.get_input(made.context, <int>made.kernel.n, &rate, status)
        if api.code(status) == OK:
            if api.n_bytes(rate) == sizeof(double):
                made.call.rate = (<double *>api.data(rate))[0]
            else:
                api.set_status(
                    status, INVALID_ARGUMENT, b"bpsx: the learning rate must be one number"
                )
            api.delete_tensor(rate)


cdef void take_tensor(Execution *made, uint32_t i, void *status) noexcept nogil:
    """Find a part's input and output; they share memory if no other operation reads the input."""
    cdef void *given = NULL
    cdef int forwarded = -1, index = <int>i
    cdef Part *part = &made.call.parts[i]
    api.get_input(made.context, index, &given, status)
    if api.code(status) != OK:
        return
    take_shape(part, given, status)
    api.delete_tensor(given)        # while it is held here, it cannot become the output
    if api.code(status) != OK:
        return
    part.made = api.make_output(
        made.context, &index, 1, index, part.dims, part.n_dims, &forwarded, status
    )
    if api.code(status) != OK:
        return
    part.source = part.target = <char *>api.data(part.made)
    if forwarded < 0:
        api.get_input(made.context, index, &part.given, status)
        if api.code(status) == OK:
            part.source = <char *>api.data(part.given)


cdef void take_shape(Part *part, void *tensor, void *status) noexcept nogil:
    cdef int d
    cdef int64_t *dims
    part.n_dims, part.n_bytes, part.dtype = (
        api.n_dims(tensor), api.n_bytes(tensor), api.dtype(tensor)
    )
    dims = room_for_dims(part)
    if dims == NULL:
        api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
    for d in range(part.n_dims):
        dims[d] = api.dim(tensor, d)


cdef void fail(Call *call, int code, const char *text) noexcept nogil:
    cdef void *status = api.new_status()
    api.set_status(status, code, text)
    api.fail((<Execution *>call).context, status)
    api.delete_status(status)


cdef void settle(Call *call) noexcept nogil:
    cdef Done done = (<Execution *>call).done
    drop_tensors(&api, call)
    end_call(call)
    run(&api, &done)                # TensorFlow may do anything in here


cdef void keep_tensors(Call *call) noexcept:
    """Have handles keep their tensors for as long as the transport may still read them."""
    cdef uint32_t i
    cdef Handle handle
    for i in range(call.n):
        if call.parts[i].handle == NULL:
            continue
        handle = <Handle>call.parts[i].handle
        handle.owner = handle.owner, keep(call.parts[i].given, api.delete_tensor), keep(
            call.parts[i].made, api.delete_tensor
        )
        call.parts[i].given = call.parts[i].made = NULL


cdef void leave_tensors(Call *call) noexcept nogil:
    cdef uint32_t i
    for i in range(call.n):
        call.parts[i].given = call.parts[i].made = NULL


# ---- functions for Python

def check() -> None:
    """Raise :class:`ImportError`, which names what is missing, unless operations are registered."""
    if missing != NULL:
        raise ImportError(
            f"bpsx.tensorflow: the loaded TensorFlow does not have {missing.decode()}, which bpsx "
            f"needs"
        )


def distrust(on: bool) -> None:
    """Have all calls refused, as if TensorFlow's callbacks had an unknown layout.

    For tests.
    """
    atomic_store(&distrusted, on)
