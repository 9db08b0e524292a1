# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""TCP transport through ZeroMQ: one ROUTER socket per endpoint, used without the GIL.

pyzmq creates, configures and closes the socket. In between, the data path calls the same libzmq
that pyzmq loaded, through function pointers, so no system ZeroMQ is needed. Sends pass the caller's
memory to libzmq (``zmq_msg_init_data``); receives pass libzmq's memory to the caller.

Both sides use ROUTER. A lane binds; a worker connects, and gives each lane a routing id of its own
(``ZMQ_CONNECT_ROUTING_ID``). A routing id is a tag byte, a 32-bit index (a worker's rank, or the
worker's index of a lane) and the 64-bit job id. Before its first message a connection shows a token
(``auth.py``); an encrypted one needs keys derived from the job secret to begin at all.
"""
import ctypes

import zmq
import zmq.backend.cython._zmq as _zmq_module
from zmq.utils.monitor import parse_monitor_message

from cpython.pycapsule cimport PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport strdup
from posix.unistd cimport close as close_descriptor

from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport atomic_load, atomic_store
# cython-lint does not see types in casts.
from bpsx.transports.abi cimport Endpoint, done_fn  # no-cython-lint
from bpsx.transports.zeromq.connection cimport (
    ID_BYTES, Connection, EndpointState, Visitor, is_dropped, put_id,
)
from bpsx.transports.zeromq.libzmq cimport LibZmq, zmq_msg_t, zmq_pollitem_t  # no-cython-lint
from bpsx.transports.zeromq.receive cimport zmq_drop, zmq_receive, zmq_release, zmq_wait, zmq_wake
from bpsx.transports.zeromq.send cimport zmq_send

from bpsx import secret as secrets
from bpsx.config import MOST_WORKERS
from bpsx.errors import TransportError
from bpsx.transports import refusals
from bpsx.transports.base import ALONE, UNKNOWN_TRIP, pass_number
from bpsx.transports.zeromq import auth
from bpsx.system.address import is_ipv6, join_host_port, resolve, send_buffer_bytes, tcp_url
from bpsx.transports.ports import bind_one

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initval, int flags)
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK

NEVER_MS = 10**9
BACKLOG = 4096
KEY_PURPOSE = "data connection: lanes' key"

cdef LibZmq lib


def _load() -> None:
    """Resolve libzmq's functions in the library that pyzmq uses."""
    # dlsym on the handle of pyzmq's extension also searches the libraries that it links to, bundled
    # or not.
    library = ctypes.CDLL(_zmq_module.__file__)
    def address(name: str) -> int:
        return ctypes.cast(getattr(library, "zmq_" + name), ctypes.c_void_p).value
    lib.msg_init = <int (*)(zmq_msg_t *) noexcept nogil><uintptr_t>address("msg_init")
    lib.msg_init_size = <int (*)(zmq_msg_t *, size_t) noexcept nogil><uintptr_t>address(
        "msg_init_size"
    )
    lib.msg_init_data = <int (*)(
        zmq_msg_t *, void *, size_t, done_fn, void *
    ) noexcept nogil><uintptr_t>address("msg_init_data")
    lib.msg_send = <int (*)(zmq_msg_t *, void *, int) noexcept nogil><uintptr_t>address("msg_send")
    lib.msg_recv = <int (*)(zmq_msg_t *, void *, int) noexcept nogil><uintptr_t>address("msg_recv")
    lib.msg_close = <int (*)(zmq_msg_t *) noexcept nogil><uintptr_t>address("msg_close")
    lib.msg_more = <int (*)(const zmq_msg_t *) noexcept nogil><uintptr_t>address("msg_more")
    lib.msg_get = <int (*)(const zmq_msg_t *, int) noexcept nogil><uintptr_t>address("msg_get")
    lib.msg_data = <void *(*)(zmq_msg_t *) noexcept nogil><uintptr_t>address("msg_data")
    lib.msg_size = <size_t (*)(const zmq_msg_t *) noexcept nogil><uintptr_t>address("msg_size")
    lib.poll = <int (*)(zmq_pollitem_t *, int, long) noexcept nogil><uintptr_t>address("poll")
    lib.disconnect = <int (*)(void *, const char *) noexcept nogil><uintptr_t>address("disconnect")
    lib.err = <int (*)() noexcept nogil><uintptr_t>address("errno")


_load()


cdef class ZeroMQEndpoint:
    """Endpoint with one ROUTER socket for all its peers.

    See :mod:`bpsx.transports.base` for the interface. Not thread-safe, except :meth:`close` after
    the driving thread has stopped.
    """
    cdef EndpointState state
    cdef Endpoint table
    cdef object context, socket, monitor_socket, acceptor
    cdef bytes secret
    cdef object send_buffer
    cdef uint32_t number        # that this worker shows to lanes
    cdef bint encrypt, joined
    cdef readonly str address       # empty before bind()
    # The latest peer at each address, and the one to which the latest connection was made: a lane
    # may have the address of one that was dropped.
    cdef dict peers, connected
    cdef bint closed

    def __cinit__(
        self, *, int io_threads, object send_buffer, double heartbeat_interval,
        double heartbeat_timeout, bytes secret=b"", bint encrypt=False, int64_t most_bytes=-1
    ):
        """Create an endpoint that neither listens nor is connected.

        ``io_threads``: number of ZeroMQ's I/O threads.
        ``send_buffer``: bytes of each connection's send buffer; 0: the system tunes it; None: a
        size for loopback or for a network, by the peer's address.
        ``heartbeat_interval``, ``heartbeat_timeout``: seconds; interval 0 means no heartbeat.
        ``secret``, ``encrypt``: the job secret and the choice of encryption, the same on both ends.
        ``most_bytes``: largest frame accepted, in bytes; -1: no bound.
        """
        self.state.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.state.wake_fd < 0:
            raise OSError("eventfd: cannot create a wake-up descriptor (too many open files?)")
        self.address = ""
        self.secret = secret
        self.send_buffer = send_buffer
        self.encrypt = encrypt
        self.peers, self.connected = {}, {}
        self.context = zmq.Context(io_threads)
        socket = self.context.socket(zmq.ROUTER)
        self.socket = socket
        # The core's credit bounds the bytes in flight. A high-water mark must not: ROUTER drops
        # messages there.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A reconnect would silently lose the messages in flight. A broken connection is an error
        # instead, see `lost`. Not -1, which means the same: libzmq 4.3.5 then tears the pipe down
        # between two frames of a message and aborts the process.
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        if heartbeat_interval > 0:
            socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_interval * 1000)))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(heartbeat_timeout * 1000)))
            # Heartbeats queue behind data that the kernel cannot deliver, so unacknowledged data
            # must end the connection too.
            socket.setsockopt(zmq.TCP_MAXRT, max(1, int(heartbeat_timeout * 1000)))
        self.state.lib = &lib
        self.state.socket = <void *><uintptr_t>socket.underlying
        self.table.self = &self.state
        self.table.send = zmq_send
        self.table.recv = zmq_receive
        self.table.release = zmq_release
        self.table.wait = zmq_wait
        self.table.wake = zmq_wake
        self.table.drop, self.table.keeps = zmq_drop, True

    def bind(self, host: str, ports=()) -> str:
        """Listen on ``host`` at the first free port of ``ports``, or at any free port if empty.

        Returns and stores ``host:port``.
        """
        self.socket.setsockopt(zmq.IPV6, int(is_ipv6(host)))
        self._size_buffers(host)
        self._guard()
        try:
            bind_one(ports, lambda port: self.socket.bind(tcp_url(host, port or "*")))
        except zmq.ZMQError as e:
            raise TransportError(
                f"cannot listen on {host}: {e}; set another address with DMLC_NODE_HOST"
            ) from e
        port = self.socket.getsockopt(zmq.LAST_ENDPOINT).rsplit(b":", 1)[1].strip(b"\0")
        self.address = join_host_port(host, int(port))
        self.state.visitors = <Visitor *>calloc(MOST_WORKERS + 1, sizeof(Visitor))
        if self.state.visitors == NULL:
            raise MemoryError("no memory for the connections of workers")
        self.state.n_visitors = MOST_WORKERS + 1
        self._open()
        return self.address

    def _size_buffers(self, str host):
        """Set the send buffer of the connections made next; ``host`` is one end of them."""
        self.socket.setsockopt(zmq.SNDBUF, send_buffer_bytes(host, self.send_buffer) or -1)

    def _guard(self):
        """Configure the socket to accept only peers that know the secret.

        Call it before :meth:`bind` creates the listener, which copies the options.
        """
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, refusals.HANDSHAKE_MS)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, b"bpsx")
        self.acceptor = auth.Acceptor(self.context, self.secret)
        if self.encrypt:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secrets.curve_key(self.secret, KEY_PURPOSE))
        else:
            self.socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def _open(self):
        """Accept workers, once the address and the job's number are known."""
        if self.acceptor is not None and self.joined and self.address:
            self.acceptor.open(self.state.job, self.address)

    def _show(self, str address):
        """Set the credentials for the connection to the lane at ``address``, before it is made."""
        if not self.encrypt:
            self.socket.setsockopt(zmq.PLAIN_USERNAME, str(self.number).encode())
            self.socket.setsockopt(
                zmq.PLAIN_PASSWORD, auth.token(self.secret, self.state.job, address, self.number)
            )
            return
        public, own = zmq.curve_keypair()
        self.socket.setsockopt(
            zmq.CURVE_SERVERKEY, zmq.curve_public(secrets.curve_key(self.secret, KEY_PURPOSE))
        )
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, own)

    def join(self, uint64_t job, int rank, int visit=0) -> None:
        """Set the job's number and the rank under which lanes know this endpoint.

        ``visit``: see :meth:`bpsx.transports.base.Endpoint.join`. Call it before :meth:`connect`
        and before the first message. After it, a lane that is bound accepts workers.
        """
        cdef char routing_id[ID_BYTES]
        self.state.job = job
        self.number = pass_number(rank, visit)
        put_id(&self.state, routing_id, self.number)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id[:ID_BYTES])
        self.joined = True
        self._open()

    def connect(self, peer: int, address: str, undriven=ALONE) -> None:
        """Connect to the lane at ``host:port``, which becomes peer ``peer``."""
        host, _, port = address.rpartition(":")
        try:
            # Numeric, because libzmq reports a broken connection either under the name it was given
            # or under the address it resolved.
            numeric = resolve(host, int(port))
            with undriven:
                self._connect(peer, address, numeric, tcp_url(numeric, port))
        except (OSError, zmq.ZMQError) as e:
            raise TransportError(f"cannot connect to {address}: {e}") from e

    def _connect(self, uint32_t peer, str address, str numeric, str url):
        cdef char routing_id[ID_BYTES]
        cdef Connection *made
        if not make_room(
            &self.state.connections, &self.state.n_connections, peer + 1, sizeof(Connection)
        ):
            raise MemoryError("no memory for a connection")
        made = &self.state.connections[peer]
        free(made.url)
        made.url = strdup(url.encode())
        if made.url == NULL:
            raise MemoryError("no memory for an address")
        put_id(&self.state, routing_id, peer)
        self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, routing_id[:ID_BYTES])
        self.socket.setsockopt(zmq.IPV6, int(is_ipv6(numeric)))
        self._size_buffers(numeric)
        self._show(address)
        named = url.removeprefix("tcp://")
        self.peers[named] = peer
        self.connected.setdefault(named, peer)
        self.socket.connect(url)

    def round_trip(self, peer: int) -> float:
        """Return a guess: ZeroMQ does not show its connections before data flow."""
        return UNKNOWN_TRIP

    def fit_buffers(self, rate: float) -> None:
        """Do nothing: ZeroMQ sizes a connection's buffers when it makes the connection."""

    def watch(self) -> int:
        """Start to watch the connections.

        Returns a descriptor that becomes readable when :meth:`lost` has something to return.
        """
        # With an explicit address: pyzmq leaks some memory each time that it makes one up.
        self.monitor_socket = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED, f"inproc://monitor.{id(self)}"
        )
        # The descriptor only signals events that come after an attempt to read.
        self.monitor_socket.getsockopt(zmq.EVENTS)
        return self.monitor_socket.getsockopt(zmq.FD)

    def lost(self) -> list:
        """Return the peers whose connection broke since the last call; -1 for an unknown peer.

        Call it on the thread that called :meth:`watch`.
        """
        cdef uint32_t peer
        found = []
        while self.monitor_socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = parse_monitor_message(self.monitor_socket.recv_multipart(zmq.DONTWAIT))
            if self.address:
                found.append(self._worker_at(event["value"]))
                continue
            named = event["endpoint"].decode("utf-8", "replace").removeprefix("tcp://")
            if event["event"] == zmq.EVENT_CONNECTED:
                self.connected[named] = self.peers.get(named, -1)
                continue
            peer = <uint32_t>self.connected.get(named, -1)
            if not is_dropped(&self.state, peer):
                found.append(<int>peer)
        return found

    def _worker_at(self, int64_t descriptor):
        """Return the rank of the worker whose messages came on ``descriptor``, now closed.

        -1 if no worker has sent a message on it.
        """
        cdef uint32_t rank
        for rank in range(self.state.n_visitors):
            if atomic_load(&self.state.visitors[rank].descriptor) == descriptor + 1:
                atomic_store(&self.state.visitors[rank].descriptor, -1)
                return rank
        return -1

    @property
    def wake_descriptor(self) -> int:
        """The eventfd that :meth:`wake` writes to."""
        return self.state.wake_fd

    @property
    def refused(self) -> int:
        """Number of connections refused because the peer did not know the job secret."""
        return 0 if self.acceptor is None else self.acceptor.refused

    @property
    def malformed(self) -> int:
        """Number of messages dropped because of malformed frames."""
        return atomic_load(&self.state.malformed)

    def abi(self):
        """Return the data plane: a capsule with the C :c:struct:`Endpoint`.

        The capsule is valid as long as this object.
        """
        return PyCapsule_New(&self.table, b"bpsx.Endpoint", NULL)

    def wake(self) -> None:
        """End a wait of the data plane. Any thread may call it."""
        zmq_wake(&self.state)

    def close(self) -> None:
        """Drop unsent messages, run every outstanding done callback, free all. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.acceptor is not None:
            self.acceptor.close()
        if self.monitor_socket is not None:
            self.socket.disable_monitor()
            self.monitor_socket.close(0)
        if self.state.has_aside:
            self.state.has_aside = False
            zmq_release(&self.state, &self.state.aside)
        self.socket.close(0)
        self.context.term()

    def __dealloc__(self):
        cdef uint32_t i
        # Close the descriptor last: a done callback that runs while the context ends may still
        # write to it. Not with os.close: at the interpreter's end this module's globals may be gone
        # already.
        if self.state.wake_fd >= 0:
            close_descriptor(self.state.wake_fd)
        free(self.state.visitors)
        free(self.state.retired)
        for i in range(self.state.n_connections):
            free(self.state.connections[i].url)
        free(self.state.connections)
