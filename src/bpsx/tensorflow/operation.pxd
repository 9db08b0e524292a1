# An operation of bpsx as TensorFlow keeps it, and one execution of it.
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free

from bpsx.plugin.async_op cimport Call, Part, Waste, drop_dims
from bpsx.tensorflow.c_api cimport Api, Done

# An op in a graph, or one that all eager calls with these attributes share.
cdef struct Kernel:
    Waste waste                 # First field; holds the op's Plan once that has been needed.
    uint32_t n                  # Number of tensors.
    bint broadcasts
    bint average
    int64_t root
    int64_t *priorities
    char **names                # UTF-8, without a final NUL.
    size_t *lengths
    char *storage

cdef struct Execution:
    Call call                   # First field.
    void *context               # TensorFlow's.
    Done done
    # TensorFlow's, which may delete it once the call has been reported as over.
    Kernel *kernel


cdef inline void drop_tensors(Api *api, Call *call) noexcept nogil:
    """Release TensorFlow's tensors, except those whose ownership has moved elsewhere."""
    cdef Part *part
    cdef uint32_t i
    for i in range(call.n):
        part = &call.parts[i]
        if part.given != NULL:
            api.delete_tensor(part.given)
        if part.made != NULL:
            api.delete_tensor(part.made)
        drop_dims(part)
        part.given = part.made = NULL


cdef inline void free_kernel(Waste *waste) noexcept nogil:
    cdef Kernel *kernel = <Kernel *>waste
    free(kernel.priorities)
    free(kernel.names)
    free(kernel.lengths)
    free(kernel.storage)
    free(kernel)
