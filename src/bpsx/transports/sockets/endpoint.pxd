# Base class of the endpoints that listen on a plain socket; see endpoint.pyx.
from libc.stdint cimport int64_t

from bpsx.system.sync cimport Monitor
from bpsx.transports.abi cimport Endpoint
from bpsx.transports.sockets.peers cimport Losses


cdef class ListeningEndpoint:
    cdef Endpoint table
    cdef int *epoll             # this and the next three point into the data plane's state
    cdef int *wake_fd
    cdef Losses *losses
    cdef int64_t *malformed_count
    cdef object acceptor, job
    cdef bytes secret
    # seconds: between heartbeats; of silence after which a connection breaks
    cdef double interval, timeout
    cdef int rank
    cdef object number          # that a worker shows to lanes: see pass_number
    cdef bint joined, closed
    cdef readonly str address
    cdef _set_up(
        self, int *epoll, int *wake_fd, Losses *losses, int64_t *malformed, Monitor *monitor,
        bint encrypt
    )
