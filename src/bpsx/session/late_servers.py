"""Connects a worker to servers that join the running job.

docs/internals/elastic-servers.md describes the protocol. Connecting may take seconds, so a thread
of its own does it. The control thread goes on with the scheduler's messages meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Any

from bpsx.core._late_lanes import LateLanes
from bpsx.errors import BpsxError, in_short
from bpsx.scheduler.client import SchedulerLink
from bpsx.session.lanes import Lanes
from bpsx.system.fork import keep_also_from_children
from bpsx.system.threads import NamedThread
from bpsx.transports.base import Endpoint

log = logging.getLogger("bpsx.connections")


class LateServers:
    """Servers to which this worker connects while the job runs.

    The control thread calls all methods but :meth:`close`.
    """

    def __init__(
        self,
        lanes: Lanes,
        core_lanes: LateLanes,
        endpoint: Endpoint,
        link: SchedulerLink,
        secret: bytes,
        connected: Iterable[int] = (),
    ) -> None:
        """``connected``: servers that came late, to which this worker has connected already."""
        self._lanes, self._core, self._endpoint, self._link = lanes, core_lanes, endpoint, link
        self._secret = secret
        #: The lanes of each server that has not been reported as connected, by the server's rank.
        self._coming: dict[int, range] = {}
        self._said = dict.fromkeys(connected, "")  # by server's rank: `failure` of its CONNECTED
        self._todo: SimpleQueue[tuple[range, list[str]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards the start of the thread against `close`

    def come(self, message: dict[str, Any]) -> None:
        """Handle LANES: connect to a server."""
        server, first, addresses = message["server"], message["first"], message["lanes"]
        try:
            self._lanes.add(first, message["name"], addresses)
            self._core.add(first, len(addresses), self._lanes.is_beside(first))
        except ValueError as e:
            self._report(server, str(e))
            return
        self._coming[server] = range(first, first + len(addresses))
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = NamedThread(target=self._run, name="bpsx-connect", daemon=True)
                self._thread.start()
            self._todo.put((self._coming[server], addresses))

    def end(self, lanes: Sequence[int], text: str) -> None:
        """Handle GONE: end the connections to lanes; no term moves their keys, or not yet."""
        self._lanes.lose(lanes, text)
        self._core.end(list(lanes))
        for server, theirs in list(self._coming.items()):
            if theirs[0] in lanes:
                del self._coming[server]

    def look(self) -> None:
        """Report the servers of which all lanes have replied, and those that cannot be reached."""
        for lane, text in self._lanes.take_failures():
            self._fail(lane, text)
        for server, theirs in list(self._coming.items()):
            if all(self._core.ready(lane) for lane in theirs):
                self._lanes.have_come(theirs)
                log.info("connected to %s", self._lanes.named()[theirs[0]][0])
                self._report(server, "")

    def _fail(self, lane: int, text: str) -> None:
        for server, theirs in list(self._coming.items()):
            if lane in theirs:
                self._report(server, text)

    def _report(self, server: int, failure: str) -> None:
        self._coming.pop(server, None)
        self._said[server] = failure[:4096]
        self._link.send("CONNECTED", server=server, failure=self._said[server])

    def repeat(self) -> None:
        """Say CONNECTED again, to a scheduler that may not have heard it."""
        for server, failure in self._said.items():
            self._link.send("CONNECTED", server=server, failure=failure)

    # ---- the thread

    def _run(self) -> None:
        while (one := self._todo.get()) is not None and not self._closed:
            lanes, addresses = one
            try:
                self._connect(lanes, addresses)
            except Exception as e:  # whatever it is: the scheduler has to know
                text = str(e) if isinstance(e, BpsxError) else in_short(e)
                self._lanes.note_failure(lanes[0], text)
                self._link.wake()

    def _connect(self, lanes: range, addresses: list[str]) -> None:
        keep_also_from_children(addresses)
        for lane, address in zip(lanes, addresses, strict=True):
            if self._closed or self._lanes.lost(lane):
                break
            self._endpoint.connect(lane, address, self._core.undriven())
        else:
            trip = min(self._endpoint.round_trip(lane) for lane in lanes)
            self._core.greet(lanes[0], addresses, self._secret, trip)
        if self._lanes.lost(lanes[0]):  # GONE came meanwhile, perhaps before the connection
            self._core.end(list(lanes))

    def close(self) -> None:
        """End the thread. Call it before the core and the endpoint are closed."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
