# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""An endpoint whose peers are divided among I/O threads, for links that one thread cannot fill.

Each I/O thread drives an endpoint of its own. It writes what the driving thread sends and reads
what arrives, so these copies and system calls use as many cores as there are threads. The driving
thread only hands messages over, in its own order, and takes complete ones. All messages of one
peer pass through one I/O thread and stay in order. Only workers need this: a server has a thread
for each lane.
"""
import os
import select

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.unistd cimport close as close_descriptor, getpid

from bpsx.system.sync cimport (
    atomic_load, atomic_store, lock, monitor_destroy, monitor_init, unlock,
)
from bpsx.transports.abi cimport Endpoint, Landing, Message, done_fn
from bpsx.transports.sockets.peers cimport read
from bpsx.transports.threaded.fifo cimport take_all
from bpsx.transports.threaded.part cimport (
    DROPPED, OPEN, Command, EndpointState, EndpointPart, Received, add_peer, close_peer, end_memory,
    forget_commands, give, new_command, ring, run_part, status_of, take_broken,
)

from bpsx.errors import TransportError
from bpsx.system.threads import NamedThread
from bpsx.transports.base import ALONE

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents
    enum:
        POLLIN
    int poll(pollfd *watched, unsigned long n, int timeout_ms)


cdef int threaded_send(
    void *self, uint32_t peer, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Command *c = NULL
    if status_of(s, peer) == OPEN:
        c = new_command(peer, head_size if head_done == NULL else 0)
    if c == NULL:
        end_memory(head, head_done, head_hint, body, body_done, body_hint)
        return -1
    c.head, c.head_size, c.head_done, c.head_hint = head, head_size, head_done, head_hint
    c.body, c.body_size, c.body_done, c.body_hint = body, body_size, body_done, body_hint
    if head_done == NULL:
        c.head = c + 1
        memcpy(c.head, head, head_size)
    if landing != NULL:
        c.lands, c.landing = True, landing[0]
    give(&s.parts[peer % s.n_parts], c)
    return 0


cdef int threaded_receive(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Received *r
    if s.taken == NULL and atomic_load(&s.received.n):
        lock(&s.monitor)
        s.taken = take_all(&s.received)
        unlock(&s.monitor)
    r = <Received *>s.taken
    if r == NULL:
        return 0
    s.taken = r.item.next
    m[0] = r.message
    free(r)
    return 1


cdef void threaded_release(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Endpoint *inner = s.parts[m.peer % s.n_parts].inner
    inner.release(inner.self, m)


cdef void threaded_wait(void *self, int timeout_ms) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef uint64_t drained = 0
    cdef pollfd watched
    watched.fd, watched.events, watched.revents = s.wake_fd, POLLIN, 0
    atomic_store(&s.asleep, 1)
    if s.taken != NULL or atomic_load(&s.received.n) or atomic_load(&s.woken):
        timeout_ms = 0
    if poll(&watched, 1, timeout_ms) > 0:
        read(s.wake_fd, &drained, sizeof(drained))
    atomic_store(&s.asleep, 0)
    atomic_store(&s.woken, 0)


cdef void threaded_wake(void *self) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    atomic_store(&s.woken, 1)
    if atomic_load(&s.asleep):
        ring(s.wake_fd)


cdef void threaded_drop(void *self, uint32_t peer) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Command *drop = close_peer(s, peer)
    if drop != NULL:
        give(&s.parts[peer % s.n_parts], drop)


cdef class ThreadedEndpoint:
    """Endpoint whose I/O threads drive one inner endpoint each; peer p belongs to thread p % n.

    See :mod:`bpsx.transports.base` for the interface. It connects, but does not listen. Not
    thread-safe, except :meth:`connect`, :meth:`wake`, :meth:`lost`, and :meth:`close` after the
    driving thread has stopped.
    """
    cdef EndpointState state
    cdef Endpoint table
    cdef list inner, capsules, threads
    cdef object news            # epoll of the inner endpoints' descriptors for losses
    cdef bint closed
    cdef int pid

    def __cinit__(self, inner, *, double spin_us=0):
        """Take over the endpoints ``inner``, one for each I/O thread.

        Another thread must be able to call their ``connect`` while one drives them, and they may
        not need ``undriven`` for it, nor ``lend``.

        ``spin_us``: microseconds for which an I/O thread without work yields before it sleeps.
        """
        cdef uint32_t i
        self.state.wake_fd = -1
        self.inner, self.threads, self.pid = list(inner), [], getpid()
        if not self.inner:
            raise ValueError("at least one endpoint is needed")
        self.capsules = [one.abi() for one in self.inner]
        self.state.n_parts = <uint32_t>len(self.inner)
        self.state.spin_ns = <int64_t>(spin_us * 1000)
        self.state.parts = <EndpointPart *>calloc(max(self.state.n_parts, 1), sizeof(EndpointPart))
        if self.state.parts == NULL or monitor_init(&self.state.monitor) != 0:
            raise MemoryError("no memory for the I/O threads")
        for i in range(self.state.n_parts):
            self.state.parts[i].inner = <Endpoint *>PyCapsule_GetPointer(
                self.capsules[i], b"bpsx.Endpoint"
            )
            self.state.parts[i].whole = &self.state
            if monitor_init(&self.state.parts[i].monitor) != 0:
                raise MemoryError("cannot create a mutex")
        self.state.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.news = select.epoll()
        self._set_up()

    cdef _set_up(self):
        self.table.self = &self.state
        self.table.send, self.table.recv, self.table.release = (
            threaded_send, threaded_receive, threaded_release
        )
        self.table.wait, self.table.wake = threaded_wait, threaded_wake
        self.table.keeps = self.state.parts[0].inner.keeps
        if self.state.parts[0].inner.drop != NULL:
            self.table.drop = threaded_drop
        for one in self.inner:
            self.news.register(one.watch(), select.EPOLLIN)

    def bind(self, host: str, ports=()) -> str:
        """Raise :class:`~bpsx.errors.TransportError`: only workers have I/O threads."""
        raise TransportError("an endpoint with I/O threads does not listen: servers have lanes")

    def join(self, job: int, rank: int, visit: int = 0) -> None:
        """Set the job's number and the rank under which lanes know this endpoint; start the
        threads.

        ``visit``: see :meth:`bpsx.transports.base.Endpoint.join`. Call it once, before
        :meth:`connect` and before the first message.
        """
        for i, one in enumerate(self.inner):
            one.join(job, rank, visit)
            thread = NamedThread(
                target=self._run, args=(i,), name=f"bpsx-io-{i}", daemon=True
            )
            thread.start()
            self.threads.append(thread)

    def _run(self, uint32_t i) -> None:
        with nogil:
            run_part(&self.state.parts[i])

    def connect(self, peer: int, address: str, undriven=ALONE) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``."""
        # First, so that the peer can be dropped even if this is interrupted.
        if not add_peer(&self.state, peer):
            raise MemoryError("no memory for a connection")
        self.inner[peer % self.state.n_parts].connect(peer, address)

    def round_trip(self, peer: int) -> float:
        """See :meth:`bpsx.transports.base.Endpoint.round_trip`. Any thread may call it."""
        return self.inner[peer % self.state.n_parts].round_trip(peer)

    def fit_buffers(self, rate: float) -> None:
        """See :meth:`bpsx.transports.base.Endpoint.fit_buffers`. Any thread may call it."""
        for one in self.inner:
            one.fit_buffers(rate)

    def watch(self) -> int:
        """Return a descriptor that becomes readable when :meth:`lost` has something to return."""
        return self.news.fileno()

    def lost(self) -> list:
        """Return the peers whose connection broke since the last call. Any thread may call it."""
        found = {peer for one in self.inner for peer in one.lost()}
        found.update(self._broken())
        return [peer for peer in found if peer < 0 or status_of(&self.state, peer) != DROPPED]

    cdef list _broken(self):
        """The peers to which a send has failed, each once."""
        return [i for i in range(self.state.n_peers) if take_broken(&self.state, i)]

    @property
    def address(self) -> str:
        """Empty: this endpoint does not listen."""
        return ""

    @property
    def wake_descriptor(self) -> int:
        """The eventfd that :meth:`wake` writes to."""
        return self.state.wake_fd

    @property
    def refused(self) -> int:
        """Number of connections refused: none, as nothing can connect to this endpoint."""
        return 0

    @property
    def malformed(self) -> int:
        """Number of malformed messages."""
        return sum([one.malformed for one in self.inner])

    @property
    def neighbours(self) -> int:
        """Number of peers reached through shared memory."""
        return sum([getattr(one, "neighbours", 0) for one in self.inner])

    def abi(self):
        """Return the data plane: a capsule with the C :c:struct:`Endpoint`.

        The capsule is valid as long as this object.
        """
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""
        threaded_wake(&self.state)

    def close(self) -> None:
        """Stop the threads, drop unsent messages, run every outstanding done callback.

        Idempotent.
        """
        if self.closed:
            return
        self.closed = True
        atomic_store(&self.state.stopping, 1)
        # A forked child has neither the threads nor, for certain, the locks that they had.
        if self.pid == getpid():
            for one in self.inner:
                one.wake()
            for thread in self.threads:
                thread.join()
            self._forget()
        for one in self.inner:
            one.close()

    cdef _forget(self):
        cdef Message m
        cdef uint32_t i
        for i in range(self.state.n_parts):
            forget_commands(&self.state.parts[i])
        while threaded_receive(&self.state, &m):
            threaded_release(&self.state, &m)

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.state.n_peers):
            free(self.state.peers[i].drop)
        free(self.state.peers)
        for i in range(self.state.n_parts if self.state.parts != NULL else 0):
            monitor_destroy(&self.state.parts[i].monitor)
        free(self.state.parts)
        monitor_destroy(&self.state.monitor)
        # Not in close(): a done callback that runs at the end may still write to it.
        if self.state.wake_fd >= 0:
            close_descriptor(self.state.wake_fd)
