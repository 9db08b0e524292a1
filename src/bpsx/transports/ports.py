"""Which port a listener takes: the system's choice, or the first free one of those that
``BPSX_PORTS`` allows.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TypeVar

from bpsx.errors import TransportError

T = TypeVar("T")


def bind_one(ports: Sequence[int], bind: Callable[[int], T]) -> T:
    """What ``bind`` returns for the first of ``ports`` that is free; without ``ports`` for 0, the
    system's choice.

    ``bind`` raises an error with ``errno`` EADDRINUSE for a port that is taken; all else that it
    raises goes through. Raises :class:`~bpsx.errors.TransportError` if all are taken.
    """
    for port in ports or (0,):
        try:
            return bind(port)
        except Exception as e:  # OSError, or ZeroMQ's own
            if getattr(e, "errno", None) != errno.EADDRINUSE or not ports:
                raise
    taken = (
        f"{ports[0]}-{ports[-1]}: all {len(ports)} ports are"
        if len(ports) > 1
        else f"{ports[0]}: it is"
    )
    raise TransportError(
        f"BPSX_PORTS={taken} taken on this machine: allow more; each lane of a server takes one"
        " (BYTEPS_SERVER_ENGINE_THREAD), and so do a scheduler without DMLC_PS_ROOT_PORT and"
        " BPSX_METRICS_PORT=0"
    )
