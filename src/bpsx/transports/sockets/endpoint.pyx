# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""What the endpoints of our own transports have in common: workers come through the gate of
``listener.py``, one epoll and one wake-up descriptor end sleeps, and connections that broke are
told of by number.
"""
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free
from posix.unistd cimport close as close_descriptor

from bpsx.system.sync cimport Monitor, atomic_load, monitor_init
from bpsx.transports.tcp.connection cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLLIN, epoll_create1, epoll_set,
    eventfd,
)
from bpsx.transports.sockets.peers cimport Losses, take_losses, write

from bpsx.config import NO_ENCRYPTION
from bpsx.errors import TransportError
from bpsx.transports.sockets import listener as gate
from bpsx.system.address import join_host_port


cdef class GatedEndpoint:
    """An endpoint but for its connections.

    Subclasses have ``connect``, ``close`` and ``_take``, to which the gate hands a socket and whose
    it is.
    """

    cdef _set_up(
        self, int *epoll, int *wake_fd, Losses *losses, int64_t *nonsense, Monitor *monitor,
        bint encrypt
    ):
        self.epoll, self.wake_fd, self.losses, self.nonsense, self.address, self.rank = (
            epoll, wake_fd, losses, nonsense, "", -1
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
        """Listen on ``host`` at the first free one of ``ports``, else at one that the system
        chooses; returns and stores ``host:port``.
        """
        listener = gate.listen(host, ports)
        self.gate = gate.Gate(listener, self.secret, self._take)
        self.address = join_host_port(host, listener.getsockname()[1])
        self._open()
        return self.address

    def join(self, job: int, rank: int) -> None:
        """The job's number, and the rank under which lanes shall know this endpoint; before
        :meth:`connect` and the first message.

        A lane lets workers in from now on.
        """
        self.job, self.rank, self.joined = job, rank, True
        self._open()

    def _open(self):
        if self.gate is not None and self.joined and self.address:
            self.gate.open(self.job, self.address)

    def watch(self) -> int:
        """A descriptor that becomes readable when :meth:`lost` has news."""
        return self.losses.fd

    def lost(self) -> list:
        """Peers whose connection has broken since the last call. Any thread."""
        return take_losses(self.losses)

    @property
    def wake_descriptor(self) -> int:
        """What :meth:`wake` writes to."""
        return self.wake_fd[0]

    @property
    def refused(self) -> int:
        """Connections turned away because they did not know the secret."""
        return 0 if self.gate is None else self.gate.refused

    @property
    def malformed(self) -> int:
        """Messages that made no sense; their connections were closed."""
        return atomic_load(self.nonsense)

    def abi(self):
        """The data plane: a capsule with the C :c:struct:`Endpoint`, valid as long as this
        object.
        """
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""
        cdef uint64_t one = 1
        write(self.wake_fd[0], &one, sizeof(one))

    def __dealloc__(self):
        cdef int fd
        if self.epoll == NULL:
            return
        # Only now: a done callback that runs at the end may still wake us.
        for fd in (self.epoll[0], self.wake_fd[0], self.losses.fd):
            if fd >= 0:
                close_descriptor(fd)
        free(self.losses.peers)
