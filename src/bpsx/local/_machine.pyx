# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The processes of one machine: shared memory, wake-up descriptors, and an endpoint without peers.

The memory is anonymous (``memfd``). So it has no name that could be left behind or opened by
others, and is freed with the last process.
"""
import fcntl
import logging
import os

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close as close_descriptor

from bpsx.core.local.neighbour cimport MOST_ROOTS, N_DTYPES, Machine as CMachine, Neighbour
from bpsx.core.gpu.pinned_pool cimport SLAB
from bpsx.core.local.ring cimport NOTICE_BYTES, Board, Ring, Segment
from bpsx.system.sync cimport atomic_add, atomic_load, atomic_store
from bpsx.kernels.loaded cimport fill_in
from bpsx.transports.abi cimport Endpoint, Landing, Message, done_fn

from bpsx.dtypes import BY_CODE
from bpsx.errors import ConfigError
from bpsx.kernels import load as load_kernels

log = logging.getLogger("bpsx.local")

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MAP_NORESERVE

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initval, int flags)
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long n, int timeout)
    enum:
        POLLIN

cdef extern from "<unistd.h>" nogil:
    ssize_t read(int fd, void *buf, size_t count)
    ssize_t write(int fd, const void *buf, size_t count)


cdef bint load(void *owner, int dtype) noexcept with gil:
    """Load a dtype's kernels when a sum first needs them."""
    try:
        (<Machine>owner).load(dtype)
        return True
    except Exception as e:
        log.error(
            "the kernels of %s cannot be loaded: %s",
            BY_CODE[dtype].name if dtype in BY_CODE else f"dtype code {dtype}", e
        )
        return False


def head_bytes(int size) -> int:
    """Return the bytes before the shares in a segment of a machine with ``size`` processes.

    They are whole pages, of which the last is the notice board.
    """
    nbytes = sizeof(Segment) + (size - 1) * sizeof(Ring)
    return -(-nbytes // 4096) * 4096 + sizeof(Board)


@cython.no_gc_clear
cdef class Machine:
    """This process's shared memory, and its neighbours'.

    Created before the core and closed after it. Not thread-safe, except for methods marked "Any
    thread".
    """
    cdef CMachine c
    cdef list kept
    cdef readonly int descriptor        # of this process's segment

    def __cinit__(self, *, int size, int me, int first_rank, bint alone, str name, uint64_t room):
        """Create and map this process's segment.

        ``room``: bytes of address space for shares; memory is allocated as they are written.
        ``alone``: there are no servers.
        """
        self.descriptor = -1
        self.kept = []
        self.c.size = size
        self.c.me = me
        self.c.root = size - 1
        self.c.first_rank = first_rank
        self.c.alone = alone
        self.c.load = load
        self.c.owner = <void *>self
        self.c.all = <Neighbour *>calloc(size, sizeof(Neighbour))
        self.c.parts = <char **>calloc(size, sizeof(char *))
        if self.c.all == NULL or self.c.parts == NULL:
            raise MemoryError(f"no memory for {size} neighbours")
        for i in range(size):
            self.c.all[i].wake_fd = -1
        self.c.used = head_bytes(size)
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.c.used + room)
        except OSError as e:
            raise ConfigError(
                f"cannot create {self.c.used + room} bytes of shared memory ({e.strerror}): raise "
                "the file size limit (ulimit -f), or set BPSX_LOCAL_REDUCE=0 so that every "
                "process exchanges with the servers itself"
            ) from e
        # The seals prevent another process from shrinking the memory under the others.
        fcntl.fcntl(
            self.descriptor, fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self._map(me, self.descriptor)

    cdef _map(self, int local_rank, int descriptor):
        cdef uint64_t nbytes = os.fstat(descriptor).st_size
        if nbytes < self.c.used and local_rank != self.c.me:
            raise ConfigError(
                f"local rank {local_rank} shares a segment of {nbytes} bytes, which is too small: "
                "does it run another version of bpsx?"
            )
        cdef void *at = mmap(
            NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0
        )
        if at == MAP_FAILED:
            raise ConfigError(
                f"cannot map {nbytes} bytes of shared memory: raise the address space limit "
                "(ulimit -v), or set BPSX_LOCAL_REDUCE=0 so that every process exchanges with the "
                "servers itself"
            )
        self.c.all[local_rank].segment = <Segment *>at
        self.c.all[local_rank].nbytes = nbytes

    def meet(self, int local_rank, int descriptor, int wake) -> None:
        """Map a neighbour's segment and keep ``wake``, which ends that process's sleep.

        ``descriptor`` may be closed afterwards.
        """
        self._map(local_rank, descriptor)
        self.c.all[local_rank].wake_fd = wake

    def load(self, int dtype) -> None:
        """Ensure that the kernels of a dtype code are loaded.

        Raises :class:`KeyError` for an unknown code.
        """
        if not 0 <= dtype < N_DTYPES:
            raise KeyError(dtype)
        found = load_kernels(dtype)
        self.kept.append(found)
        fill_in(&self.c.kernels[dtype], found)

    def left(self, int local_rank) -> None:
        """Mark a neighbour as having left the job in good order.

        The caller must wake the core. Any thread.
        """
        if 0 <= local_rank < <int>self.c.size:
            atomic_store(&self.c.all[local_rank].gone, 1)

    def joined(self, int local_rank) -> None:
        """Mark a process as having called join(): rounds close without it.

        The caller must wake the core. Any thread.
        """
        if 0 <= local_rank < <int>self.c.size:
            atomic_store(&self.c.all[local_rank].joined, 1)
            atomic_store(&self.c.joined_news, 1)

    def set_joined(self, bint on) -> None:
        """Mark this process as having called join(), or as taking part again.

        While joined, it works for the other processes if they need its GPU. The caller must wake
        the core. Any thread.
        """
        atomic_store(&self.c.all[self.c.me].joined, on)

    def all_joined(self) -> None:
        """Clear the marks of :meth:`joined`: all processes take part again.

        Operations posted after this call see no mark. Any thread.
        """
        cdef uint32_t i
        for i in range(self.c.size):
            atomic_store(&self.c.all[i].joined, 0)

    cdef Board *_board(self, int local_rank) except NULL:
        if not 0 <= local_rank < <int>self.c.size or self.c.all[local_rank].segment == NULL:
            raise ValueError(f"no notice board of local rank {local_rank}")
        cdef uint64_t head = head_bytes(self.c.size)
        return <Board *>(<char *>self.c.all[local_rank].segment + head - sizeof(Board))

    def put_notice(self, bytes text) -> None:
        """Replace the text on this process's notice board.

        One thread. Raises :class:`ValueError` if it does not fit.
        """
        cdef Board *board = self._board(self.c.me)
        if len(text) > NOTICE_BYTES:
            raise ValueError(f"a notice of {len(text)} bytes; at most {NOTICE_BYTES} are allowed")
        atomic_add(&board.version, 1)       # odd: being written
        memcpy(board.text, <char *>text, len(text))
        board.length = len(text)
        atomic_add(&board.version, 1)

    def notice(self, int local_rank) -> bytes:
        """Return the text on a process's notice board; empty if there is none. Any thread."""
        cdef Board *board = self._board(local_rank)
        cdef int64_t version
        while True:
            version = atomic_load(&board.version)
            found = board.text[:min(board.length, NOTICE_BYTES)]
            if version % 2 == 0 and atomic_load(&board.version) == version:
                return found

    def group_gpus(self, int group_size, list roots) -> None:
        """Set the groups of GPUs that reduce together.

        ``group_size``: local ranks per group. ``roots``: members to which a group reduces, in turn;
        empty: each copies a part. Raises :class:`ValueError`.
        """
        cdef uint32_t i
        if (
            not 0 < group_size <= <int>self.c.size
            or self.c.size % group_size
            or len(roots) > MOST_ROOTS
        ):
            raise ValueError(
                f"groups of {group_size} among {self.c.size} processes, {len(roots)} roots; at "
                f"most {MOST_ROOTS} roots are allowed"
            )
        if self.c.gpus.pinned == NULL:
            self.c.gpus.pinned = <uint8_t *>calloc(self.c.all[self.c.root].nbytes // SLAB + 1, 1)
            if self.c.gpus.pinned == NULL:
                raise MemoryError("no memory for the table of pinned memory")
        self.c.gpus.group_size, self.c.gpus.n_groups, self.c.gpus.n_roots = (
            group_size, self.c.size // group_size, len(roots)
        )
        for i in range(len(roots)):
            self.c.gpus.roots[i] = roots[i]
        self.c.gpus.collects = True

    @property
    def collects(self) -> bool:
        """Whether the other processes may need this process's GPU."""
        return self.c.gpus.collects

    @property
    def deserted(self) -> bool:
        """Whether a neighbour has left in good order."""
        cdef uint32_t i
        for i in range(self.c.size):
            if atomic_load(&self.c.all[i].gone):
                return True
        return False

    def abi(self):
        """Return a capsule with the C struct for the core, valid as long as this object."""
        return PyCapsule_New(&self.c, b"bpsx.Machine", NULL)

    def close(self) -> None:
        """Unmap everything, after the core has been closed. Idempotent."""
        # No os.close: at the interpreter's exit, this module's names may already be gone.
        cdef uint32_t i
        for i in range(self.c.size):
            if self.c.all[i].segment != NULL:
                munmap(self.c.all[i].segment, self.c.all[i].nbytes)
                self.c.all[i].segment = NULL
            if self.c.all[i].wake_fd >= 0:
                close_descriptor(self.c.all[i].wake_fd)
                self.c.all[i].wake_fd = -1
        if self.descriptor >= 0:
            close_descriptor(self.descriptor)
            self.descriptor = -1

    def __dealloc__(self):
        cdef uint32_t i
        if self.c.all != NULL:
            self.close()
            for i in range(self.c.size):
                free(self.c.all[i].overflow.items)
        free(self.c.all)
        free(self.c.parts)
        free(self.c.gpus.pinned)
        free(self.c.early.items)
        free(self.c.tensors)
        free(self.c.work.items)


# ---- the endpoint of a process that speaks only to its neighbours

cdef int quiet_send(
    void *self, uint32_t peer, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
) noexcept nogil:
    if head_done != NULL:
        head_done(head, head_hint)
    if body_done != NULL:
        body_done(body, body_hint)
    return -1


cdef int quiet_receive(void *self, Message *m) noexcept nogil:
    return 0


cdef void quiet_release(void *self, Message *m) noexcept nogil:
    pass


cdef void quiet_wait(void *self, int timeout_ms) noexcept nogil:
    cdef int fd = (<int *>self)[0]
    cdef uint64_t drained = 0
    cdef pollfd item
    item.fd = fd
    item.events = POLLIN
    item.revents = 0
    if poll(&item, 1, timeout_ms) > 0:
        read(fd, &drained, sizeof(drained))


cdef void quiet_wake(void *self) noexcept nogil:
    cdef uint64_t one = 1
    write((<int *>self)[0], &one, sizeof(one))


cdef class QuietEndpoint:
    """An endpoint without peers: its core sleeps and wakes, and sends nothing.

    See :mod:`bpsx.transports.base` for the interface.
    """
    cdef int wake_fd
    cdef Endpoint table
    cdef readonly str address

    def __cinit__(self):
        self.address = ""
        self.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.wake_fd < 0:
            raise OSError("eventfd: cannot create a wake-up descriptor (too many open files?)")
        memset(&self.table, 0, sizeof(Endpoint))
        self.table.self = &self.wake_fd
        self.table.send = quiet_send
        self.table.recv = quiet_receive
        self.table.release = quiet_release
        self.table.wait = quiet_wait
        self.table.wake = quiet_wake

    @property
    def wake_descriptor(self) -> int:
        """The descriptor that :meth:`wake` writes to."""
        return self.wake_fd

    def abi(self):
        """Return the data plane as a capsule, valid as long as this object."""
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    def wake(self) -> None:
        """End a wait of the data plane. Any thread."""
        quiet_wake(&self.wake_fd)

    def close(self) -> None:
        """Do nothing: the descriptor is closed with the object."""

    def __dealloc__(self):
        if self.wake_fd >= 0:
            close_descriptor(self.wake_fd)
