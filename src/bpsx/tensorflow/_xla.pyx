# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""push_pull and broadcast in what XLA compiles: a foreign function, called once for all tensors."""
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset, strlen

from bpsx.tensorflow._exchange cimport end_call, python_ends, submit
from bpsx.tensorflow.c_api cimport ABORTED, INTERNAL, INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from bpsx.tensorflow.calls cimport Call, Caller, Part, free_call, new_call
from bpsx.tensorflow.xla cimport EXECUTE, Buffer, Ffi, Frame, Registration, asks_for_metadata, complete, error_of, find_ffi, future_of, is_understood

cdef Ffi *ffi
cdef Caller of_xla
of_xla.fail, of_xla.settle, of_xla.numbering, of_xla.goes_first = fail, settle, 1, True


cdef void *exchange(Frame *frame) noexcept nogil:
    """Arguments: tensors, a learning rate (float64), what has to come before; results: as many tensors, and something that comes after."""
    cdef Call *call
    cdef int64_t i, n
    if asks_for_metadata(frame) or frame.stage != EXECUTE:
        return NULL
    if python_ends():
        return error_of(ffi, ABORTED, b"bpsx: Python is ending, and with it all exchange")
    if not is_understood(frame):
        return error_of(ffi, INTERNAL, b"bpsx: the XLA of this TensorFlow describes calls otherwise than the one that bpsx knows")
    n = frame.results.n - 1
    if frame.arguments.n != n + 2 or frame.attributes.n != 1:
        return error_of(ffi, INVALID_ARGUMENT, b"bpsx: a call of bpsx_exchange that bpsx has not made")
    call = new_call(<uint32_t>n, &of_xla, NULL)
    if call == NULL:
        return error_of(ffi, RESOURCE_EXHAUSTED, b"bpsx: no memory for an operation")
    call.context = frame.future = future_of(ffi)
    if call.context == NULL:
        free_call(call)
        return error_of(ffi, INTERNAL, b"bpsx: XLA gives no future")
    call.plan, call.plan_bytes = frame.attributes.values[0].data, frame.attributes.values[0].length
    call.rate = (<double *>frame.arguments.values[n].data)[0]
    memset(frame.results.values[n].data, 0, 4)
    for i in range(n):
        take_buffers(&call.parts[i], frame.arguments.values[i], frame.results.values[i])
    submit(call)
    return NULL


cdef inline size_t size_of(int dtype) noexcept nogil:
    """Bytes of an element: PRED, S8, U8; S16, U16, F16, BF16; S32, U32, F32; S64, U64, F64, C64; C128."""
    if dtype == 1 or dtype == 2 or dtype == 6:
        return 1
    if dtype == 3 or dtype == 7 or dtype == 10 or dtype == 16:
        return 2
    if dtype == 4 or dtype == 8 or dtype == 11:
        return 4
    return 16 if dtype == 18 else 8


cdef void take_buffers(Part *part, Buffer *source, Buffer *target) noexcept nogil:
    cdef int64_t d
    part.n_bytes = size_of(source.dtype)
    for d in range(source.n_dims):
        part.n_bytes *= source.dims[d]
    part.source, part.target = source.data, target.data
    part.dims, part.n_dims, part.dtype = source.dims, <int>source.n_dims, source.dtype


cdef void fail(Call *call, int code, const char *text) noexcept nogil:
    call.error = error_of(ffi, code, text)


cdef void settle(Call *call) noexcept nogil:
    cdef void *future = call.context
    cdef void *error = call.error
    end_call(call)
    complete(ffi, future, error)


def register() -> bool:
    """Make ``bpsx_exchange`` known to XLA, for the host; whether that can be."""
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
