# Receive path: frames become messages, whose memory stays libzmq's. Dropping a peer is here, too,
# because it has to read a message first.
from libc.errno cimport EINTR
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from posix.unistd cimport read, write

from bpsx.system.sync cimport atomic_add, atomic_store
from bpsx.transports.abi cimport Message
from bpsx.transports.zeromq.connection cimport (
    ID_BYTES, ID_TAG, EndpointState, admit, is_dropped, retire,
)
from bpsx.transports.zeromq.libzmq cimport ZMQ_DONTWAIT, ZMQ_POLLIN, zmq_msg_t, zmq_pollitem_t


cdef inline bint valid_id(EndpointState *s, zmq_msg_t *m) noexcept nogil:
    cdef char *text = <char *>s.lib.msg_data(m)
    return (
        s.lib.msg_size(m) == ID_BYTES
        and text[0] == ID_TAG
        and memcmp(text + 5, &s.job, 8) == 0
        and s.lib.msg_more(m)
    )


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


cdef inline int zmq_receive(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    if not s.has_aside:
        return read_message(s, m)
    s.has_aside = False
    m.peer, m.has_body = s.aside.peer, s.aside.has_body
    memcpy(m.opaque, s.aside.opaque, sizeof(m.opaque))
    find_parts(s, m)
    return 1


cdef inline void zmq_release(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    s.lib.msg_close(<zmq_msg_t *>&m.opaque[0])
    if m.has_body:
        s.lib.msg_close(<zmq_msg_t *>&m.opaque[8])


cdef inline void zmq_wait(void *self, int timeout_ms) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef zmq_pollitem_t items[2]
    cdef uint64_t drained = 0
    if s.has_aside:
        return      # without zmq_poll, which would read ahead: see zmq_drop
    items[0].socket = s.socket
    items[0].fd = -1
    items[1].socket = NULL
    items[1].fd = s.wake_fd
    items[0].events = items[1].events = ZMQ_POLLIN
    items[0].revents = items[1].revents = 0
    if s.lib.poll(items, 2, timeout_ms) > 0 and items[1].revents:
        read(s.wake_fd, &drained, sizeof(drained))


cdef inline void zmq_wake(void *self) noexcept nogil:
    cdef uint64_t one = 1
    write((<EndpointState *>self).wake_fd, &one, sizeof(one))


cdef inline void zmq_drop(void *self, uint32_t peer) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    if peer < s.n_visitors:
        retire(s, &s.visitors[peer])
    if peer >= s.n_connections or s.connections[peer].url == NULL or is_dropped(s, peer):
        return
    atomic_store(&s.connections[peer].dropped, 1)
    # zmq_poll reads ahead: the routing id and the head of a message may have left its pipe, and its
    # body not. libzmq 4.3.5 aborts the process if such a pipe is torn down. Read the whole message.
    if not s.has_aside:
        s.has_aside = read_message(s, &s.aside)
    # Drops the messages in both directions. The done callbacks run on an I/O thread, or while this
    # thread next receives or waits.
    while s.lib.disconnect(s.socket, s.connections[peer].url) != 0 and s.lib.err() == EINTR:
        pass
