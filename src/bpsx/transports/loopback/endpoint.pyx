# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Transport within one process: endpoints pass messages through a queue and a condition variable.

It is the smallest complete transport; copy it to begin a new one. Tests use it to script the other
side: :meth:`LoopbackEndpoint.inject` and :meth:`LoopbackEndpoint.sent` replace a peer, and
:attr:`LoopbackEndpoint.hold_done` keeps memory "on the wire" until
:meth:`LoopbackEndpoint.complete`.
"""
from cpython.pycapsule cimport PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from bpsx.system.sync cimport (
    Monitor, lock, monitor_destroy, monitor_init, notify_all, now_ns, unlock, wait, wait_until,
)
from bpsx.transports.abi cimport Endpoint, Landing, Message, done_fn

from bpsx.errors import TransportError

cdef enum:
    MAX_PEERS = 256

cdef struct Node:               # a message in a queue; head and body follow it in memory
    Node *next
    uint32_t peer
    size_t head_size
    size_t body_size
    bint has_body

cdef struct Done:               # a done callback that a test holds back
    Done *next
    done_fn call
    void *data
    void *hint

cdef struct State:
    Monitor monitor
    Node *first
    Node *last
    Done *held
    bint hold_done
    bint woken
    bint closed
    State *peers[MAX_PEERS]     # receiver of messages to peer i
    uint32_t names[MAX_PEERS]   # this endpoint's peer number there


cdef Node *node_new(
    uint32_t peer, void *head, size_t head_size, void *body, size_t body_size
) noexcept nogil:
    cdef Node *node = <Node *>malloc(sizeof(Node) + head_size + body_size)
    if node == NULL:
        return NULL
    node.next = NULL
    node.peer = peer
    node.head_size = head_size
    node.body_size = body_size
    node.has_body = body != NULL
    memcpy(<char *>(node + 1), head, head_size)
    if body_size:
        memcpy(<char *>(node + 1) + head_size, body, body_size)
    return node


cdef void deliver(State *s, Node *node) noexcept nogil:
    lock(&s.monitor)
    if s.closed:
        free(node)
    else:
        if s.first == NULL:
            s.first = node
        else:
            s.last.next = node
        s.last = node
        notify_all(&s.monitor)
    unlock(&s.monitor)


cdef void finish(State *s, done_fn call, void *data, void *hint) noexcept nogil:
    """Run a done callback now, or hold it back until complete()."""
    cdef Done *held
    if call == NULL:
        return
    if s.hold_done:
        held = <Done *>malloc(sizeof(Done))
        if held != NULL:
            held.call = call
            held.data = data
            held.hint = hint
            lock(&s.monitor)
            held.next = s.held
            s.held = held
            unlock(&s.monitor)
            return
    call(data, hint)


cdef int loopback_send(
    void *self, uint32_t peer, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
) noexcept nogil:
    cdef State *s = <State *>self
    cdef State *to = s.peers[peer] if peer < MAX_PEERS else NULL
    cdef Node *node = NULL
    if to != NULL:
        node = node_new(s.names[peer], head, head_size, body, body_size)
    # The message is a copy. Run the callbacks before delivery: a receiver may rely on them having
    # run, or being held.
    finish(s, head_done, head, head_hint)
    finish(s, body_done, body, body_hint)
    if node == NULL:
        return -1
    deliver(to, node)
    return 0


cdef int loopback_recv(void *self, Message *m) noexcept nogil:
    cdef State *s = <State *>self
    cdef Node *node
    lock(&s.monitor)
    node = s.first
    if node != NULL:
        s.first = node.next
    unlock(&s.monitor)
    if node == NULL:
        return 0
    m.peer = node.peer
    m.head = <char *>(node + 1)
    m.head_size = node.head_size
    m.has_body = node.has_body
    m.body = m.head + node.head_size if node.has_body else NULL
    m.body_size = node.body_size
    m.opaque[0] = <uint64_t>node
    return 1


cdef void loopback_release(void *self, Message *m) noexcept nogil:
    free(<void *>m.opaque[0])


cdef void loopback_wait(void *self, int timeout_ms) noexcept nogil:
    cdef State *s = <State *>self
    cdef int64_t end = now_ns() + <int64_t>timeout_ms * 1000000
    lock(&s.monitor)
    while s.first == NULL and not s.woken and (timeout_ms < 0 or now_ns() < end):
        if timeout_ms < 0:
            wait(&s.monitor)
        else:
            wait_until(&s.monitor, end)
    s.woken = False
    unlock(&s.monitor)


cdef void loopback_wake(void *self) noexcept nogil:
    cdef State *s = <State *>self
    lock(&s.monitor)
    s.woken = True
    notify_all(&s.monitor)
    unlock(&s.monitor)


cdef class LoopbackEndpoint:
    """Endpoint that :meth:`connect` joins to another of the same process.

    All endpoints must be closed before any is dropped.
    """
    cdef State *state
    cdef Endpoint table
    cdef dict others

    def __cinit__(self):
        self.state = <State *>calloc(1, sizeof(State))
        if self.state == NULL or monitor_init(&self.state.monitor) != 0:
            raise MemoryError("no memory for an endpoint")
        self.others = {}
        self.table.self = self.state
        self.table.send = loopback_send
        self.table.recv = loopback_recv
        self.table.release = loopback_release
        self.table.wait = loopback_wait
        self.table.wake = loopback_wake

    @property
    def wake_descriptor(self) -> int:
        """-1: a condition variable ends its waits, and no other process can signal that."""
        return -1

    def abi(self):
        """Return the data plane; see :mod:`bpsx.transports.base`."""
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    def connect(self, int peer, LoopbackEndpoint other not None, int as_peer) -> None:
        """Make ``other`` peer ``peer``; its messages from here come from its peer ``as_peer``."""
        if not 0 <= peer < MAX_PEERS:
            raise TransportError(f"peer {peer}: a loopback endpoint has peers 0 to {MAX_PEERS - 1}")
        self.state.names[peer] = as_peer
        self.state.peers[peer] = other.state
        self.others[peer] = other

    def disconnect(self, int peer) -> None:
        """Make ``peer`` unreachable from now on."""
        self.state.peers[peer] = NULL

    def inject(self, uint32_t peer, bytes head not None, bytes body=None) -> None:
        """Deliver a message here, as if ``peer`` had sent it."""
        cdef Node *node = node_new(
            peer, <char *>head, len(head), <char *>body if body is not None else NULL,
            len(body) if body is not None else 0
        )
        if node == NULL:
            raise MemoryError("no memory for a message")
        deliver(self.state, node)

    def sent(self, timeout: float = 0) -> tuple | None:
        """Return the next message that arrived here, as (peer, head, body).

        None if no message arrives within ``timeout`` seconds.
        """
        cdef Message m
        cdef int timeout_ms = <int>(timeout * 1000)
        if timeout_ms:
            with nogil:
                loopback_wait(self.state, timeout_ms)
        if loopback_recv(self.state, &m) != 1:
            return None
        found = (m.peer, m.head[:m.head_size], m.body[:m.body_size] if m.has_body else None)
        loopback_release(self.state, &m)
        return found

    @property
    def hold_done(self) -> bool:
        """Whether done callbacks are held back. Set it before the first send."""
        return self.state.hold_done

    @hold_done.setter
    def hold_done(self, bint value):
        self.state.hold_done = value

    def complete(self) -> int:
        """Run the done callbacks that were held back; return how many."""
        cdef Done *held
        cdef Done *following
        cdef int n = 0
        lock(&self.state.monitor)
        held = self.state.held
        self.state.held = NULL
        unlock(&self.state.monitor)
        while held != NULL:
            following = held.next
            held.call(held.data, held.hint)
            free(held)
            held = following
            n += 1
        return n

    def wake(self) -> None:
        loopback_wake(self.state)

    def close(self) -> None:
        """Drop unread messages and run the callbacks that were held back. Idempotent."""
        cdef Message m
        lock(&self.state.monitor)
        self.state.closed = True
        unlock(&self.state.monitor)
        while loopback_recv(self.state, &m) == 1:
            loopback_release(self.state, &m)
        self.complete()

    def __dealloc__(self):
        if self.state != NULL:
            monitor_destroy(&self.state.monitor)
            free(self.state)
