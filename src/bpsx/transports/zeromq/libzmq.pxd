# The functions of libzmq that the data path calls, and an endpoint's state.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.transports.abi cimport Message, done_fn

# libzmq's public structures; its ABI has fixed them since 4.0.
ctypedef struct zmq_msg_t:
    uint64_t _[8]

ctypedef struct zmq_pollitem_t:
    void *socket
    int fd
    short events
    short revents

ctypedef struct LibZmq:
    int (*msg_init)(zmq_msg_t *) noexcept nogil
    int (*msg_init_size)(zmq_msg_t *, size_t) noexcept nogil
    int (*msg_init_data)(zmq_msg_t *, void *, size_t, done_fn, void *) noexcept nogil
    int (*msg_send)(zmq_msg_t *, void *, int) noexcept nogil
    int (*msg_recv)(zmq_msg_t *, void *, int) noexcept nogil
    int (*msg_close)(zmq_msg_t *) noexcept nogil
    int (*msg_more)(const zmq_msg_t *) noexcept nogil
    int (*msg_get)(const zmq_msg_t *, int) noexcept nogil
    void *(*msg_data)(zmq_msg_t *) noexcept nogil
    size_t (*msg_size)(const zmq_msg_t *) noexcept nogil
    int (*poll)(zmq_pollitem_t *, int, long) noexcept nogil
    int (*disconnect)(void *, const char *) noexcept nogil
    int (*err)() noexcept nogil

cdef enum:
    ZMQ_DONTWAIT = 1
    ZMQ_SNDMORE = 2
    ZMQ_POLLIN = 1
    ZMQ_SRCFD = 2
    ID_BYTES = 13
    RANK_MASK = 0xFFFF          # see pass_number
    ID_TAG = 1                  # not 0: ZeroMQ reserves ids that begin with a zero byte

cdef struct Connection:         # made by connect()
    char *url                   # NULL: none to this peer
    int64_t dropped

cdef struct Visitor:            # the worker of a rank that has last connected
    bint there
    uint32_t number             # that it shows: see pass_number
    int64_t descriptor          # of its connection, plus 1; 0: not known, -1: it has ended

cdef struct EndpointState:
    LibZmq *lib
    void *socket
    int wake_fd
    uint64_t job
    int64_t malformed
    Visitor *visitors           # by rank, known since the first message. Only a lane has them
    uint32_t n_visitors
    uint32_t *retired           # numbers of workers that others have replaced
    uint32_t n_retired
    uint32_t retired_capacity
    Connection *connections     # by peer number
    uint32_t n_connections
    bint has_aside
    Message aside               # received by zmq_drop; the next receive returns it
