# Declarations of _gradients.pyx for _bucket.pyx and _settling.pyx.
from libc.stdint cimport int64_t, uint64_t

from bpsx.plugin.adapter cimport Item
from bpsx.torch._gradient_state cimport Event, State
from bpsx.torch.dlpack cimport DLTensor

cdef enum:
    UNCOUNTED = -1              # version of memory without a counter


cdef class Managed:
    cdef object __weakref__
    cdef readonly object parameter, info
    cdef readonly str name
    cdef str wire                       # those of `info`, whose attributes are slower
    cdef int priority
    cdef readonly State state
    # a Pushed or a SparseSum in the states of is_pushed(), otherwise None
    cdef readonly object pushed
    # gradient that an implicit wait has left in grad, and its version; or None
    cdef public object averaged
    cdef object spare                   # Pushed of an earlier step, for reuse; or None
    cdef public object hook
    cdef public object kind             # None: the workers have not agreed yet
    cdef public int passes_left, sparse_dim
    # this worker has no gradient and has pushed zeros
    cdef public bint stands_in
    # dense and uncompressed: hooks need only look at the gradient's memory
    cdef public bint quick
    cdef public bint rivalled           # another optimizer sums the same gradient too
    # the optimizer needs a sparse gradient, and a dense one has been pushed
    cdef public bint sparse_here
    # False: as far as is known, no worker has a gradient in this step
    cdef public bint wanted

    cdef int move(self, Event event) except -1
    cdef int go_on(self, Event event) except -1
    cdef int bucket(self, Pushed pushed) except -1
    cpdef int start(self, pushed) except -1
    cpdef receive(self)
    cpdef drop(self)
    cpdef clear(self)


cdef class Pushed(Item):
    cdef readonly object gradient, ctx
    cdef readonly bint own
    cdef readonly bint written      # valid after the wait
    cdef object info
    cdef object bucket              # the Bucket; None: it has started alone
    cdef int64_t version
    cdef bint waited

    cdef follow(self, Pushed alone)
    cdef handle(self)
    cdef total(self)


cpdef bint is_dense_on_gpu(tensor) except -1
cdef bint take_view(tensor, DLTensor *view)
cdef bint is_on_gpu(const DLTensor *view)
cdef bint view_on_gpu(tensor, DLTensor *view)
cdef int device_of(tensor, const DLTensor *view) except -2
cdef dtype_of(const DLTensor *view)
cdef bint take_plain_memory(Pushed pushed, const DLTensor *view) except -1
cdef int64_t counted(tensor) except -2
cdef uint64_t place_of(tensor) except? 0
