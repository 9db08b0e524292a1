# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Shared memory between a worker and the lanes of its machine, on top of a transport for all peers.

A push is copied once, into memory that the lane has mapped too. The lane sums there, and its reply
is a few words with the position of the sum, which the worker copies out. Only the two processes
take part. Neither makes a system call unless the other sleeps; then one call ends the other's wait
in the inner transport's endpoint. ``connection.pxd`` describes the segment, ``handshake.py`` how
two processes find each other.
"""
import fcntl
import logging
import os

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close as close_descriptor
from posix.unistd cimport getpid

from bpsx.system.sync cimport atomic_load, atomic_store, lock, monitor_init, unlock
from bpsx.transports.abi cimport Endpoint
from bpsx.transports.sockets.peers cimport forget_peers
from bpsx.transports.shm.connection cimport (
    EndpointState, Link, drop_link, free_link, leave, set_up, shared_drop, slot_bytes, take_new,
)
from bpsx.transports.shm.receive cimport shared_receive, shared_release, shared_wait, shared_wake
from bpsx.transports.shm.send cimport shared_lend, shared_send

from bpsx.transports.base import ALONE, pass_number
from bpsx.transports.shm import handshake

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MAP_NORESERVE
        MADV_DONTDUMP
        MADV_DONTFORK
    int madvise(void *addr, size_t length, int advice)

log = logging.getLogger("bpsx.connections")


cdef class SharedEndpoint:
    """Endpoint that wraps another transport's and uses shared memory within a machine.

    See :mod:`bpsx.transports.base` for the interface. Not thread-safe, except :meth:`wake`,
    :meth:`lost`, and :meth:`close` after the driving thread has stopped.
    """
    cdef EndpointState state
    cdef Endpoint table
    cdef object inner, capsule, acceptor
    cdef bytes secret
    cdef object job
    cdef int descriptor
    cdef object number
    cdef uint32_t n_slots, next_slot
    cdef char *segment          # the lane's own segment; NULL on a worker
    cdef bint closed
    cdef long pid

    def __cinit__(self, inner, *, bytes secret=b"", int64_t most_bytes=-1, uint32_t slots=64):
        """Wrap the endpoint ``inner``, which then belongs to this one.

        ``secret``: the job secret, the same on both ends.
        ``most_bytes``: largest body accepted, in bytes; -1: no bound.
        ``slots``: number of workers with which a lane shares memory; others use ``inner``.
        """
        self.inner, self.secret, self.number, self.descriptor = inner, secret, -1, -1
        self.n_slots, self.pid = slots, getpid()
        if monitor_init(&self.state.monitor) != 0:
            raise MemoryError("cannot create a mutex")
        self.capsule = inner.abi()
        self.state.inner = <Endpoint *>PyCapsule_GetPointer(self.capsule, b"bpsx.Endpoint")
        self.state.most_bytes = <uint64_t>most_bytes        # -1: any
        self.table.self = &self.state
        self.table.send, self.table.recv, self.table.release = (
            shared_send, shared_receive, shared_release
        )
        self.table.wait, self.table.wake = shared_wait, shared_wake
        if self.state.inner.lend != NULL:
            self.table.lend = shared_lend
        if self.state.inner.drop != NULL:
            self.table.drop = shared_drop
        # A reply is often in the memory of another worker, which waits for its release. Once half
        # of a region or of its tokens are in use, readers copy (Way.tight), so some always remain.
        self.table.keeps = True

    def bind(self, host: str, ports=()) -> str:
        """Bind the inner endpoint, and also listen for workers of this machine.

        They find the lane by the address that this returns.
        """
        self.state.is_lane = True
        address = self.inner.bind(host, ports)
        self.acceptor = handshake.listen(address, self.secret, self._meet)
        self._open()
        return address

    def join(self, job: int, rank: int, visit: int = 0) -> None:
        """Set the job's number and the rank under which lanes know this endpoint.

        ``visit``: see :meth:`bpsx.transports.base.Endpoint.join`. Call it before :meth:`connect`
        and before the first message.
        """
        self.job, self.number = job, pass_number(rank, visit)
        self.inner.join(job, rank, visit)
        self._open()

    def _open(self):
        if self.acceptor is not None and self.job is not None:
            self.acceptor.open(self.job, self.inner.address)

    def connect(self, peer: int, address: str, undriven=ALONE) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``.

        Messages after the first go through memory if the lane is on this machine and shares some.
        """
        cdef Link *l = NULL
        self.inner.connect(peer, address, undriven)
        with handshake.visit(
            address, self.secret, self.job, self.number, self.inner.wake_descriptor
        ) as visit:
            if visit is None:
                return
            try:
                at, n_bytes = self._map(visit.segment)
                l = self._new_link(peer, <char *><uint64_t>at, n_bytes, visit.slot, visit.bell)
                visit.accept()
            except OSError as e:
                log.warning(
                    "no shared memory with the server at %s, so messages go through the network: "
                    "%s", address, e
                )
                free_link(l)
                return
        self._use(l)

    def _meet(self, made, rank: int) -> None:
        """Give a worker of this machine its slot. Called on the thread of a lane's acceptor."""
        cdef Link *l = NULL
        try:
            with handshake.welcome(made) as guest:
                if self.next_slot >= self.n_slots:
                    raise OSError(f"all {self.n_slots} slots of the shared memory are taken")
                self._make_segment()
                l = self._new_link(
                    rank, self.segment, self.n_slots * slot_bytes(), self.next_slot, guest.bell
                )
                if not guest.takes(self.descriptor, self.next_slot, self.inner.wake_descriptor):
                    raise OSError("the worker did not accept the shared memory")
        except OSError as e:
            log.warning(
                "no shared memory with worker %d, so messages go through the network: %s", rank, e
            )
            free_link(l)
            return
        self.next_slot += 1
        self._use(l)

    def _make_segment(self):
        if self.descriptor >= 0:
            return
        made = os.memfd_create("bpsx-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(made, self.n_slots * slot_bytes())
            # Seal the size: a process that shrank the segment would crash the others.
            fcntl.fcntl(
                made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            at, _ = self._map(made)
        except OSError:
            os.close(made)
            raise
        self.descriptor, self.segment = made, <char *><uint64_t>at

    def _map(self, int descriptor):
        cdef size_t n_bytes = os.fstat(descriptor).st_size
        cdef void *at
        if n_bytes < slot_bytes() or n_bytes % slot_bytes():
            raise OSError(f"the segment of {n_bytes} bytes was made by another version of bpsx")
        at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0)
        if at == MAP_FAILED:
            raise OSError(
                f"cannot map {n_bytes} bytes of shared memory: is the address space limit (ulimit "
                "-v) too low?"
            )
        madvise(at, n_bytes, MADV_DONTDUMP)
        madvise(at, n_bytes, MADV_DONTFORK)
        return <uint64_t>at, n_bytes

    cdef Link *_new_link(
        self, uint32_t peer, char *at, uint64_t n_bytes, uint32_t slot, int bell
    ) except NULL:
        cdef Link *l
        if (slot + 1) * slot_bytes() > n_bytes:
            raise OSError(f"slot {slot} is not within the segment of {n_bytes} bytes")
        l = <Link *>calloc(1, sizeof(Link))
        if l == NULL:
            raise OSError("no memory for a connection")
        l.wake_fd = -1
        if monitor_init(&l.monitor) != 0:
            free(l)
            raise OSError("cannot create a mutex")
        set_up(l, at, n_bytes, slot, self.state.is_lane)
        l.peer = peer
        l.wake_fd = os.dup(bell)
        return l

    cdef _use(self, Link *l):
        """Hand a link to the data plane. Any thread may call it."""
        lock(&self.state.monitor)
        l.next, self.state.new = self.state.new, l
        atomic_store(&self.state.n_new, self.state.n_new + 1)
        unlock(&self.state.monitor)
        self.inner.wake()

    def round_trip(self, peer: int) -> float:
        """See :meth:`bpsx.transports.base.Endpoint.round_trip`. Any thread may call it."""
        return self.inner.round_trip(peer)

    def fit_buffers(self, rate: float) -> None:
        """See :meth:`bpsx.transports.base.Endpoint.fit_buffers`. Any thread may call it."""
        self.inner.fit_buffers(rate)

    def watch(self) -> int:
        """Return a descriptor that becomes readable when :meth:`lost` has something to return."""
        return self.inner.watch()

    def lost(self) -> list:
        """Return the peers whose connection broke since the last call. Any thread may call it."""
        cdef Link *l = NULL
        found = self.inner.lost()
        lock(&self.state.monitor)
        for peer in found:
            l = self.state.all
            while l != NULL:
                if <long>l.peer == peer:
                    atomic_store(&l.gone, 1)
                l = l.next
        unlock(&self.state.monitor)
        return found

    @property
    def address(self) -> str:
        """``host:port`` after :meth:`bind`, else empty."""
        return self.inner.address

    @property
    def neighbours(self) -> int:
        """Number of peers reached through shared memory."""
        cdef Link *l
        cdef int n
        lock(&self.state.monitor)
        l, n = self.state.all, self.state.n_new
        while l != NULL:
            n += not l.dead
            l = l.next
        unlock(&self.state.monitor)
        return n

    @property
    def wake_descriptor(self) -> int:
        """The eventfd that :meth:`wake` writes to."""
        return self.inner.wake_descriptor

    @property
    def refused(self) -> int:
        """Number of connections refused because the peer did not know the job secret."""
        return self.inner.refused + (0 if self.acceptor is None else self.acceptor.refused)

    @property
    def malformed(self) -> int:
        """Number of malformed messages."""
        return self.inner.malformed + atomic_load(&self.state.malformed)

    def abi(self):
        """Return the data plane: a capsule with the C :c:struct:`Endpoint`.

        The capsule is valid as long as this object.
        """
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""
        self.inner.wake()

    def close(self) -> None:
        """Drop unsent messages and run every outstanding done callback. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.acceptor is not None:
            self.acceptor.close()
        self.inner.close()          # may still send from the segment, so it comes first
        take_new(&self.state)
        self._close_links(self.state.all)
        self._close_links(self.state.dropped)
        if self.segment != NULL:
            if self.pid == getpid():
                munmap(self.segment, self.n_slots * slot_bytes())
            close_descriptor(self.descriptor)
            self.segment = NULL

    cdef _close_links(self, Link *l):
        while l != NULL:
            drop_link(l)
            lock(&l.monitor)
            if self.pid == getpid():
                leave(l)
            # A forked child has no mapping, and the links are its parent's.
            l.mapping.there = False
            unlock(&l.monitor)
            close_descriptor(l.wake_fd)
            l.wake_fd = -1
            l = l.next

    def __dealloc__(self):
        cdef Link *l
        while self.state.dropped != NULL:
            l, self.state.dropped = self.state.dropped, self.state.dropped.next
            free_link(l)
        while self.state.all != NULL:
            l, self.state.all = self.state.all, self.state.all.next
            free_link(l)
        forget_peers(&self.state.peers)
