# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""An RDMA adapter (host channel adapter): set-up by libibverbs.

``endpoint.pyx`` has the data path, which runs without the GIL.

pyverbs cannot be used: it does not give out the addresses of its queue pairs (docs/decisions/0027).
"""
import ipaddress
import os
import resource
import struct

cimport cython
from libc.errno cimport errno
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport getpid

from bpsx.transports.rdma.verbs cimport (
    connect_pair, ibv_alloc_pd, ibv_close_device, ibv_create_comp_channel, ibv_create_cq,
    ibv_dealloc_pd, ibv_dereg_mr, ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_qp,
    ibv_device, ibv_fork_init, ibv_free_device_list, ibv_get_device_list, ibv_get_device_name,
    ibv_open_device, ibv_port_attr, never_blocks, new_qp, number_of, query_port,
    register_to_be_written, register_to_send,
)

from bpsx.errors import TransportError

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MADV_DONTDUMP
        MADV_DONTFORK
    int madvise(void *addr, size_t length, int advice)

# Number of the queue pair, its first packet's number (PSN), GID, LID, and the port's MTU.
PAIR = struct.Struct("<II16sHB")
_STEPS = (
    "", "INIT",
    "RTR (is the other machine on the same network, and the GID that of a network interface on "
    "it?)", "RTS"
)
cdef enum:
    MOST_INLINE = 256


def _copies_when_forking() -> bool:
    """Whether fork() leaves registered pages to the parent and gives the child copies.

    Linux does so since 5.12 (ibv_fork_init(3)).
    """
    release = os.uname().release.split(".")
    return (
        len(release) > 1
        and release[0].isdigit()
        and release[1].isdigit()
        and (int(release[0]), int(release[1])) >= (5, 12)
    )


def _why(int code):
    return f"{os.strerror(code)} (errno {code})"


@cython.no_gc_clear
cdef class Memory:
    """Memory that this module allocates and registers. Forked children do not have it."""

    cdef close(self):
        """Deregister and unmap. A forked child has neither memory nor adapter, and does neither."""
        if self.mr != NULL and self.pid == getpid():
            ibv_dereg_mr(self.mr)
        if self.at != NULL and self.pid == getpid():
            munmap(self.at, self.n)
        self.mr, self.at = NULL, NULL

    def __dealloc__(self):
        self.close()


@cython.no_gc_clear
cdef class Pair:
    """A queue pair and its completion queue."""

    def describe(self) -> bytes:
        """Return the description that the other end needs to connect."""
        cdef Adapter a = self.adapter
        return PAIR.pack(number_of(self.qp), self.psn, a.gid, a.lid, a.mtu)

    def meet(self, other: bytes) -> None:
        """Connect to the queue pair with the description ``other``.

        Raises :class:`~bpsx.errors.TransportError`.
        """
        cdef Adapter a = self.adapter
        cdef uint32_t number, psn
        cdef int rc, least, where = 0
        cdef uint16_t to
        number, psn, gid, lid, mtu = PAIR.unpack(other)
        cdef const unsigned char *there = gid
        if not 1 <= mtu <= 5:
            raise TransportError(f"the peer sent the MTU code {mtu}; expected 1 to 5")
        to, least = lid, min(a.mtu, mtu)
        with nogil:
            rc = connect_pair(
                self.qp, a.port, a.gid_index, there, to, a.ethernet, number, psn, self.psn, least,
                &where
            )
        if rc:
            raise TransportError(
                f"{a.name}: cannot connect to {ipaddress.IPv6Address(gid)}: {_why(rc)} on the way "
                f"to state {_STEPS[where]}"
            )

    cdef close(self):
        if self.qp != NULL and self.pid == getpid():
            ibv_destroy_qp(self.qp)
        if self.cq != NULL and self.pid == getpid():
            ibv_destroy_cq(self.cq)
        self.qp, self.cq = NULL, NULL

    def __dealloc__(self):
        self.close()


cdef class Adapter:
    """An open adapter, of which one port is used. Raises TransportError if it cannot be opened."""

    def __cinit__(self, str name, int port, int gid_index, str gid, bint ethernet):
        """Raises :class:`~bpsx.errors.TransportError` if the adapter cannot be opened."""
        cdef ibv_port_attr attributes
        cdef int code
        self.pid = getpid()
        self.name, self.port, self.gid_index, self.ethernet = name, port, gid_index, ethernet
        self.gid = ipaddress.IPv6Address(gid).packed
        # On old kernels this keeps registered pages in the parent when the script forks. It fails
        # if it is called too late.
        self.forks = ibv_fork_init() == 0 or _copies_when_forking()
        self._open()
        code = query_port(self.context, port, &attributes)
        if code:
            raise TransportError(f"{name}: cannot query port {port}: {_why(code)}")
        self.mtu, self.lid, self.most_bytes = (
            attributes.active_mtu, attributes.lid, attributes.max_msg_sz
        )
        self.pd = ibv_alloc_pd(self.context)
        code = errno
        if self.pd == NULL:
            raise TransportError(f"{name}: cannot allocate a protection domain: {_why(code)}")
        self.channel = ibv_create_comp_channel(self.context)
        if self.channel == NULL or never_blocks(self.channel) < 0:
            code = errno
            raise TransportError(f"{name}: cannot create a completion channel: {_why(code)}")

    def _open(self):
        cdef int n = 0, at = 0
        cdef ibv_device **devices = ibv_get_device_list(&n)
        code = errno
        if devices == NULL:
            raise TransportError(f"libibverbs cannot list the RDMA adapters: {_why(code)}")
        found = [ibv_get_device_name(devices[i]).decode() for i in range(n)]
        if self.name in found:
            at = found.index(self.name)
            with nogil:
                self.context = ibv_open_device(devices[at])
        code = errno
        ibv_free_device_list(devices)
        if self.name not in found:
            raise TransportError(
                f"libibverbs does not know the adapter {self.name} (it knows: "
                f"{', '.join(found) or 'none'}): its provider is missing; install "
                f"ibverbs-providers (Debian, Ubuntu) or rdma-core"
            )
        if self.context == NULL:
            raise TransportError(
                f"{self.name} cannot be opened: {_why(code)}; may this user read and write "
                "/dev/infiniband/uverbs*? A container needs these devices passed in"
            )

    cdef Memory new_memory(self, uint64_t n, bint to_be_written):
        """Map and register ``n`` bytes, which the other end may write, or which are only sent."""
        cdef Memory made = Memory.__new__(Memory)
        cdef int code
        cdef void *at = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if at == MAP_FAILED:
            raise TransportError(f"cannot allocate {n} bytes: {_why(errno)}")
        made.adapter, made.at, made.n, made.pid = self, <char *>at, n, self.pid
        madvise(at, n, MADV_DONTDUMP)
        madvise(at, n, MADV_DONTFORK)
        with nogil:
            made.mr = (
                register_to_be_written(self.pd, at, n)
                if to_be_written
                else register_to_send(self.pd, at, n)
            )
            code = errno
        if made.mr == NULL:
            made.close()
            raise TransportError(
                f"{self.name}: cannot register {n >> 10} KiB of memory: {explain_refusal(code)}"
            )
        return made

    cdef Pair new_pair(self, uint32_t sends, uint32_t receives):
        cdef Pair made = Pair.__new__(Pair)
        made.adapter, made.psn, made.pid = self, int.from_bytes(os.urandom(3), "little"), self.pid
        made.cq = ibv_create_cq(self.context, sends + receives, NULL, self.channel, 0)
        code = errno
        if made.cq == NULL:
            raise TransportError(
                f"{self.name}: cannot create a completion queue of {sends + receives} entries: "
                f"{_why(code)}; are BYTEPS_RDMA_RX_DEPTH and BYTEPS_RDMA_START_DEPTH too large "
                "for this adapter?"
            )
        # Adapters differ in the bytes that a work request may carry inline, and refuse too many.
        made.qp = new_qp(self.pd, made.cq, sends, receives, MOST_INLINE, &made.most_inline)
        if made.qp == NULL:
            made.qp = new_qp(self.pd, made.cq, sends, receives, 0, &made.most_inline)
        if made.qp == NULL:
            code = errno
            made.close()
            raise TransportError(
                f"{self.name}: cannot create a queue pair of {sends} sends and {receives} "
                f"receives: {_why(code)}; are BYTEPS_RDMA_RX_DEPTH and BYTEPS_RDMA_START_DEPTH "
                "too large for this adapter?"
            )
        return made

    cdef close(self):
        if self.channel != NULL and self.pid == getpid():
            ibv_destroy_comp_channel(self.channel)
        if self.pd != NULL and self.pid == getpid():
            ibv_dealloc_pd(self.pd)
        if self.context != NULL and self.pid == getpid():
            ibv_close_device(self.context)
        self.channel, self.pd, self.context = NULL, NULL, NULL

    def __dealloc__(self):
        self.close()


def explain_refusal(code: int) -> str:
    """Explain from an errno why memory was not registered."""
    return f"{_why(code)}. {_limit()}"


def _limit():
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return (
            "This process may lock any amount of memory (ulimit -l is unlimited), so the adapter "
            "or the machine has no more: lower BPSX_RDMA_INBOX_MB"
        )
    return (
        f"This process may lock {soft >> 10} KiB of memory (ulimit -l): raise that limit (in "
        "Docker --ulimit memlock=-1, with systemd LimitMEMLOCK=infinity), or lower "
        "BPSX_RDMA_INBOX_MB, BYTEPS_PARTITION_BYTES (an inbox holds 8) or BYTEPS_RDMA_RX_DEPTH"
    )
