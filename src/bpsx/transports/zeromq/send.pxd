# Send path: a message is the frames of its routing id, its head and, if there is one, its body.
from libc.errno cimport EINTR
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

from bpsx.transports.abi cimport Landing, done_fn
from bpsx.transports.zeromq.connection cimport (
    ID_BYTES, EndpointState, is_dropped, number_of, put_id,
)
from bpsx.transports.zeromq.libzmq cimport ZMQ_DONTWAIT, ZMQ_SNDMORE, zmq_msg_t


cdef inline int send_frame(
    EndpointState *s, void *data, size_t size, done_fn done, void *hint, int flags
) noexcept nogil:
    """Send one frame. With a done callback it is not copied, and the callback always runs."""
    cdef zmq_msg_t m
    if done != NULL:
        if s.lib.msg_init_data(&m, data, size, done, hint) != 0:
            done(data, hint)
            return -1
    else:
        if s.lib.msg_init_size(&m, size) != 0:
            return -1
        memcpy(s.lib.msg_data(&m), data, size)
    while s.lib.msg_send(&m, s.socket, flags | ZMQ_DONTWAIT) < 0:
        if s.lib.err() == EINTR:
            continue
        s.lib.msg_close(&m)
        return -1
    return 0


cdef inline int zmq_send(
    void *self, uint32_t peer, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef char routing_id[ID_BYTES]
    cdef int more = ZMQ_SNDMORE if body != NULL else 0
    put_id(s, routing_id, number_of(s, peer))
    # ROUTER refuses an unknown peer at the first frame. After that it sends or drops all frames of
    # the message together.
    if (
        is_dropped(s, peer)
        or send_frame(s, routing_id, ID_BYTES, NULL, NULL, ZMQ_SNDMORE) != 0
    ):
        if head_done != NULL:
            head_done(head, head_hint)
        if body_done != NULL:
            body_done(body, body_hint)
        return -1
    if send_frame(s, head, head_size, head_done, head_hint, more) != 0:
        if body_done != NULL:
            body_done(body, body_hint)
        return -1
    if body != NULL:
        return send_frame(s, body, body_size, body_done, body_hint, 0)
    return 0
