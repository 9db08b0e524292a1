"""This machine: which address is ours, and how its malloc shall behave."""

from __future__ import annotations

import ctypes
import time

from bpsx import errors
from bpsx.config import Config
from bpsx.transports.address import interface_address, own_address_towards, resolve

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def scheduler_address(config: Config) -> str:
    """The scheduler's address as a number. A name that does not resolve yet, as of a pod that is still starting, is tried until the
    rendezvous deadline; then :class:`~bpsx.errors.RendezvousError`."""
    end = time.monotonic() + config.rendezvous_timeout
    while True:
        try:
            return resolve(config.root_uri, config.root_port)
        except OSError as e:
            if time.monotonic() + 1 >= end:
                raise errors.RendezvousError(f"DMLC_PS_ROOT_URI={config.root_uri!r}: cannot resolve the scheduler's address: {e}") from e
        time.sleep(1)


def own_host(config: Config) -> str:
    """The address to listen on and to be known by: named, or of the named interface, or the one that faces the scheduler."""
    if config.node_host:
        return str(config.node_host)
    try:
        if config.interface:
            return interface_address(config.interface)
        return own_address_towards(scheduler_address(config), config.root_port)
    except OSError as e:
        raise errors.ConfigError(f"cannot tell the own address (DMLC_INTERFACE={config.interface!r}, scheduler {config.root_uri}): {e}; "
                                 "set DMLC_NODE_HOST") from e


def keep_memory(megabytes: int) -> None:
    """Tell glibc's malloc to keep freed memory up to this much. Elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if megabytes and mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, megabytes << 20)
