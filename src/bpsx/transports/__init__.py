"""Transports by name. A new one is a module with an endpoint class (see ``base.py``), a line in the table, and the conformance suite."""

from __future__ import annotations

from importlib import import_module

from bpsx.config import TRANSPORT_NAMES, Config, frame_bound
from bpsx.errors import TransportError
from bpsx.transports.base import Endpoint

#: name -> module and class; imported when first used, since a transport may need a library that is not there.
_TABLE: dict[str, tuple[str, str]] = {
    "zeromq": ("bpsx.transports.zeromq", "ZeroMQEndpoint"),
    "tcp": ("bpsx.transports.tcp", "TcpEndpoint"),
}

#: Workers with which a lane shares memory: each has address space there.
_MOST_NEIGHBOURS = 64


def open_endpoint(config: Config) -> Endpoint:
    """A new endpoint of the transport that ``config`` names, with shared memory beside it if ``config`` says so.

    Raises :class:`~bpsx.errors.TransportError` listing what there is."""
    name = TRANSPORT_NAMES[config.transport]
    if name not in _TABLE:
        raise TransportError(f"no transport is called {name!r}; there are: {', '.join(sorted(_TABLE))}")
    module, cls = _TABLE[name]
    endpoint: Endpoint = getattr(import_module(module), cls)(
        io_threads=config.zmq_threads, send_buffer=None if config.send_buffer is None else config.send_buffer << 10,
        heartbeat_interval=config.heartbeat_interval, heartbeat_timeout=config.heartbeat_timeout,
        secret=config.secret_bytes, encrypt=bool(config.encrypt), most_bytes=frame_bound(config),
    )
    if config.ipc:
        endpoint = import_module("bpsx.transports.shared").SharedEndpoint(
            endpoint, secret=config.secret_bytes, most_bytes=frame_bound(config), slots=min(_MOST_NEIGHBOURS, config.num_worker * config.local_size))
    return endpoint
