"""A worker's first contact with the lanes: wait until all have replied, or find out why one does
not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from bpsx.errors import RendezvousError
from bpsx.transports.reach import PATIENCE, Probe, unreachable
from bpsx.transports.sockets.listener import Unreachable

log = logging.getLogger("bpsx.connections")
#: Seconds of silence after which a lane's port is probed; seconds between two log lines that name
#: the silent lanes.
_TRY_AFTER, _REPORT_EVERY = 2.0, 10.0


def connect_lanes(
    who: str, lanes: Sequence[tuple[str, str]], connect: Callable[[int, str], None]
) -> None:
    """Call ``connect`` with the index and address of each of ``lanes``, pairs of name and address.

    Raises :class:`~bpsx.errors.RendezvousError`, naming ``who`` and the lane that cannot be
    reached.
    """
    for i, (name, address) in enumerate(lanes):
        try:
            connect(i, address)
        except Unreachable as e:
            raise RendezvousError(f"{who} cannot reach {name} ({e.why})") from e


def greet_lanes(
    who: str,
    lanes: Sequence[tuple[str, str]],
    silent: Callable[[], Sequence[int]],
    broken: Callable[[], str],
    hear: Callable[[], None],
    seconds: float,
) -> None:
    """Wait at most ``seconds`` for the replies of ``lanes``, pairs of name and address.

    ``silent`` waits briefly and returns the indices of the lanes that have not replied. ``broken``
    names the lane whose connection has broken, once the scheduler has had time to name a cause;
    otherwise it returns an empty string. ``hear`` raises the error that the scheduler reports
    meanwhile. Raises :class:`~bpsx.errors.RendezvousError`, naming ``who``.
    """
    began, report = time.monotonic(), time.monotonic() + _REPORT_EVERY
    probes: dict[int, Probe] = {}
    try:
        while waiting := silent():
            lost = broken()
            if lost:
                tried = unreachable([lanes[i][1] for i in waiting], 1.0)
                for i in waiting:
                    if lanes[i][1] in tried:
                        raise RendezvousError(
                            f"{who} cannot reach {lanes[i][0]} ({tried[lanes[i][1]]})"
                        )
                raise RendezvousError(
                    f"{who}: {lost} before it had replied; do all processes have the same"
                    " BPSX_SECRET?"
                )
            hear()
            now = time.monotonic()
            for i in waiting if now - began >= _TRY_AFTER else ():
                if i not in probes:
                    probes[i] = Probe(lanes[i][1], PATIENCE - _TRY_AFTER)
                if why := probes[i].why_not():
                    raise RendezvousError(f"{who} cannot reach {lanes[i][0]} ({why})")
            names = ", ".join(lanes[i][0] for i in waiting)
            if now - began >= seconds:
                raise RendezvousError(f"{who}: no reply from {names}")
            if now >= report:
                report = now + _REPORT_EVERY
                log.warning("%s: waiting for a reply from %s; the port can be reached", who, names)
    finally:
        for probe in probes.values():
            probe.close()
