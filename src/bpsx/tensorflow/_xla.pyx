# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""push_pull and broadcast in programs that XLA compiles: one foreign call for all tensors."""
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset, strlen

from bpsx.plugin._async_ops cimport CallPlan, end_call, python_ends, submit
from bpsx.plugin.async_op cimport (
    ABORTED, INTERNAL, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, Call, Caller, CallPart, free_call,
    new_call,
)
from bpsx.tensorflow.xla_abi cimport (
    EXECUTE, Buffer, Ffi, Frame, Registration, asks_for_metadata, complete, error_of, find_ffi,
    future_of, is_understood,
)

import json

# Names of element types, by their numbers in XLA's foreign function interface.
cdef dict DTYPES = {
    11: "float32", 12: "float64", 4: "int32", 6: "uint8", 2: "int8", 5: "int64", 16: "bfloat16",
    10: "float16"
}

cdef struct Execution:
    Call call                   # First field.
    void *future
    void *error
    const char *text            # Text of the plan, see xla.py.
    size_t length

cdef Ffi *ffi
cdef dict plans = {}            # Plans, by their texts.
cdef Caller of_xla
of_xla.plan, of_xla.fail, of_xla.settle, of_xla.goes_first = plan_of, fail, settle, True


cdef void *exchange(Frame *frame) noexcept nogil:
    """Foreign function that XLA calls.

    Arguments: tensors, a learning rate (float64), a value that the call before has given. Results:
    as many tensors, and a value for the next call.
    """
    cdef Execution *made
    cdef Call *call
    cdef int64_t i, n
    if asks_for_metadata(frame) or frame.stage != EXECUTE:
        return NULL
    if python_ends():
        return error_of(ffi, ABORTED, b"bpsx: Python is ending, so nothing can be exchanged")
    if not is_understood(frame):
        return error_of(
            ffi, INTERNAL,
            b"bpsx: the XLA of this TensorFlow describes calls in a different way than bpsx "
            b"supports"
        )
    n = frame.results.n - 1
    if frame.arguments.n != n + 2 or frame.attributes.n != 1:
        return error_of(
            ffi, INVALID_ARGUMENT, b"bpsx: bpsx did not make this call of bpsx_exchange"
        )
    call = new_call(<uint32_t>n, &of_xla, sizeof(Execution))
    if call == NULL:
        return error_of(ffi, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
    made = <Execution *>call
    made.future = frame.future = future_of(ffi)
    if made.future == NULL:
        free_call(call)
        return error_of(ffi, INTERNAL, b"bpsx: XLA did not create a future")
    made.text, made.length = frame.attributes.values[0].data, frame.attributes.values[0].length
    call.rate = (<double *>frame.arguments.values[n].data)[0]
    memset(frame.results.values[n].data, 0, 4)
    for i in range(n):
        take_buffers(&call.parts[i], frame.arguments.values[i], frame.results.values[i])
    submit(call)
    return NULL


cdef inline size_t size_of(int dtype) noexcept nogil:
    """Bytes of an element. 1: PRED, S8, U8. 2: S16, U16, F16, BF16. 4: S32, U32, F32. 8: S64, U64,
    F64, C64. 16: C128.
    """
    if dtype == 1 or dtype == 2 or dtype == 6:
        return 1
    if dtype == 3 or dtype == 7 or dtype == 10 or dtype == 16:
        return 2
    if dtype == 4 or dtype == 8 or dtype == 11:
        return 4
    return 16 if dtype == 18 else 8


cdef void take_buffers(CallPart *part, Buffer *source, Buffer *target) noexcept nogil:
    cdef int64_t d
    part.n_bytes = size_of(source.dtype)
    for d in range(source.n_dims):
        part.n_bytes *= source.dims[d]
    part.source, part.target = source.data, target.data
    part.dims, part.n_dims, part.dtype = source.dims, <int>source.n_dims, source.dtype


cdef object plan_of(Call *call):
    cdef Execution *made = <Execution *>call
    text = made.text[:made.length]
    plan = plans.get(text)
    if plan is None:
        plan = plans[text] = CallPlan(*json.loads(text), DTYPES)
    return plan


cdef void fail(Call *call, int code, const char *text) noexcept nogil:
    (<Execution *>call).error = error_of(ffi, code, text)


cdef void settle(Call *call) noexcept nogil:
    cdef void *future = (<Execution *>call).future
    cdef void *error = (<Execution *>call).error
    end_call(call)
    complete(ffi, future, error)


def register() -> bool:
    """Register ``bpsx_exchange`` with XLA, for the host. Returns whether that is possible."""
    global ffi
    cdef Registration one
    ffi = find_ffi()
    if ffi == NULL:
        return False
    memset(&one, 0, sizeof(one))
    one.size = sizeof(one)
    one.name.data, one.platform.data = b"bpsx_exchange", b"Host"
    one.name.length, one.platform.length = strlen(one.name.data), strlen(one.platform.data)
    one.bundle.execute = exchange
    return ffi.register(&one) == NULL
