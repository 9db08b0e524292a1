# An operation of bpsx as TensorFlow keeps it, and one execution of it.
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free

from bpsx.plugin.async_op cimport Call, CallPart, Waste, drop_dims
from bpsx.system.sync cimport atomic_add
from bpsx.tensorflow.c_api cimport Api, Done

# An op in a graph, or one that all eager calls with these attributes share.
cdef struct Kernel:
    Waste waste                 # First field; holds the op's Plan once that has been needed.
    uint32_t n                  # Number of tensors.
    int64_t refs                # TensorFlow's, and one of each call that has yet to read the names.
    bint broadcasts
    bint begins                 # BpsxBegin
    bint average
    int64_t step                # BpsxBegin and BpsxEnd: number of their exchange.
    int64_t root
    int64_t *priorities
    char **names                # UTF-8, without a final NUL.
    size_t *lengths
    char *storage

# The sum that a BpsxBegin has begun, for the BpsxEnd that waits for it. Guarded by a lock of
# _ops.pyx's.
cdef struct Begun:
    int64_t refs                # The call's, and that of BpsxEnd, which may never be executed.
    bint over
    Ending *ending              # The BpsxEnd that waits for it.
    int code                    # OK, or its error.
    char *text

cdef struct Execution:
    Call call                   # First field.
    void *context               # TensorFlow's.
    Done done
    # TensorFlow's, which may delete it once the call has been reported as over.
    Kernel *kernel
    Begun *begun                # Of BpsxBegin.

cdef struct Ending:             # An execution of BpsxEnd.
    Execution execution         # First field.
    uint32_t n
    Begun **begun
    int64_t left                # Sums that are not over, and one for the thread that begins calls.
    int code                    # OK, or an error of its own.
    char *text


cdef inline void drop_tensors(Api *api, Call *call) noexcept nogil:
    """Release TensorFlow's tensors, except those whose ownership has moved elsewhere."""
    cdef CallPart *part
    cdef uint32_t i
    for i in range(call.n):
        part = &call.parts[i]
        if part.given != NULL:
            api.delete_tensor(part.given)
        if part.made != NULL:
            api.delete_tensor(part.made)
        drop_dims(part)
        part.given = part.made = NULL


cdef inline void drop_begun(Begun *begun) noexcept nogil:
    if atomic_add(&begun.refs, -1) == 0:
        free(begun.text)
        free(begun)


cdef inline void drop_ending(Ending *ending) noexcept nogil:
    """Free what an ending refers to; the call's memory is freed elsewhere."""
    cdef uint32_t i
    for i in range(ending.n):
        drop_begun(ending.begun[i])
    free(ending.begun)
    free(ending.text)


cdef inline void free_kernel(Waste *waste) noexcept nogil:
    cdef Kernel *kernel = <Kernel *>waste
    free(kernel.priorities)
    free(kernel.names)
    free(kernel.lengths)
    free(kernel.storage)
    free(kernel)
