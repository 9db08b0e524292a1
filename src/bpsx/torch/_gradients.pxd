# What _settling.pyx sees of _gradients.pyx.
from libc.stdint cimport int64_t, uint64_t

from bpsx.plugin.adapter cimport Item
from bpsx.torch.dlpack cimport Seen
from bpsx.torch.rlock cimport Turn

cdef enum:
    UNCOUNTED = -1              # a version that nobody counts


cdef class Managed:
    cdef object __weakref__
    cdef readonly object parameter, named
    cdef readonly str name
    cdef public object pushed           # a Pushed, a SparseSum or None
    cdef object spare                   # a Pushed of an earlier step, to be used again; or None
    cdef public object hook
    cdef public object kind             # None: the workers have not agreed yet
    # what an implicit wait has left in grad, and its version; or None
    cdef public object averaged
    cdef public int passes_left, sparse_dim
    cdef public bint deferred           # a sparse gradient that is complete, and waits for that
    # what has been pushed are zeros for a gradient that this worker has not had
    cdef public bint stands_in
    # it is dense and travels as it is: hooks need only look at its memory
    cdef public bint quick
    cdef public bint rivalled           # another optimizer sums its gradient, too
    # the optimizer needs a sparse gradient; what has been pushed is dense
    cdef public bint sparse_here
    # False: no worker has a gradient in this step, as far as is known
    cdef public bint wanted


cdef class Pushed(Item):
    cdef readonly object gradient, ctx
    cdef readonly bint own
    cdef readonly bint written      # known after the wait
    cdef object named
    cdef Batch batch                # None: it has begun alone
    cdef int64_t version
    cdef bint waited

    cdef follow(self, Pushed alone)
    cdef handle(self)
    cdef total(self)


cdef class Failed:
    cdef object failure


cdef class Batch:
    # hooks may leave out what they check otherwise: see Exchange.accumulated
    cdef public bint quick
    cdef object begin, begin_alone, begin_here, worth, streams, stream
    cdef Turn turn
    cdef list waiting
    cdef int device
    cdef uint64_t nbytes, most

    cdef bint put(self, Managed managed, gradient, const Seen *seen) except -1
    cdef bint put_here(self, Managed managed, gradient, const Seen *seen) except -1
    cdef Pushed new_pushed(self, Managed managed, gradient)
    cdef turn_to(self, int device)
    cdef append(self, Managed managed, Pushed pushed)
    cdef open_for(self, stream)
    cdef submit_quietly(self)
    cdef begin_all(self, list waiting)
    cdef list begin_odd(self, list waiting)
    cdef bint goes_along(self, Pushed pushed) except -1
    cdef on_its_stream(self)


cdef int64_t counted(tensor) except -2
cdef uint64_t place_of(tensor) except? 0
