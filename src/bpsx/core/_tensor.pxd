# C-level interface of _tensor.pyx for other extension modules.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.core.partition cimport CommitGroup as CGroup, Partition, Tensor as CTensor
from bpsx.core.state cimport Core as CCore


cdef int queue_kernels(CCore *c, Partition *p) except -1


cdef class Tensor:
    cdef CTensor c
    cdef bytes encoded, codec
    cdef list made              # objects that keep compiled codecs alive
    cdef object gpu
    # coders of the partitions or of the matrix, if compressed on the GPU
    cdef list coders
    cdef bint on_host           # it is a matrix that has been pushed from host memory
    cdef readonly str name
    cdef readonly uint32_t generation
    cdef readonly uint64_t nbytes
    cdef str failure            # text of the error with which every push_pull of it fails, or None
    # ns of the last question by a thread, and of the first one since a long pause
    cdef int64_t asked, asking_since
    cdef bint by_graph                  # a framework's graph waits for this tensor

    cdef void ask(self)
    cdef void ask_no_more(self)
    cdef put_on(self, gpu)
    cdef take_off(self)
    cdef bint factor_on(self, gpu) except -1


cdef class CommitGroup:
    cdef CGroup c
    cdef CCore *of              # the core keeps this object, and outlives its use


cdef class Declaration:
    cdef readonly uint32_t generation
    cdef readonly object shape
    cdef readonly int dtype
    cdef readonly uint64_t nbytes
    cdef public object codec            # compression, or None
    cdef public Tensor tensor           # None: not placed yet
    cdef public list pending            # prepared handles that wait for the placement
    cdef int number                     # of the DeclaredState
    cdef public uint32_t uses           # push_pulls that have begun with this declaration
    # ... since all workers count from zero, and the most that may; -1: no bound
    cdef public int64_t count
    cdef public int64_t last

    cpdef Tensor take(self, shape, int dtype, codec)
    cpdef bint count_use(self) noexcept
    cpdef bint bound(self, int64_t last) noexcept
