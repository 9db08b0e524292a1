# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Transport within one process: endpoints pass messages through a queue and a condition variable.

It is the smallest complete transport: copy this folder to begin a new one. An address is
``loopback:N`` with the number of an endpoint of this process that is bound.

Tests script the other side with it: :meth:`LoopbackEndpoint.inject` and
:meth:`LoopbackEndpoint.sent` replace a peer, and :attr:`LoopbackEndpoint.hold_done` keeps memory
"on the wire" until :meth:`LoopbackEndpoint.complete`.
"""
import itertools
import os
import threading
import weakref

from cpython.pycapsule cimport PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from bpsx.system.sync cimport (
    Monitor, atomic_load, atomic_store, lock, monitor_destroy, monitor_init, notify_all, now_ns,
    unlock, wait, wait_until,
)
from bpsx.transports.abi cimport Endpoint, Landing, Message, done_fn

from bpsx.errors import TransportError
from bpsx.transports.base import ALONE

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

cdef struct EndpointState:
    Monitor monitor
    Node *first
    Node *last
    Done *held
    bint hold_done
    bint woken
    bint closed
    EndpointState *peers[MAX_PEERS]     # receiver of messages to peer i
    uint32_t names[MAX_PEERS]   # this endpoint's peer number there
    int64_t dropped[MAX_PEERS]  # 1: lost() does not report peer i


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


cdef void deliver(EndpointState *s, Node *node) noexcept nogil:
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


cdef void finish(EndpointState *s, done_fn call, void *data, void *hint) noexcept nogil:
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
    cdef EndpointState *s = <EndpointState *>self
    cdef EndpointState *to = s.peers[peer] if peer < MAX_PEERS else NULL
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
    cdef EndpointState *s = <EndpointState *>self
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
    cdef EndpointState *s = <EndpointState *>self
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
    cdef EndpointState *s = <EndpointState *>self
    lock(&s.monitor)
    s.woken = True
    notify_all(&s.monitor)
    unlock(&s.monitor)


cdef void loopback_drop(void *self, uint32_t peer) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    if peer < MAX_PEERS:
        # No message is unsent. Done callbacks that are held back wait for complete().
        s.peers[peer] = NULL
        atomic_store(&s.dropped[peer], 1)


#: Address -> bound endpoint of this process.
_bound = weakref.WeakValueDictionary()
_numbers = itertools.count()
#: Guards ``others``, ``gone`` and ``watched`` of all endpoints.
_lock = threading.Lock()


cdef class LoopbackEndpoint:
    """Endpoint that connects to others of the same process.

    The contract is :class:`bpsx.transports.base.Endpoint`'s. It takes the options that all
    transports get and needs none of them. All endpoints must be closed before any is dropped.
    """
    cdef EndpointState *state
    cdef Endpoint table
    cdef dict others            # peer -> endpoint
    cdef list gone              # peers whose endpoint was closed, until lost() returns them
    cdef int watched            # eventfd of watch(); -1: none
    cdef uint64_t job
    cdef int rank
    cdef readonly str address       # empty before bind()
    cdef object __weakref__

    def __cinit__(self, **options):
        self.state = <EndpointState *>calloc(1, sizeof(EndpointState))
        if self.state == NULL or monitor_init(&self.state.monitor) != 0:
            raise MemoryError("no memory for an endpoint")
        self.others, self.gone, self.watched = {}, [], -1
        self.job, self.rank, self.address = 0, 0, ""
        self.table.self = self.state
        self.table.send = loopback_send
        self.table.recv = loopback_recv
        self.table.release = loopback_release
        self.table.wait = loopback_wait
        self.table.wake = loopback_wake
        self.table.drop, self.table.keeps = loopback_drop, True

    @property
    def wake_descriptor(self) -> int:
        """-1: a condition variable ends its waits, and no other process can signal that."""
        return -1

    def abi(self):
        """Return the data plane; see :mod:`bpsx.transports.base`."""
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    @property
    def malformed(self) -> int:
        """0: no message comes from outside this process."""
        return 0

    def bind(self, str host, ports=()) -> str:
        """Give this endpoint an address; ``host`` and ``ports`` mean nothing within a process."""
        self.address = f"loopback:{next(_numbers)}"
        _bound[self.address] = self
        return self.address

    def join(self, uint64_t job, int rank, int visit=0) -> None:
        """Set the job's number and the rank under which lanes know this endpoint."""
        self.job, self.rank = job, rank

    def connect(self, int peer, str address, undriven=ALONE) -> None:
        """Connect to the endpoint bound to ``address``, which becomes peer ``peer``.

        Raises :class:`TransportError` if there is none, or if it belongs to another job.
        """
        cdef LoopbackEndpoint other = _bound.get(address)
        if other is None:
            raise TransportError(f"{address}: no endpoint of this process is bound to it")
        if other.job != self.job:
            raise TransportError(f"{address}: it belongs to job {other.job}, not {self.job}")
        self.link(peer, other, self.rank)
        other.link(self.rank, self, peer)

    def link(self, int peer, LoopbackEndpoint other not None, int as_peer) -> None:
        """Make ``other`` peer ``peer``; its messages from here come from its peer ``as_peer``."""
        if not 0 <= peer < MAX_PEERS:
            raise TransportError(f"peer {peer}: a loopback endpoint has peers 0 to {MAX_PEERS - 1}")
        with _lock:
            self.state.names[peer] = as_peer
            self.state.peers[peer] = other.state
            self.others[peer] = other

    def round_trip(self, peer: int) -> float:
        """Return 0: there are no links."""
        return 0.0

    def fit_buffers(self, rate: float) -> None:
        """Do nothing: there are no links."""

    def watch(self) -> int:
        """See :meth:`bpsx.transports.base.Endpoint.watch`."""
        with _lock:
            if self.watched < 0:
                self.watched = os.eventfd(len(self.gone), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self.watched

    def lost(self) -> list:
        """Return the peers whose endpoint was closed since the last call."""
        with _lock:
            found, self.gone = self.gone, []
            if found and self.watched >= 0:
                os.eventfd_read(self.watched)
            return [peer for peer in found if not atomic_load(&self.state.dropped[<int>peer])]

    cdef _lose(self, LoopbackEndpoint other):
        """``other`` was closed. The lock is held."""
        for peer, known in self.others.items():
            if known is other:
                self.state.peers[peer] = NULL
                self.gone.append(peer)
                if self.watched >= 0:
                    os.eventfd_write(self.watched, 1)

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
        """End a wait of the data plane. Any thread may call it."""
        loopback_wake(self.state)

    def close(self) -> None:
        """Drop unread messages and run the callbacks that were held back. Idempotent."""
        cdef Message m
        cdef LoopbackEndpoint other
        lock(&self.state.monitor)
        was_closed, self.state.closed = self.state.closed, True
        unlock(&self.state.monitor)
        if not was_closed:
            with _lock:
                for other in set(self.others.values()):
                    if other is not self:
                        other._lose(self)
                if self.watched >= 0:
                    os.close(self.watched)
                    self.watched = -1
        while loopback_recv(self.state, &m) == 1:
            loopback_release(self.state, &m)
        self.complete()

    def __dealloc__(self):
        if self.state != NULL:
            monitor_destroy(&self.state.monitor)
            free(self.state)
