# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Base class of the endpoints that listen on a plain socket.

Workers connect through the acceptor of ``listener.py``. One epoll and one wake-up eventfd end
waits, and broken connections are reported by peer number.
"""
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free
from posix.unistd cimport close as close_descriptor

from bpsx.system.sync cimport Monitor, atomic_load, lock, monitor_init, unlock
from bpsx.transports.sockets.epoll cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLLIN, epoll_create1, epoll_set,
    eventfd,
)
from bpsx.transports.sockets.peers cimport Losses, read, write

from bpsx.config import NO_ENCRYPTION
from bpsx.errors import TransportError
from bpsx.transports.base import pass_number
from bpsx.transports.sockets import listener
from bpsx.system.address import join_host_port


cdef class ListeningEndpoint:
    """An endpoint without its connections.

    A subclass provides ``connect``, ``close`` and ``_take``. The acceptor calls ``_take`` with each
    accepted socket and its worker's rank.
    """

    cdef _set_up(
        self, int *epoll, int *wake_fd, Losses *losses, int64_t *malformed, Monitor *monitor,
        bint encrypt
    ):
        self.epoll, self.wake_fd, self.losses, self.malformed_count, self.address, self.rank = (
            epoll, wake_fd, losses, malformed, "", -1
        )
        epoll[0] = wake_fd[0] = losses.fd = -1
        if encrypt:
            raise TransportError(NO_ENCRYPTION)
        if monitor_init(monitor) != 0 or monitor_init(&losses.monitor) != 0:
            raise MemoryError("cannot create a mutex")
        epoll[0] = epoll_create1(EPOLL_CLOEXEC)
        wake_fd[0] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        losses.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if (
            min(epoll[0], wake_fd[0], losses.fd) < 0
            or epoll_set(epoll[0], EPOLL_CTL_ADD, wake_fd[0], EPOLLIN, NULL) != 0
        ):
            raise OSError("epoll, eventfd: cannot create a descriptor (too many open files?)")

    def bind(self, host: str, ports=()) -> str:
        """Listen on ``host`` at the first free port of ``ports``, or at any free port if empty.

        Returns and stores ``host:port``.
        """
        bound = listener.listen(host, ports)
        self.acceptor = listener.Acceptor(bound, self.secret, self._take)
        self.address = join_host_port(host, bound.getsockname()[1])
        self._open()
        return self.address

    def join(self, job: int, rank: int, visit: int = 0) -> None:
        """Set the job's number and the rank under which lanes know this endpoint.

        ``visit``: see :meth:`bpsx.transports.base.Endpoint.join`. Call it before :meth:`connect`
        and before the first message. After it, a lane that is bound accepts workers.
        """
        self.job, self.rank, self.joined = job, rank, True
        self.number = pass_number(rank, visit)
        self._open()

    def _open(self):
        if self.acceptor is not None and self.joined and self.address:
            self.acceptor.open(self.job, self.address)

    def watch(self) -> int:
        """Return a descriptor that becomes readable when :meth:`lost` has something to return."""
        return self.losses.fd

    def round_trip(self, peer: int) -> float:
        """Return 0. TCP has round trips that limit what a connection carries."""
        return 0.0

    def fit_buffers(self, rate: float) -> None:
        """Do nothing. TCP has send buffers to fit to links of ``rate`` bytes per second."""

    def lost(self) -> list:
        """Return the peers whose connection broke since the last call. Any thread may call it."""
        cdef uint64_t drained = 0
        read(self.losses.fd, &drained, sizeof(drained))
        lock(&self.losses.monitor)
        found = [self.losses.peers[i] for i in range(self.losses.n)]
        self.losses.n = 0
        unlock(&self.losses.monitor)
        return found

    @property
    def wake_descriptor(self) -> int:
        """The eventfd that :meth:`wake` writes to."""
        return self.wake_fd[0]

    @property
    def refused(self) -> int:
        """Number of connections refused because the peer did not know the job secret."""
        return 0 if self.acceptor is None else self.acceptor.refused

    @property
    def malformed(self) -> int:
        """Number of malformed messages; the connection of each was closed."""
        return atomic_load(self.malformed_count)

    def abi(self):
        """Return the data plane: a capsule with the C :c:struct:`Endpoint`.

        The capsule is valid as long as this object.
        """
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""
        cdef uint64_t one = 1
        write(self.wake_fd[0], &one, sizeof(one))

    def __dealloc__(self):
        cdef int fd
        if self.epoll == NULL:
            return
        # Not in close(): a done callback that runs at the end may still write to wake_fd.
        for fd in (self.epoll[0], self.wake_fd[0], self.losses.fd):
            if fd >= 0:
                close_descriptor(fd)
        free(self.losses.peers)
