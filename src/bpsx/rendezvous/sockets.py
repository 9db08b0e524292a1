"""The control link's sockets, alike on both ends."""

from __future__ import annotations

from typing import Any

import zmq

from bpsx.config import Config
from bpsx.rendezvous.messages import MAX_BYTES

Socket = Any


def open_socket(context: zmq.Context[Any], kind: int, config: Config) -> Socket:
    """A socket that bounds the size of a message, never drops one, and probes its connections as ``config`` says."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if config.heartbeat_interval > 0:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(config.heartbeat_interval * 1000)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(config.heartbeat_timeout * 1000)))
    return socket
