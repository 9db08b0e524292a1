# One execution of an op: its tensors, who is to be told, and the queues in which it waits for the GIL.
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free

from bpsx._adapter cimport Tell
from bpsx.core.sync cimport Monitor, atomic_add, lock, unlock
from bpsx.tensorflow.c_api cimport Api, Done, run

cdef enum:
    MAX_DIMS = 254              # TensorFlow's own bound

cdef struct Kernel:             # an op as it stands in a graph, or as eager calls with these attributes share it
    uint32_t n                  # tensors
    bint broadcasts
    bint average
    int64_t root
    int64_t *priorities
    char **names                # UTF-8, not ended
    size_t *lengths
    char *storage
    void *known_as              # the names as a list of str, once they have been needed
    Kernel *next                # forgotten by TensorFlow before

cdef struct Part:
    Tell tell                   # first: what the core calls knows its part by it
    Call *call
    void *source                # TF_Tensor: what is pushed; NULL: the target's memory holds it
    void *target                # TF_Tensor: where the result goes
    void *handle                # the Handle; NULL: has not begun

cdef struct Call:
    Kernel *kernel              # TensorFlow's to forget once it has been told that the call is over
    void *context
    Done done
    double rate
    int64_t left                # parts under way, and one for who begins them
    int64_t failed
    uint32_t n                  # parts
    Part *parts
    Call *next

cdef struct Calls:
    Monitor monitor             # guards all of this
    Call *first                 # to be begun, the oldest first
    Call *last
    bint draining               # a thread with the GIL is at it
    Call *over                  # of which only the handles are left
    Kernel *forgotten


cdef inline Call *new_call(Kernel *kernel, void *context) noexcept nogil:
    """NULL: no memory."""
    cdef Call *call = <Call *>calloc(1, sizeof(Call))
    if call == NULL:
        return NULL
    call.parts = <Part *>calloc(kernel.n + 1, sizeof(Part))
    if call.parts == NULL:
        free(call)
        return NULL
    call.kernel, call.context, call.rate = kernel, context, -1.0
    call.n, call.left = kernel.n, kernel.n + 1
    return call


cdef inline void free_call(Call *call) noexcept nogil:
    free(call.parts)
    free(call)


cdef inline void drop_tensors(Api *api, Call *call) noexcept nogil:
    """Let go of what has not been taken over by somebody else."""
    cdef uint32_t i
    for i in range(call.n):
        if call.parts[i].source != NULL:
            api.delete_tensor(call.parts[i].source)
        if call.parts[i].target != NULL:
            api.delete_tensor(call.parts[i].target)
        call.parts[i].source = call.parts[i].target = NULL


cdef inline void free_kernel(Kernel *kernel) noexcept nogil:
    free(kernel.priorities)
    free(kernel.names)
    free(kernel.lengths)
    free(kernel.storage)
    free(kernel)


cdef inline bint enqueue(Calls *calls, Call *call) noexcept nogil:
    """Let it be begun. Whether the caller has to see to that: nobody is at it."""
    cdef bint ours
    lock(&calls.monitor)
    if calls.last != NULL:
        calls.last.next = call
    else:
        calls.first = call
    calls.last = call
    ours = not calls.draining
    calls.draining = True
    unlock(&calls.monitor)
    return ours


cdef inline Call *take_calls(Calls *calls) noexcept nogil:
    """All that wait to be begun; NULL: there are none, and the caller is no longer who sees to them."""
    cdef Call *first
    lock(&calls.monitor)
    first = calls.first
    calls.first = calls.last = NULL
    calls.draining = first != NULL
    unlock(&calls.monitor)
    return first


cdef inline void settle(Api *api, Calls *calls, Call *call) noexcept nogil:
    """All has been done for it but to tell TensorFlow."""
    cdef Done done = call.done
    lock(&calls.monitor)
    call.next = calls.over
    calls.over = call
    unlock(&calls.monitor)
    run(api, &done)             # whatever that makes TensorFlow do


cdef inline bint part_over(Call *call) noexcept nogil:
    """Whether it was the last."""
    return atomic_add(&call.left, -1) == 0
