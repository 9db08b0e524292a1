"""Transports by name.

A new one is a module with an endpoint class (see ``base.py``), a line in the table, and the
conformance suite.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bpsx.config import TRANSPORT_NAMES, Config, frame_bound
from bpsx.errors import TransportError
from bpsx.transports.base import Endpoint

#: name -> module and class; imported when first used, since a transport may need a library that is
#: not there.
_TABLE: dict[str, tuple[str, str]] = {
    "zeromq": ("bpsx.transports.zeromq.endpoint", "ZeroMQEndpoint"),
    "tcp": ("bpsx.transports.tcp.endpoint", "TcpEndpoint"),
    "rdma": ("bpsx.transports.rdma.endpoint", "RdmaEndpoint"),
}

#: Workers with which a lane shares memory: each has address space there.
_MOST_NEIGHBOURS = 64


def _import(module: str) -> Any:
    """A transport's module.

    Raises :class:`~bpsx.errors.TransportError` where what it needs is missing, and says what to
    install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module:
            raise
        raise TransportError(
            "bpsx was built without RDMA, since the headers of libibverbs were missing: install"
            " libibverbs-dev (Debian, Ubuntu) or rdma-core-devel, and bpsx again; or"
            " DMLC_ENABLE_RDMA=0 or tcp"
        ) from e
    except ImportError as e:
        raise TransportError(
            f"{module} cannot be loaded: {e}. RDMA needs libibverbs and the adapter's provider:"
            " install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or rdma-core"
        ) from e


def _own_options(name: str, config: Config) -> dict[str, Any]:
    """What a transport takes besides what all do."""
    if name == "rdma":
        # A worker reads what comes at once; a lane sums in what has come.
        inbox = config.rdma_inbox << 20 if config.role == "server" else config.rdma_inbox << 18
        return {
            "depth": config.rdma_rx_depth,
            "sends": config.rdma_start_depth,
            "inbox": max(inbox, 8 * config.partition_bytes),
            "device": config.rdma_device,
            "gid_index": config.rdma_gid_index,
        }
    return {
        "io_threads": config.zmq_threads,
        "send_buffer": None if config.send_buffer is None else config.send_buffer << 10,
    }


def open_endpoint(config: Config) -> Endpoint:
    """A new endpoint of the transport that ``config`` names, with shared memory beside it if
    ``config`` says so.

    Raises :class:`~bpsx.errors.TransportError` listing what there is.
    """
    name = TRANSPORT_NAMES[config.transport]
    if name not in _TABLE:
        raise TransportError(
            f"no transport is called {name!r}; there are: {', '.join(sorted(_TABLE))}"
        )
    module, cls = _TABLE[name]
    endpoint: Endpoint = getattr(_import(module), cls)(
        heartbeat_interval=config.heartbeat_interval,
        heartbeat_timeout=config.heartbeat_timeout,
        secret=config.secret_bytes,
        encrypt=bool(config.encrypt),
        most_bytes=frame_bound(config),
        **_own_options(name, config),
    )
    if config.ipc:
        endpoint = import_module("bpsx.transports.shm.endpoint").SharedEndpoint(
            endpoint,
            secret=config.secret_bytes,
            most_bytes=frame_bound(config),
            slots=min(_MOST_NEIGHBOURS, config.num_worker * config.local_size),
        )
    return endpoint
