"""The control link's sockets, alike on both ends: bounded, probed, and encrypted with keys that
come from the job secret.

The scheduler's key pair is derived from the secret (CURVE). Its public key never travels, so
whoever can begin a handshake knows the secret, and a scheduler that can answer it knows the secret,
too: nobody else has to be asked. A node's own keys are made up anew.
"""

from __future__ import annotations

import socket
from typing import Any

import zmq

from bpsx import secret
from bpsx.config import Config
from bpsx.errors import TransportError
from bpsx.scheduler.messages import MAX_BYTES, MAX_BYTES_TO_HUB
from bpsx.system.address import is_ipv6

Socket = Any
#: A connection that has not proven anything after this long is closed. Longer than a node's ways
#: through a busy machine, short for who holds it open.
HANDSHAKE_MS = 10_000
#: How long the kernel's queue of connections may be that we have not accepted yet; it has its own,
#: lower bound on some machines.
BACKLOG = 4096
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: Handshakes that must fail in a row before a scheduler counts as one that refuses us.
REFUSALS = 3
_PURPOSE = "control link: scheduler's key"
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"  # how every ZeroMQ peer begins


def open_socket(context: zmq.Context[Any], kind: int, config: Config) -> Socket:
    """A socket that bounds the size of a message, never drops one, and probes its connections as
    ``config`` says.

    A ROUTER is the scheduler's end.

    Raises :class:`~bpsx.errors.TransportError` if this ZeroMQ was built without CURVE,
    :class:`~bpsx.errors.ConfigError` for a wrong secret.
    """
    if not zmq.has("curve"):
        raise TransportError(
            "the ZeroMQ library that pyzmq uses here was built without CURVE; the wheels of pyzmq"
            " have it"
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
        # Heartbeats queue behind data that the kernel cannot deliver, so what stays unacknowledged
        # ends the connection, too.
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
    """Whether a ZeroMQ socket listens there: then a handshake that fails was refused, and not
    broken off by a proxy without a scheduler behind it.
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


def no_secret_in_common(config: Config) -> str:
    """What to tell people about a scheduler that breaks off our handshakes, after its name."""
    given = "ours comes from " + ("BPSX_SECRET" if config.secret else "BPSX_SECRET_FILE")
    ours = given if config.secret_bytes else "we have none: set BPSX_SECRET or BPSX_SECRET_FILE"
    return f"does not share our job secret ({ours}), or it is no scheduler of this version of bpsx"
