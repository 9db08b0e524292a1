"""Port of a listener: chosen by the system, or the first free port that ``BPSX_PORTS`` allows."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TypeVar

from bpsx.errors import TransportError

T = TypeVar("T")


def bind_one(ports: Sequence[int], bind: Callable[[int], T]) -> T:
    """Call ``bind`` with each of ``ports`` until one is free, and return what ``bind`` returns.

    Without ``ports``, ``bind`` is called with 0, and the system chooses the port.

    ``bind`` must raise an error with ``errno`` EADDRINUSE for a taken port. Every other exception
    propagates. Raises :class:`~bpsx.errors.TransportError` if all ports are taken.
    """
    for port in ports or (0,):
        try:
            return bind(port)
        except Exception as e:  # OSError or zmq.ZMQError
            if getattr(e, "errno", None) != errno.EADDRINUSE or not ports:
                raise
    taken = (
        f"{ports[0]}-{ports[-1]}: all {len(ports)} ports are"
        if len(ports) > 1
        else f"{ports[0]}: it is"
    )
    raise TransportError(
        f"BPSX_PORTS={taken} taken on this machine: allow more ports. Each lane of a server takes"
        " one (BYTEPS_SERVER_ENGINE_THREAD), and so do a scheduler without DMLC_PS_ROOT_PORT and"
        " BPSX_METRICS_PORT=0"
    )
