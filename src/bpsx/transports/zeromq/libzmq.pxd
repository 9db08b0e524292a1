# The functions and constants of libzmq that the data path uses.
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from bpsx.transports.abi cimport done_fn

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
