# Messages as ZeroMQ's frames: routing id, head and, if there is one, body.
from libc.errno cimport EINTR
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t
from libc.string cimport memcmp, memcpy

from bpsx.system.sync cimport atomic_add, atomic_load, atomic_store
from bpsx.system.arrays cimport make_room
from bpsx.transports.abi cimport Message, done_fn
from bpsx.transports.zeromq.libzmq cimport (
    ID_BYTES, ID_TAG, RANK_MASK, ZMQ_DONTWAIT, ZMQ_SRCFD, EndpointState, Visitor, zmq_msg_t,
)


cdef inline void put_id(EndpointState *s, char *out, uint32_t index) noexcept nogil:
    out[0] = ID_TAG
    memcpy(out + 1, &index, 4)
    memcpy(out + 5, &s.job, 8)


cdef inline bint valid_id(EndpointState *s, zmq_msg_t *m) noexcept nogil:
    cdef char *text = <char *>s.lib.msg_data(m)
    return (
        s.lib.msg_size(m) == ID_BYTES
        and text[0] == ID_TAG
        and memcmp(text + 5, &s.job, 8) == 0
        and s.lib.msg_more(m)
    )


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


cdef inline void retire(EndpointState *s, Visitor *v) noexcept nogil:
    """Take no more messages of a worker: another one may have its rank."""
    if not v.there:
        return
    if make_room(&s.retired, &s.retired_capacity, s.n_retired + 1, sizeof(uint32_t)):
        s.retired[s.n_retired] = v.number
        s.n_retired += 1
    v.there = False
    atomic_store(&v.descriptor, 0)


cdef inline uint32_t number_of(EndpointState *s, uint32_t peer) noexcept nogil:
    """The number in a peer's routing id."""
    return s.visitors[peer].number if peer < s.n_visitors and s.visitors[peer].there else peer


cdef inline bint is_retired(EndpointState *s, uint32_t number) noexcept nogil:
    cdef uint32_t i
    for i in range(s.n_retired):
        if s.retired[i] == number:
            return True
    return False


cdef inline bint admit(
    EndpointState *s, uint32_t number, zmq_msg_t *head, uint32_t *rank
) noexcept nogil:
    """Note who has sent a message to a lane; *rank: its rank. False: somebody has replaced it."""
    cdef Visitor *v
    rank[0] = number & RANK_MASK
    v = &s.visitors[rank[0]]
    if v.there and v.number == number:
        return True
    if is_retired(s, number):
        return False
    retire(s, v)
    v.there, v.number = True, number
    atomic_store(&v.descriptor, s.lib.msg_get(head, ZMQ_SRCFD) + 1)
    return True


cdef inline bint is_dropped(EndpointState *s, uint32_t peer) noexcept nogil:
    return peer < s.n_connections and atomic_load(&s.connections[peer].dropped)


cdef inline int receive_frame(EndpointState *s, zmq_msg_t *m) noexcept nogil:
    s.lib.msg_init(m)
    while s.lib.msg_recv(m, s.socket, ZMQ_DONTWAIT) < 0:
        if s.lib.err() != EINTR:
            s.lib.msg_close(m)
            return -1
    return 0


cdef inline void drop_rest(EndpointState *s, zmq_msg_t *last) noexcept nogil:
    """Read a malformed message to its end, so that the next receive starts with a new message."""
    cdef zmq_msg_t m
    cdef int more = s.lib.msg_more(last)
    while more and receive_frame(s, &m) == 0:
        more = s.lib.msg_more(&m)
        s.lib.msg_close(&m)
    atomic_add(&s.malformed, 1)


cdef inline void find_parts(EndpointState *s, Message *m) noexcept nogil:
    """Point a message's head and body into its frames, which may hold short ones themselves."""
    cdef zmq_msg_t *head = <zmq_msg_t *>&m.opaque[0]
    cdef zmq_msg_t *body = <zmq_msg_t *>&m.opaque[8]
    m.head, m.head_size = <char *>s.lib.msg_data(head), s.lib.msg_size(head)
    m.body, m.body_size = NULL, 0
    if m.has_body:
        m.body, m.body_size = <char *>s.lib.msg_data(body), s.lib.msg_size(body)


cdef inline int read_message(EndpointState *s, Message *m) noexcept nogil:
    cdef zmq_msg_t routing_id
    cdef zmq_msg_t *head = <zmq_msg_t *>&m.opaque[0]
    cdef zmq_msg_t *body = <zmq_msg_t *>&m.opaque[8]
    cdef uint32_t number = 0
    while receive_frame(s, &routing_id) == 0:
        if not valid_id(s, &routing_id):
            drop_rest(s, &routing_id)
            s.lib.msg_close(&routing_id)
            continue
        memcpy(&number, <char *>s.lib.msg_data(&routing_id) + 1, 4)
        s.lib.msg_close(&routing_id)
        if receive_frame(s, head) != 0:
            return 0
        m.has_body = False
        m.peer = number
        if s.n_visitors and not admit(s, number, head, &m.peer):
            if s.lib.msg_more(head):
                drop_rest(s, head)
            s.lib.msg_close(head)
            continue
        if s.lib.msg_more(head):
            if receive_frame(s, body) != 0:
                s.lib.msg_close(head)
                return 0
            m.has_body = True
            if s.lib.msg_more(body):
                drop_rest(s, body)
                s.lib.msg_close(head)
                s.lib.msg_close(body)
                continue
        find_parts(s, m)
        return 1
    return 0
