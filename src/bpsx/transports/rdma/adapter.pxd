# An open RDMA adapter and its memory and queue pairs; see adapter.pyx.
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from bpsx.transports.rdma.verbs cimport (
    ibv_comp_channel, ibv_context, ibv_cq, ibv_mr, ibv_pd, ibv_qp,
)


cdef class Memory:
    cdef object adapter         # kept alive as long as this memory
    cdef long pid               # the process that registered the memory
    cdef char *at
    cdef uint64_t n
    cdef ibv_mr *mr
    cdef close(self)


cdef class Pair:
    cdef object adapter
    cdef long pid
    cdef ibv_cq *cq
    cdef ibv_qp *qp
    cdef uint32_t most_inline, psn
    cdef close(self)


cdef class Adapter:
    cdef long pid
    cdef ibv_context *context
    cdef ibv_pd *pd
    cdef ibv_comp_channel *channel
    cdef readonly str name
    cdef int port, gid_index, mtu
    cdef bint ethernet
    cdef readonly bint forks    # whether memory that forked children inherit may be registered
    cdef uint16_t lid
    cdef uint64_t most_bytes    # largest message of the port
    cdef bytes gid
    cdef Memory new_memory(self, uint64_t n, bint to_be_written)
    cdef Pair new_pair(self, uint32_t sends, uint32_t receives)
    cdef close(self)
