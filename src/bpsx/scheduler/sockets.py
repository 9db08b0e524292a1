"""The control link's sockets: bounded, probed with heartbeats, and encrypted with CURVE.

Both ends use the same settings. The scheduler's key pair is derived from the job secret. Its public
key never travels, so a node that can begin a handshake knows the secret, and a scheduler that can
answer it does, too; no other authentication is needed. A node's own key pair is random.
"""

from __future__ import annotations

import socket
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from bpsx import secret
from bpsx.config import Config
from bpsx.errors import TransportError
from bpsx.scheduler.messages import MAX_BYTES, MAX_BYTES_TO_HUB
from bpsx.system.address import is_ipv6, tcp_url
from bpsx.system.host import scheduler_address

Socket = Any
#: Time limit for a connection's handshake, in milliseconds. Long enough for a node on a busy
#: machine, short for a peer that only holds the connection open.
HANDSHAKE_MS = 10_000
#: Length of the kernel's queue of connections not accepted yet. Some kernels impose a lower limit.
BACKLOG = 4096
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: Number of handshakes that must fail in a row before the scheduler counts as refusing this node.
REFUSALS = 3
_PURPOSE = "control link: scheduler's key"
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"  # first bytes that every ZeroMQ peer sends


def open_socket(context: zmq.Context[Any], kind: int, config: Config) -> Socket:
    """Open a socket that bounds message sizes, never drops a message, and sends heartbeats.

    ``kind``: ROUTER for the scheduler's end. ``config`` sets the heartbeats and the secret.

    Raises :class:`~bpsx.errors.TransportError` if this ZeroMQ was built without CURVE,
    :class:`~bpsx.errors.ConfigError` for a wrong secret.
    """
    if not zmq.has("curve"):
        raise TransportError(
            "pyzmq uses a ZeroMQ library that was built without CURVE, which bpsx needs: install"
            " pyzmq from a wheel, whose library has it"
        )
    key = secret.curve_key(config.secret_bytes, _PURPOSE)
    opened = context.socket(kind)
    opened.setsockopt(zmq.LINGER, 500)
    opened.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES_TO_HUB if kind == zmq.ROUTER else MAX_BYTES)
    opened.setsockopt(zmq.SNDHWM, 0)
    opened.setsockopt(zmq.RCVHWM, 0)
    if config.heartbeat_interval > 0:
        opened.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(config.heartbeat_interval * 1000)))
        opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(config.heartbeat_timeout * 1000)))
        # Heartbeats queue behind data that the kernel cannot deliver, so data that stays
        # unacknowledged must end the connection, too.
        opened.setsockopt(zmq.TCP_MAXRT, max(1, int(config.heartbeat_timeout * 1000)))
    if kind == zmq.ROUTER:
        opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        opened.setsockopt(zmq.BACKLOG, BACKLOG)
        opened.setsockopt(zmq.CURVE_SERVER, 1)
        opened.setsockopt(zmq.CURVE_SECRETKEY, key)
    else:
        public, own = zmq.curve_keypair()
        opened.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(key))
        opened.setsockopt(zmq.CURVE_PUBLICKEY, public)
        opened.setsockopt(zmq.CURVE_SECRETKEY, own)
    return opened


def speaks_zeromq(host: str, port: int, timeout: float = 2.0) -> bool:
    """Whether a ZeroMQ socket listens at ``host``:``port``.

    If so, a failed handshake was refused, and not broken off by a proxy without a scheduler behind
    it.
    """
    try:
        with socket.socket(
            socket.AF_INET6 if is_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM
        ) as s:
            s.settimeout(timeout)
            s.connect((host.strip("[]"), port))
            found = b""
            while len(found) < len(_SIGNATURE) and (more := s.recv(len(_SIGNATURE) - len(found))):
                found += more
            return found == _SIGNATURE
    except OSError:
        return False


def accepts_us(config: Config, timeout: float = 2.0) -> bool:
    """Whether a scheduler that knows our job secret is at ``config``'s address.

    Sends no message, so the scheduler does not count this process. Raises as :func:`open_socket`,
    and :class:`~bpsx.errors.RendezvousError` if the scheduler's name cannot be resolved.
    """
    address = scheduler_address(config)
    context = zmq.Context(1)
    try:
        link = open_socket(context, zmq.DEALER, config)
        link.setsockopt(zmq.IPV6, int(is_ipv6(address)))
        monitor = link.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | REFUSED
        )
        link.connect(tcp_url(address, config.root_port))
        if not monitor.poll(int(timeout * 1000)):
            return False
        return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
    finally:
        context.destroy(0)


def no_secret_in_common(config: Config) -> str:
    """Text, to follow the scheduler's name, for a scheduler that breaks off our handshakes."""
    given = "ours comes from " + ("BPSX_SECRET" if config.secret else "BPSX_SECRET_FILE")
    ours = given if config.secret_bytes else "we have none: set BPSX_SECRET or BPSX_SECRET_FILE"
    return (
        f"does not share our job secret ({ours}), or it is not a scheduler of this version of bpsx"
    )
