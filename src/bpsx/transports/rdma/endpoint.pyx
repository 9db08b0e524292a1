# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""RDMA transport: reliable connections of an InfiniBand or RoCE adapter.

The thread that drives the endpoint posts and polls; the transport has no thread of its own.

A message is one RDMA WRITE with immediate into memory that the receiver has registered, and is read
where it was written. Head and body are adjacent there; the immediate is their position. Short
messages are sent inline in the work request. ``connection.pxd`` explains the flow control.

A connection begins over TCP, with the greeting that ``listener.py`` checks. Then both ends exchange
the descriptions of their queue pairs and inboxes. The TCP connection stays open, because it reports
the death of the other process.
"""
import logging
import struct
import time

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport getpid

from bpsx.system.sync cimport atomic_store, lock, monitor_init, unlock
from bpsx.transports.rdma.ended cimport (
    end, free_all, free_connection, free_inbox, rdma_drop, take_new,
)
from bpsx.transports.rdma.receive cimport (
    expect_one, rdma_receive, rdma_release, rdma_wait, rdma_wake,
)
from bpsx.transports.sockets.epoll cimport EPOLL_CTL_ADD, EPOLLIN, epoll_set
from bpsx.transports.sockets.endpoint cimport ListeningEndpoint
from bpsx.transports.rdma.adapter cimport Adapter, Memory, Pair
from bpsx.transports.sockets.peers cimport add_loss, forget_peers
from bpsx.transports.rdma.connection cimport SMALL, TOKENS, Connection, EndpointState, wake_up
from bpsx.transports.rdma.memory_region cimport forget_registered
from bpsx.transports.rdma.allocator cimport units_free, units_init
from bpsx.transports.rdma.verbs cimport ibv_wc_status_str
from bpsx.transports.rdma.send cimport rdma_lend, rdma_send

from bpsx.errors import TransportError
from bpsx.transports.base import ALONE
from bpsx.transports.sockets import listener
from bpsx.transports.rdma import gid as gids
from bpsx.system.address import own_address_towards
from bpsx.transports.rdma.adapter import PAIR, explain_refusal

log = logging.getLogger("bpsx.connections")
# Magic; the inbox's address, bytes and rkey; number of receive requests. The queue pair follows.
_OFFER = struct.Struct("<8sQQII")
_MAGIC = b"bpsxrdm1"
# Seconds that a lane, busy with other workers, may take to reply to an offer. Seconds that posted
# messages may take to arrive when an endpoint is closed.
_ANSWER_SECONDS, _LAST_SECONDS = 60.0, 0.1

cdef enum:
    OUTBOX = 32 << 20
    LEAST_INBOX = 1 << 20
    MOST_INBOX_MIB = 1 << 16


@cython.no_gc_clear
cdef class _Link:
    """A connection in the making, and the adapter's resources that it holds."""
    cdef Pair pair
    cdef Memory inbox           # followed by the memory of the receive requests
    cdef Connection *c

    cdef Connection *give(self) noexcept:
        """Return the connection, to which all belongs from now on."""
        cdef Connection *c = self.c
        c.qp, c.cq, c.mr, c.mapped = self.pair.qp, self.pair.cq, self.inbox.mr, self.inbox.n
        self.pair.qp, self.pair.cq, self.inbox.mr, self.inbox.at, self.c = (
            NULL, NULL, NULL, NULL, NULL
        )
        return c

    def __dealloc__(self):
        if self.c != NULL:
            free_connection(self.c)


@cython.no_gc_clear
cdef class RdmaEndpoint(ListeningEndpoint):
    """Endpoint with one reliable RDMA connection per peer.

    See :mod:`bpsx.transports.base` for the interface.

    ``depth``: receive requests of each connection. ``sends``: length of each connection's send
    queue, in work requests. ``inbox``: bytes that each peer may have written and this end has not
    released. ``device``, ``gid_index``: see :func:`bpsx.transports.rdma.gid.choose`. Raises
    :class:`~bpsx.errors.TransportError` if the machine has no adapter.

    Not thread-safe, except :meth:`wake`, :meth:`lost`, and :meth:`close` after the driving thread
    has stopped.
    """
    cdef EndpointState state
    cdef long pid
    cdef str device
    cdef object gid_index
    cdef uint32_t depth, sends
    cdef uint64_t inbox
    cdef Adapter adapter
    cdef Memory outbox

    def __cinit__(
        self, *, double heartbeat_interval, double heartbeat_timeout, bytes secret=b"",
        bint encrypt=False, int64_t most_bytes=-1, uint32_t depth=512, uint32_t sends=128,
        uint64_t inbox=64 << 20, str device="", object gid_index=None
    ):
        """Create an endpoint that neither listens nor is connected.

        ``depth``: receive requests of each connection.
        ``sends``: length of each connection's send queue, in work requests.
        ``inbox``: bytes that each peer may have written and this end has not released.
        ``device``, ``gid_index``: see :func:`bpsx.transports.rdma.gid.choose`.
        The other arguments are :class:`~bpsx.transports.tcp.endpoint.TcpEndpoint`'s.

        Raises :class:`~bpsx.errors.TransportError`, also if the machine has no adapter.
        """
        self.pid, self.secret = getpid(), secret
        self.interval, self.timeout, self.device, self.gid_index = (
            heartbeat_interval, heartbeat_timeout, device, gid_index
        )
        self.depth, self.sends, self.inbox = depth, sends, max(inbox, <uint64_t>LEAST_INBOX)
        self._set_up(
            &self.state.epoll, &self.state.wake_fd, &self.state.losses, &self.state.malformed,
            &self.state.monitor, encrypt
        )
        gids.ports()            # raises at once if there is no adapter
        self.state.most_bytes = <uint64_t>most_bytes        # -1: any
        self.table.self = &self.state
        self.table.send, self.table.recv, self.table.release = rdma_send, rdma_receive, rdma_release
        self.table.wait, self.table.wake, self.table.lend = rdma_wait, rdma_wake, rdma_lend
        # Once half of an inbox is in use, its reader copies what it keeps (Prefix.tight).
        self.table.drop, self.table.keeps = rdma_drop, True

    cdef _use_adapter(self, str host):
        """Open the adapter for this machine's address ``host``, unless one is open."""
        cdef Adapter opened
        if self.adapter is not None:
            return
        port, gid = gids.choose(host, self.device, self.gid_index)
        opened = Adapter(port.adapter, port.number, gid.index, gid.value, port.ethernet)
        log.info("RDMA: %s, GID %d (%s, %s)", port.name, gid.index, gid.address, gid.kind)
        self.outbox = opened.new_memory(OUTBOX, False)
        self.state.outbox, self.state.outbox_lkey = self.outbox.at, self.outbox.mr.lkey
        self.state.channel = opened.channel
        if opened.forks:
            self.state.memory.pd = opened.pd
        else:
            log.info(
                "%s: fork support was enabled too late for this old kernel, so messages from "
                "memory that keeps its address are copied", port.name
            )
        self.state.most_written = min(opened.most_bytes, <uint64_t>1 << 31)
        if self.state.outbox_units.taken == NULL and not units_init(
            &self.state.outbox_units, OUTBOX
        ):
            raise MemoryError("no memory for the table of the outbox")
        if epoll_set(self.state.epoll, EPOLL_CTL_ADD, opened.channel.fd, EPOLLIN, &self.state) != 0:
            raise OSError("epoll: cannot watch the adapter's completions")
        self.adapter = opened

    def bind(self, host: str, ports=()) -> str:
        """Listen on ``host`` at the first free port of ``ports``, or at any free port if empty.

        Returns and stores ``host:port``.
        """
        self._use_adapter(host)
        return ListeningEndpoint.bind(self, host, ports)

    def connect(self, peer: int, address: str, undriven=ALONE) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``.

        The data plane takes the connection over by a lock, so it may be driven all the time, except
        while the first connection opens the adapter.
        """
        cdef _Link link
        made = None
        host, _, port = address.rpartition(":")
        try:
            own = own_address_towards(host, int(port))
            if self.adapter is None:
                with undriven:
                    self._use_adapter(own)
            link = self._new_link(peer)
            # Send the offer right behind the greeting, so that the lane need not wait for it.
            offer = self._offer(link)
            made = listener.dial(address, self.secret, self.job, self.number, more=offer)
            self._accept(link, _hear(made, _ANSWER_SECONDS))
        except (TransportError, MemoryError):
            if made is not None:
                made.close()
            raise
        # The lane existed before, so the thread that watches for losses knows which lane it was
        # and that it has died.
        except OSError as e:
            log.warning("cannot connect to %s: %s", address, e)
            if made is not None:
                made.close()
            else:
                listener.require_presence(address, e)
            add_loss(&self.state.losses, peer)
            return
        self._use(link, made)

    def _take(self, made, rank: int) -> None:
        """Run a lane's side of the handshake, on the acceptor's thread."""
        cdef _Link link
        try:
            offer = _hear(made, listener.PATIENCE)
            link = self._new_link(rank)
            self._accept(link, offer)
            made.sendall(self._offer(link))
        except (OSError, MemoryError) as e:     # TransportError is an OSError
            log.warning("no RDMA connection with worker %d: %s", rank, e)
            made.close()
            add_loss(&self.state.losses, rank)
            return
        self._use(link, made)

    cdef _Link _new_link(self, uint32_t peer):
        cdef _Link link = _Link.__new__(_Link)
        cdef Connection *c
        link.inbox = self.adapter.new_memory(self.inbox + self.depth * SMALL, True)
        link.pair = self.adapter.new_pair(self.sends, self.depth)
        c = <Connection *>calloc(1, sizeof(Connection))
        if c == NULL or monitor_init(&c.tokens.monitor) != 0:
            free(c)
            raise MemoryError("no memory for a connection")
        link.c, c.fd = c, -1
        c.outbound.lent = <uint8_t *>calloc(self.state.outbox_units.n, 1)
        if c.outbound.lent == NULL:
            raise MemoryError("no memory for a connection")
        c.state, c.peer, c.qp, c.cq, c.tokens.open = (
            &self.state, peer, link.pair.qp, link.pair.cq, True
        )
        c.inbound.inbox, c.inbound.inbox_bytes, c.inbound.small = (
            link.inbox.at, self.inbox, link.inbox.at + self.inbox
        )
        c.inbound.small_lkey, c.inbound.depth, c.outbound.send_room, c.outbound.most_inline = (
            link.inbox.mr.lkey, self.depth, self.sends, link.pair.most_inline
        )
        c.outbound.n_unused = TOKENS
        for i in range(TOKENS):
            c.outbound.unused[i] = <int>i
        return link

    cdef bytes _offer(self, _Link link):
        return _OFFER.pack(
            _MAGIC, <uint64_t>link.inbox.at, self.inbox, link.inbox.mr.rkey, self.depth
        ) + link.pair.describe()

    cdef _accept(self, _Link link, bytes offer):
        cdef Connection *c = link.c
        cdef uint64_t nbytes
        cdef uint32_t i
        magic, remote, nbytes, rkey, depth = _OFFER.unpack_from(offer)
        c.outbound.remote, c.outbound.rkey, c.outbound.remote_depth = remote, rkey, depth
        if (
            magic != _MAGIC
            or not LEAST_INBOX <= nbytes
            or nbytes >> 20 > MOST_INBOX_MIB
            or not 16 <= c.outbound.remote_depth <= 1 << 20
        ):
            raise TransportError(
                "the peer uses another protocol, or another version of it"
            )
        if not units_init(&c.outbound.inbox_units, nbytes):
            raise MemoryError("no memory for the table of an inbox")
        c.outbound.credits = c.outbound.remote_depth
        link.pair.meet(offer[_OFFER.size:])
        for i in range(self.depth):
            if not expect_one(c, i):
                raise TransportError(
                    f"{self.adapter.name}: the adapter rejected receive request {i} of "
                    f"{self.depth}: lower BYTEPS_RDMA_RX_DEPTH"
                )

    cdef _use(self, _Link link, object made):
        """Hand a connection to the data plane. Any thread may call it."""
        cdef Connection *c
        listener.prepare(made, self.interval, self.timeout)
        c = link.give()
        c.fd = made.detach()
        lock(&self.state.monitor)
        c.next, self.state.new = self.state.new, c
        atomic_store(&self.state.n_new, 1)
        unlock(&self.state.monitor)
        wake_up(&self.state)

    def lost(self) -> list:
        """Return the peers whose connection broke since the last call. Any thread may call it."""
        found = ListeningEndpoint.lost(self)
        for peer, why in self._reasons():
            if peer in found:
                log.warning(
                    "the RDMA connection with peer %d broke: %s", peer,
                    ibv_wc_status_str(why).decode()
                )
        if self.state.memory.why:
            log.warning(
                "%s: cannot register %d KiB of memory that keeps its address, so messages from "
                "there are copied: %s", self.adapter.name, self.state.memory.refused >> 10,
                explain_refusal(self.state.memory.why)
            )
            self.state.memory.why = 0
        return found

    cdef list _reasons(self):
        """Peers whose connection the adapter has ended, with the status."""
        cdef Connection *c
        found = []
        lock(&self.state.monitor)       # the driving thread frees connections
        c = self.state.all
        while c != NULL:
            if c.why:
                found.append((c.peer, c.why))
            c = c.next
        unlock(&self.state.monitor)
        return found

    @property
    def copied(self) -> int:
        """Bytes of bodies that this end copied into or out of registered memory.

        Bodies of less than 256 bytes do not count.
        """
        return self.state.copied

    def close(self) -> None:
        """Drop unsent messages, run every outstanding done callback, free all. Idempotent.

        Posted messages first get a moment (`_LAST_SECONDS`) to arrive.
        """
        cdef Connection *c
        if self.closed:
            return
        self.closed = True
        if self.acceptor is not None:
            self.acceptor.close()
        if self.pid != getpid():        # a forked child has only the descriptors
            return
        take_new(&self.state)
        until = time.monotonic() + _LAST_SECONDS
        while not self._all_arrived() and time.monotonic() < until:
            rdma_wait(&self.state, 1)
        while self.state.all != NULL:
            end(&self.state, self.state.all)
        # Their memory stays, because messages may be released later.
        c = self.state.ended
        while c != NULL:
            free_inbox(c)
            c = c.next
        forget_registered(&self.state.memory, True)
        if self.outbox is not None:
            self.outbox.close()
        if self.adapter is not None:
            self.adapter.close()
        forget_peers(&self.state.peers)

    cdef bint _all_arrived(self):
        cdef Connection *c = self.state.all
        while c != NULL:
            if (
                not c.dead
                and not c.ends
                and c.outbound.first == NULL
                and c.outbound.send_room < self.sends
            ):
                return False
            c = c.next
        return True

    def __dealloc__(self):
        cdef bint ours = self.pid == getpid()
        free_all(&self.state, self.state.new, ours)
        free_all(&self.state, self.state.all, ours)
        free_all(&self.state, self.state.ended, ours)
        units_free(&self.state.outbox_units)
        forget_registered(&self.state.memory, ours)


def _hear(made, double seconds) -> bytes:
    """Receive the other end's offer. Raises OSError, also if it is late."""
    offer, until = b"", time.monotonic() + seconds
    while len(offer) < _OFFER.size + PAIR.size:
        made.settimeout(max(0.001, until - time.monotonic()))
        got = made.recv(_OFFER.size + PAIR.size - len(offer))
        if not got:
            raise ConnectionError("the peer closed the connection: its own log says why")
        offer += got
    return offer
