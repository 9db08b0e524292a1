"""Registry of the transports, and the function that opens an endpoint.

To add a transport, write a module with an endpoint class (see ``base.py``), add a line to
``_TABLE``, and run the conformance suite on it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bpsx.config import Config, frame_bound
from bpsx.errors import TransportError
from bpsx.transports.base import Endpoint

#: Transport name -> (module, class). A module is imported on first use, because its libraries may
#: be missing.
_TABLE: dict[str, tuple[str, str]] = {
    "zeromq": ("bpsx.transports.zeromq.endpoint", "ZeroMQEndpoint"),
    "tcp": ("bpsx.transports.tcp.endpoint", "TcpEndpoint"),
    "rdma": ("bpsx.transports.rdma.endpoint", "RdmaEndpoint"),
}

#: Upper bound on the workers that share memory with one lane; each takes address space in the lane.
_MOST_NEIGHBOURS = 64
#: Workers that may join a running job through shared memory; later ones use the network.
_NEWCOMERS = 16


def _import(module: str) -> Any:
    """Import a transport's module.

    Raises :class:`~bpsx.errors.TransportError`, which says what to install, if a library that the
    transport needs is missing.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module:
            raise
        raise TransportError(
            "bpsx was built without RDMA, because the headers of libibverbs were missing: install"
            " libibverbs-dev (Debian, Ubuntu) or rdma-core-devel and reinstall bpsx, or set"
            " DMLC_ENABLE_RDMA to 0 or tcp"
        ) from e
    except ImportError as e:
        raise TransportError(
            f"{module} cannot be loaded: {e}. RDMA needs libibverbs and the adapter's provider:"
            " install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or rdma-core"
        ) from e


def _own_options(name: str, config: Config) -> dict[str, Any]:
    """Return the keyword arguments that only this transport takes."""
    if name == "rdma":
        # A worker reads a message as soon as it arrives; a lane sums in the receive memory itself.
        inbox = config.rdma_inbox << 20 if config.role == "server" else config.rdma_inbox << 18
        return {
            "depth": config.rdma_rx_depth,
            "sends": config.rdma_start_depth,
            "inbox": max(inbox, 8 * config.partition_bytes),
            "device": config.rdma_device,
            "gid_index": config.rdma_gid_index,
        }
    own = {"congestion": config.congestion} if name == "tcp" else {}
    return own | {
        "io_threads": config.zmq_threads,
        "send_buffer": None if config.send_buffer is None else config.send_buffer << 10,
    }


def open_endpoint(config: Config) -> Endpoint:
    """Open an endpoint of the transport that ``config`` names.

    With ``config.ipc``, the endpoint uses shared memory for peers on the same machine. A worker's
    over TCP has ``config.io_threads``.

    Raises :class:`~bpsx.errors.TransportError`, which lists the transports, if there is none of
    that name.
    """
    threads = io_threads(config)
    if not threads:
        return _open_one(config)
    endpoint: Endpoint = import_module("bpsx.transports.threaded.endpoint").ThreadedEndpoint(
        [_open_one(config) for _ in range(threads)], spin_us=config.spin_us
    )
    return endpoint


def io_threads(config: Config) -> int:
    """Return the number of I/O threads that :func:`open_endpoint` starts for this process."""
    tcp = config.transport_name == "tcp"
    return config.io_threads if tcp and config.role == "worker" else 0


def _open_one(config: Config) -> Endpoint:
    """Open an endpoint that the calling thread drives."""
    name = config.transport_name
    if name not in _TABLE:
        raise TransportError(
            f"transport {name!r} does not exist; expected one of {', '.join(sorted(_TABLE))}"
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
            slots=min(
                _MOST_NEIGHBOURS,
                config.machines * config.local_size + config.may_lose_workers * _NEWCOMERS,
            ),
        )
    return endpoint
