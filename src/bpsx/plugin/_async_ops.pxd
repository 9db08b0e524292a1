# C-level interface of _async_ops.pyx for plugins of frameworks that have their own engine.
from libc.stdint cimport int64_t

from bpsx.plugin.async_op cimport Call, Waste


cdef bint python_ends() noexcept nogil
cdef void submit(Call *call) noexcept nogil
cdef void queue(Call *call) noexcept nogil
cdef void end_call(Call *call) noexcept nogil
cdef void throw_away(Waste *waste) noexcept nogil

cdef class OwnedMemory:
    cdef void *what
    cdef void (*free)(void *what) noexcept nogil

cdef object keep(void *what, void (*free)(void *what) noexcept nogil)

cdef class CallPlan:
    cdef list names, priorities
    cdef bint average
    cdef int64_t root
    cdef dict dtypes
    cdef readonly object step
    cdef int64_t key
