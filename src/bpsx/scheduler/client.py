"""A node's link to the scheduler, whose one thread reads, writes and watches.

If the scheduler dies, the thread waits for another one at the same address, and introduces the node
to it: docs/internals/elastic-scheduler.md.

The thread needs the GIL only to handle control messages. Liveness does not depend on the GIL:
ZeroMQ's I/O threads answer heartbeats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from bpsx.config import Config
from bpsx.scheduler import messages
from bpsx.scheduler.entering import Entering
from bpsx.scheduler.link_states import LINK, LinkEvent, LinkState
from bpsx.scheduler.sockets import REFUSALS, no_secret_in_common
from bpsx.system.awake import AwakeClock
from bpsx.system.threads import NamedThread

log = logging.getLogger("bpsx.link")
TICK = 1.0
#: Seconds after which a node tries again to return, if the scheduler there does not fit.
_RETRY_SECONDS = 1.0
#: Milliseconds of silence after which nothing more comes from an ended connection.
_LAST_MS = 100
#: A node's report to a restarted scheduler: the fields of AGAIN, and the messages that follow it.
Report = tuple[dict[str, Any], list[bytes]]


class SchedulerLink(Entering):
    """One node's connection to the hub.

    :meth:`send` and :meth:`stop` may be called from any thread.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._outbox: deque[bytes] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._state = LinkState.ENTERING
        self._bye: str | None = None  # the failure in this node's BYE, once it is sent
        self._report: Callable[[], Report] | None = None
        self._resumed: Callable[[], None] = lambda: None
        self.gone_ns = 0  # when the connection ended, in ns of the monotonic clock
        self._without = AwakeClock(0.0)  # since the connection ended
        self._connect_at = -1.0  # when to connect the present socket; negative: it is done
        self._warned = ""  # the latest warning about schedulers that do not fit
        self._thread: threading.Thread | None = None
        self.goodbye = threading.Event()

    # ---- while the job runs

    def start(
        self,
        handle: Callable[[dict[str, Any]], None],
        *,
        lost: Callable[[str], None],
        tick: Callable[[], None],
        watch: Sequence[tuple[int, Callable[[], None]]] = (),
        report: Callable[[], Report] | None = None,
        resumed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        It calls ``handle`` for each message, ``lost`` if the scheduler is gone for good, and
        ``tick`` every second. ``watch``: descriptors and functions. When one of the descriptors
        becomes readable, all functions are called.

        With ``report``, the link of an elastic job waits for another scheduler if this one dies.
        ``report`` returns this node's :data:`Report`; the link adds the fields of HELLO.
        ``resumed`` is called when the job has a scheduler again. It must send all unanswered
        messages again: those sent since the connection ended were dropped, and those sent shortly
        before may have been.
        """
        if self._wait:
            self._report, self._resumed = report, resumed
        self._move(LinkEvent.STARTED)
        thread = NamedThread(
            target=self._run, args=(handle, lost, tick, watch), name="bpsx-control", daemon=True
        )
        thread.start()
        self._thread = thread

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the hub. Messages keep their order.

        Without a scheduler it is dropped: see :meth:`start`.
        """
        if not self._stopping and not self.away:
            self._outbox.append(messages.encode(kind, **fields))
            self._ring()

    def add_to_report(self, kind: str, **fields: Any) -> None:
        """Tell a scheduler that rebuilds the job what this node's report lacks.

        Without one it is dropped: the next report has it. Only for the functions of ``watch``.
        """
        if self._state is LinkState.RETURNING:
            self._socket.send(messages.encode(kind, **fields))

    def wake(self) -> None:
        """Make the thread call the functions of ``watch``. Any thread may call it."""
        self._ring()

    @property
    def away(self) -> bool:
        """Whether the scheduler is gone, and this node waits for another one."""
        return self._state in (LinkState.ORPHANED, LinkState.RETURNING)

    @property
    def _gone_for(self) -> float:
        """Seconds since the connection ended, for messages."""
        return (time.monotonic_ns() - self.gone_ns) / 1e9

    def _move(self, event: LinkEvent) -> None:
        self._state = LINK.after(self._state, event)

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(
        self,
        handle: Callable[[dict[str, Any]], None],
        lost: Callable[[str], None],
        tick: Callable[[], None],
        watch: Sequence[tuple[int, Callable[[], None]]],
    ) -> None:
        poller, polled = zmq.Poller(), 0
        next_tick = time.monotonic() + TICK
        while not self._stopping:
            if polled != self._opened:  # the sockets are others than before
                poller, polled = zmq.Poller(), self._opened
                for thing in (self._socket, self._monitor, self._wake, *(d for d, _ in watch)):
                    poller.register(thing, zmq.POLLIN)
            if not self.early:
                poller.poll(max(0, int((next_tick - time.monotonic()) * 1000)) + 1)
            try:
                while self.early:
                    handle(self.early.pop(0))
                self._turn(handle, lost)
                for _, look in watch:
                    look()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    tick()
            except Exception as e:
                # This thread turns a death elsewhere into an error here, so it must not die
                # silently itself.
                log.exception("control thread: unexpected error")
                lost(f"internal error on the control thread: {e!r}")
        self._flush()

    def _flush(self) -> None:
        while self._outbox and not self.away:
            self._socket.send(self._outbox.popleft())

    def _turn(self, handle: Callable[[dict[str, Any]], None], lost: Callable[[str], None]) -> None:
        """Send queued messages, handle received ones, then check that the hub is still there."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._flush()
        # Read messages before the monitor: the hub sends its last message before it disconnects.
        while self._socket.poll(0):
            self._take(messages.decode(self._socket.recv()), handle, lost)
        if self._disconnected():
            while self._state is LinkState.CONNECTED and self._socket.poll(_LAST_MS):
                self._take(messages.decode(self._socket.recv()), handle, lost)
            self._part(lost)
        elif self.away:
            self._look_for_hub(lost)

    def _take(
        self,
        message: dict[str, Any],
        handle: Callable[[dict[str, Any]], None],
        lost: Callable[[str], None],
    ) -> None:
        """Handle a message of the hub."""
        kind = message["type"]
        if self._state is LinkState.RETURNING:
            if kind == "RESUMED":
                self._outbox.clear()  # `resumed` sends what still counts
                self._move(LinkEvent.RESUMED)
                log.warning("the %s is back, after %.1f s without it", self.where, self._gone_for)
                self._resumed()
                if self._bye is not None:
                    self.send("BYE", failure=self._bye)
            elif kind == "GOODBYE":
                self._part_well(message, handle)
            elif kind == "REFUSED" and message["over"]:
                self._end(LinkEvent.JOB_OVER, str(message["reason"]), lost)
            elif kind == "REFUSED":
                self._warn(f"the {self.where} does not fit: {message['reason']}")
                self._move(LinkEvent.REFUSED)
                self._renew(_RETRY_SECONDS)
        elif kind == "GOODBYE":
            self._part_well(message, handle)
        else:
            handle(message)

    def _part_well(self, message: dict[str, Any], handle: Callable[[dict[str, Any]], None]) -> None:
        """Handle GOODBYE: this node is not needed any more."""
        self._move(LinkEvent.GOODBYE)
        self.goodbye.set()
        handle(message)

    # ---- without a scheduler

    def _part(self, lost: Callable[[str], None]) -> None:
        """Wait for another scheduler after the connection has ended, or give up."""
        before = self._state
        self._move(LinkEvent.CONNECTION_ENDED)
        if before is LinkState.CONNECTED:
            self.gone_ns, self._without = time.monotonic_ns(), AwakeClock(self._wait)
            if self.outlives_scheduler:
                log.warning(
                    "the %s is gone: its connection broke; steps go on without it, and the job"
                    " waits %g s (BPSX_SCHEDULER_WAIT) for another one at this address",
                    self.where,
                    self._wait,
                )
        if self._report is None and self.away:
            self._end(LinkEvent.WAIT_OVER, self._why_over(), lost)
        elif self.away:
            self._renew(0.0 if before is LinkState.CONNECTED else _RETRY_SECONDS)

    def _why_over(self) -> str:
        """Return why this node does not wait for a scheduler any longer."""
        text = f"the {self.where} is gone: its connection broke"
        if not self.outlives_scheduler:
            return text
        text += f", and no other one came within {self._wait:g} s (BPSX_SCHEDULER_WAIT)"
        return text + (f"; {self._warned}" if self._warned else "")

    def _end(self, event: LinkEvent, text: str, lost: Callable[[str], None]) -> None:
        """Stop waiting for a scheduler, for the reason ``text``."""
        self._move(event)
        self._outbox.clear()
        if not self.goodbye.is_set():
            lost(text)
        self.goodbye.set()

    def _renew(self, delay: float) -> None:
        """Replace the socket, and connect it in ``delay`` seconds.

        A socket would deliver to the next scheduler what it holds for this one, before this node
        can introduce itself. And what an earlier scheduler still sends must not arrive any more.
        """
        self._socket.disable_monitor()
        self._socket.close(0)
        self._outbox.clear()
        self._open_socket()
        self._descriptor, self._refused = -1, False
        self._connect_at = time.monotonic() + delay
        self._connect_when_due()

    def _connect_when_due(self) -> None:
        if 0 <= self._connect_at <= time.monotonic():
            self._connect_at = -1.0
            self._connect(self._address)

    def _look_for_hub(self, lost: Callable[[str], None]) -> None:
        """Connect, introduce this node, or give up, when it is time."""
        self._connect_when_due()
        if self._refusals >= REFUSALS:
            self._refusals = 0
            self._warn(f"the {self.where} {no_secret_in_common(self._config)}")
        if self._state is LinkState.ORPHANED and self._made:
            self._introduce()
        elif self._state is LinkState.ORPHANED and self._without.now() >= self._wait:
            self._end(LinkEvent.WAIT_OVER, self._why_over(), lost)

    def _introduce(self) -> None:
        """Introduce this node to the new scheduler: send AGAIN and the report's messages."""
        assert self._report is not None
        fields, parts = self._report()
        again = {**self._hello, **fields, "bye": self._bye, "parts": len(parts)}
        self._socket.send(messages.encode("AGAIN", **again))
        for part in parts:
            self._socket.send(part)
        self._move(LinkEvent.CONNECTION_MADE)

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            log.warning("%s", text)

    def leave(self, failure: str, timeout: float) -> bool:
        """Send BYE and wait for the reply.

        ``timeout``: seconds in which this process is awake; with heartbeats, the wait lasts at
        least as long as the scheduler may be silent, unless it is known to be gone. A node that
        leaves without the reply looks like one that died.

        Returns whether the reply came, or the hub was gone, in time. Idempotent.
        """
        if not self.goodbye.is_set():
            self._bye = failure  # for AGAIN, if the scheduler is gone
            self.send("BYE", failure=failure)
        silence = self._config.heartbeat_interval + self._config.heartbeat_timeout
        longest = max(timeout, silence) if self._config.heartbeat_interval > 0 else timeout
        clock, waited, replied = AwakeClock(longest), 0.0, self.goodbye.is_set()
        while not replied and waited < (timeout if self.away else longest):
            replied = self.goodbye.wait(min(longest - waited, TICK))
            waited = clock.now()
        return replied

    def stop(self) -> None:
        """End the thread, flush queued messages and close the sockets.

        Idempotent. Must not be called from the control thread.
        """
        self._stopping = True
        if self._thread is not None:
            self._ring()
            self._thread.join()
            self._thread = None
        # They refer to the session, which refers to this link: neither would be freed at once.
        self._report, self._resumed = None, lambda: None
        if not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(500)
            os.close(self._wake)
