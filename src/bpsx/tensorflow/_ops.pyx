# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""push_pull and broadcast as asynchronous operations of TensorFlow.

``tensorflow.load_op_library`` loads this library and thereby registers them; after that it can be
imported.
"""
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport strdup

from bpsx.plugin.adapter cimport Handle
from bpsx.plugin._async_ops cimport (
    CallPlan, end_call, keep, python_ends, queue, submit, throw_away,
)
from bpsx.plugin.async_op cimport (
    ABORTED, FAILED_PRECONDITION, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, Call, Caller, CallPart,
    free_call, new_call, room_for_dims,
)
from bpsx.system.sync cimport (
    Monitor, atomic_add, atomic_load, atomic_store, lock, monitor_init, unlock,
)
from bpsx.tensorflow.c_api cimport OK, Api, Done, find_all, is_known, move, run
from bpsx.tensorflow.operation cimport (
    Begun, Ending, Execution, Kernel, drop_begun, drop_ending, drop_tensors, free_kernel,
)

import os

from bpsx.plugin.steps import Step

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
cdef Caller of_operation, of_beginning, of_ending
cdef Monitor pairs              # Guards each Begun.
# Symbol that bpsx needs and the loaded TensorFlow lacks; NULL: none.
cdef const char *missing
cdef void *known[2]
cdef int64_t distrusted


# ---- when the library is loaded

cdef public void bpsx_tensorflow_register() noexcept nogil:
    global missing
    missing = find_all(&api)
    if missing == NULL and monitor_init(&pairs) != 0:
        missing = b"memory for a mutex"
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
    register(op, b"BpsxPushPull", shapes_of_sums, make_push_pull, compute)
    register_pair()
    op = api.new_op(b"BpsxBroadcast")
    api.add_input(op, b"tensors: T")
    api.add_output(op, b"copies: T")
    api.add_attr(
        op, b"T: list({half, bfloat16, float, double, uint8, uint16, uint32, uint64, int8, int16, "
        b"int32, int64, bool, complex64, complex128}) >= 0"
    )
    api.add_attr(op, b"names: list(string) >= 0")
    api.add_attr(op, b"root_rank: int")
    register(op, b"BpsxBroadcast", shapes_of_copies, make_broadcast, compute)


cdef void register_pair() noexcept nogil:
    """Register a push_pull in two operations, for sums that end together though they begin apart.

    If one operation waited for the sum, and another one of the step never ran, TensorFlow would
    wait for the first one for ever.
    """
    of_beginning.plan, of_beginning.fail = plan_of_beginning, fail_beginning
    of_beginning.settle = settle_beginning
    of_beginning.keep, of_beginning.leave = keep_tensors, leave_tensors
    of_ending.plan, of_ending.fail, of_ending.settle = plan_of_ending, fail_ending, settle_ending
    of_ending.goes_first = True             # It has no tensors to keep.
    cdef void *op = api.new_op(b"BpsxBegin")
    api.add_input(op, b"tensor: T")
    api.add_input(op, b"rate: double")
    api.add_output(op, b"pending: T")
    api.add_output(op, b"token: int64")
    api.add_attr(op, b"T: {half, bfloat16, float, double, uint8, int8, int32, int64}")
    add_attributes_of_pair(op)
    register(op, b"BpsxBegin", shapes_of_beginning, make_beginning, compute_beginning)
    op = api.new_op(b"BpsxEnd")
    api.add_input(op, b"pending: T")
    api.add_input(op, b"tokens: N * int64")
    api.add_output(op, b"sums: T")
    api.add_attr(op, b"T: list({half, bfloat16, float, double, uint8, int8, int32, int64}) >= 1")
    api.add_attr(op, b"N: int >= 1")
    add_attributes_of_pair(op)
    register(op, b"BpsxEnd", shapes_of_ending, make_beginning, compute_ending)


cdef void add_attributes_of_pair(void *op) noexcept nogil:
    api.add_attr(op, b"names: list(string) >= 1")
    api.add_attr(op, b"priorities: list(int) >= 1")
    api.add_attr(op, b"average: bool")
    api.add_attr(op, b"step: int")


cdef void register(
    void *op, const char *name, void (*shapes)(void *, void *) noexcept nogil,
    void *(*make)(void *) noexcept nogil,
    void (*execute)(void *, void *, void *) noexcept nogil
) noexcept nogil:
    global missing
    cdef void *status = api.new_status()
    api.set_stateful(op, True)
    api.set_shapes(op, shapes)
    api.register_op(op, status)
    if api.code(status) == OK:
        api.register_kernel(name, api.new_kernel(name, b"CPU", make, execute, forget), status)
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


cdef void shapes_of_beginning(void *context, void *status) noexcept nogil:
    cdef void *scalar = api.new_scalar(context)
    copy_shapes(context, 1, status)
    if api.code(status) == OK:
        api.set_shape(context, 1, scalar, status)
    api.delete_shape(scalar)


cdef void shapes_of_ending(void *context, void *status) noexcept nogil:
    copy_shapes(context, api.n_shapes(context) // 2, status)


# ---- kernels

cdef void *make_push_pull(void *making) noexcept nogil:
    return make(making, False, False)


cdef void *make_broadcast(void *making) noexcept nogil:
    return make(making, True, False)


cdef void *make_beginning(void *making) noexcept nogil:
    return make(making, False, True)


cdef void *make(void *making, bint broadcasts, bint begins) noexcept nogil:
    cdef void *status = api.new_status()
    cdef Kernel *kernel = <Kernel *>calloc(1, sizeof(Kernel))
    if kernel == NULL:
        api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
    else:
        kernel.broadcasts, kernel.begins, kernel.refs = broadcasts, begins, 1
        kernel.waste.free = free_kernel
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
    kernel.step = -1
    if api.code(status) == OK and kernel.begins:
        api.attr_int(making, b"step", &kernel.step, status)


cdef void forget(void *made) noexcept nogil:
    if made != NULL and atomic_add(&(<Kernel *>made).refs, -1) == 0:
        throw_away(&(<Kernel *>made).waste)


cdef object plan_of(Call *call):
    cdef Kernel *kernel = (<Execution *>call).kernel
    if kernel.waste.held == NULL:
        names = [kernel.names[i][:kernel.lengths[i]].decode() for i in range(kernel.n)]
        plan = CallPlan(
            names, [kernel.priorities[i] for i in range(kernel.n)], kernel.average,
            kernel.root if kernel.broadcasts else -1, DTYPES
        )
        (<CallPlan>plan).key = kernel.step
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
        set_unknown(status)
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


cdef void set_unknown(void *status) noexcept nogil:
    api.set_status(
        status, FAILED_PRECONDITION,
        b"bpsx: the operations of this TensorFlow report completion in a different way than "
        b"bpsx supports; use a release that the documentation of bpsx lists"
    )


cdef void take_tensors(Execution *made, void *status) noexcept nogil:
    cdef uint32_t i
    cdef void *rate = NULL
    if <uint32_t>api.n_outputs(made.context) != made.kernel.n + made.kernel.begins:
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
    cdef CallPart *part = &made.call.parts[i]
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


cdef void take_shape(CallPart *part, void *tensor, void *status) noexcept nogil:
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


# ---- a sum in two operations

cdef void compute_beginning(void *kernel, void *context, void *done) noexcept nogil:
    """Execute BpsxBegin: begin the sum, and report that this operation is done.

    Its first output holds the sum once BpsxEnd is done. The second one leads there.
    """
    cdef void *status = api.new_status()
    cdef Execution *made = <Execution *>new_call(1, &of_beginning, sizeof(Execution))
    cdef Begun *begun = <Begun *>calloc(1, sizeof(Begun))
    if python_ends():
        api.set_status(status, ABORTED, b"bpsx: Python is shutting down; the exchange is cancelled")
    elif made == NULL or begun == NULL or (<Kernel *>kernel).n != 1:
        api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
    else:
        made.context, made.kernel, made.begun, begun.refs = context, <Kernel *>kernel, begun, 2
        take_tensors(made, status)
        give_token(made, status)
    if api.code(status) == OK:
        # TensorFlow may delete the kernel before the call has read its names.
        atomic_add(&made.kernel.refs, 1)
        submit(&made.call)
    else:
        api.fail(context, status)
        if made != NULL:
            drop_tensors(&api, &made.call)
            free_call(&made.call)
        free(begun)
    api.delete_status(status)
    api.run_done(done)


cdef void give_token(Execution *made, void *status) noexcept nogil:
    cdef int forwarded = -1
    cdef void *token = NULL
    if api.code(status) == OK:
        token = api.make_output(made.context, NULL, 0, 1, NULL, 0, &forwarded, status)
    if api.code(status) == OK:
        (<Begun **>api.data(token))[0] = made.begun
        api.delete_tensor(token)


cdef object plan_of_beginning(Call *call):
    try:
        return plan_of(call)
    finally:
        forget((<Execution *>call).kernel)


cdef void fail_beginning(Call *call, int code, const char *text) noexcept nogil:
    cdef Begun *begun = (<Execution *>call).begun
    if begun.code == OK:
        begun.code, begun.text = code, strdup(text)


cdef void settle_beginning(Call *call) noexcept nogil:
    cdef Begun *begun = (<Execution *>call).begun
    cdef Ending *ending
    drop_tensors(&api, call)
    end_call(call)
    lock(&pairs)
    begun.over, ending = True, begun.ending
    unlock(&pairs)
    if ending != NULL:
        count_over(ending)
    drop_begun(begun)


cdef void compute_ending(void *kernel, void *context, void *done) noexcept nogil:
    """Execute BpsxEnd: wait for sums that have begun. Its outputs are their memory."""
    cdef void *status = api.new_status()
    cdef uint32_t i, n = (<Kernel *>kernel).n
    cdef Ending *ending = <Ending *>new_call(0, &of_ending, sizeof(Ending))
    if ending != NULL:
        ending.begun = <Begun **>calloc(n, sizeof(Begun *))
    if atomic_load(&distrusted) or not is_known(<Done *>done, known):
        set_unknown(status)
    elif ending == NULL or ending.begun == NULL or <uint32_t>api.n_outputs(context) != n:
        api.set_status(status, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
    else:
        ending.execution.context, ending.execution.kernel = context, <Kernel *>kernel
        take_tokens(ending, n, status)
    if api.code(status) != OK:
        api.fail(context, status)
        if ending != NULL:
            drop_ending(ending)
            free_call(&ending.execution.call)
        api.run_done(done)
    else:
        move(&ending.execution.done, <Done *>done)
        ending.left = 1
        for i in range(n):
            lock(&pairs)
            if not ending.begun[i].over:
                ending.begun[i].ending = ending
                atomic_add(&ending.left, 1)
            unlock(&pairs)
        queue(&ending.execution.call)
    api.delete_status(status)


cdef void take_tokens(Ending *ending, uint32_t n, void *status) noexcept nogil:
    cdef uint32_t i
    cdef void *token = NULL
    for i in range(n):
        api.get_input(ending.execution.context, <int>(n + i), &token, status)
        if api.code(status) != OK:
            return
        ending.begun[i] = (<Begun **>api.data(token))[0]
        ending.n += 1
        api.delete_tensor(token)


cdef object plan_of_ending(Call *call):
    """Plan of the call that ends a step's sums; their calls were queued before this one."""
    step = Step.last_of((<Execution *>call).kernel.step)
    if step is not None:
        Py_INCREF(step)
        call.step = <void *>step
    return CallPlan([], [], False, -1, {})


cdef void fail_ending(Call *call, int code, const char *text) noexcept nogil:
    cdef Ending *ending = <Ending *>call
    if ending.code == OK:
        ending.code, ending.text = code, strdup(text)


cdef void settle_ending(Call *call) noexcept nogil:
    count_over(<Ending *>call)


cdef void count_over(Ending *ending) noexcept nogil:
    """Count one thing that BpsxEnd waits for as over; after the last one it is done."""
    cdef Done done
    cdef uint32_t i
    cdef void *status
    if atomic_add(&ending.left, -1) != 0:
        return
    done = ending.execution.done
    status = api.new_status()
    for i in range(ending.n):
        if ending.begun[i].code != OK and ending.code == OK:
            fail_ending(&ending.execution.call, ending.begun[i].code, ending.begun[i].text)
    if ending.code != OK:
        api.set_status(status, ending.code, ending.text)
    give_sums(ending, status)
    if api.code(status) != OK:
        api.fail(ending.execution.context, status)
    api.delete_status(status)
    drop_ending(ending)
    end_call(&ending.execution.call)
    run(&api, &done)


cdef void give_sums(Ending *ending, void *status) noexcept nogil:
    cdef uint32_t i
    cdef void *total = NULL
    for i in range(ending.n):
        if api.code(status) == OK:
            api.get_input(ending.execution.context, <int>i, &total, status)
        if api.code(status) == OK:
            api.set_output(ending.execution.context, <int>i, total, status)
            api.delete_tensor(total)


# ---- functions for Python

def check() -> None:
    """Raise :class:`ImportError`, which names what is missing, unless operations are registered."""
    if missing != NULL:
        raise ImportError(
            f"bpsx.tensorflow: the loaded TensorFlow does not have {missing.decode()}, which bpsx "
            f"needs"
        )


def _forked() -> None:
    monitor_init(&pairs)


os.register_at_fork(after_in_child=_forked)


def distrust(on: bool) -> None:
    """Have all calls refused, as if TensorFlow's callbacks had an unknown layout.

    For tests.
    """
    atomic_store(&distrusted, on)
