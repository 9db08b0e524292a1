# An operation of ours as TensorFlow keeps it, and one execution of it.
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free

from bpsx.plugin.async_op cimport Call, Part, Waste, drop_dims
from bpsx.tensorflow.c_api cimport Api, Done

# an op as it stands in a graph, or as eager calls with these attributes share it
cdef struct Kernel:
    Waste waste                 # first: its Plan, once that has been needed
    uint32_t n                  # tensors
    bint broadcasts
    bint average
    int64_t root
    int64_t *priorities
    char **names                # UTF-8, not ended
    size_t *lengths
    char *storage

cdef struct Execution:
    Call call                   # first
    void *context               # TensorFlow's
    Done done
    Kernel *kernel              # TensorFlow's to forget once it has been told that the call is over


cdef inline void drop_tensors(Api *api, Call *call) noexcept nogil:
    """Let go of TensorFlow's tensors, but for those that somebody else has taken over."""
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
