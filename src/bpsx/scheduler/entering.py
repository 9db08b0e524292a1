"""Entry of a node into its job: connects to the scheduler, sends HELLO, awaits WELCOME."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from bpsx.config import Config
from bpsx.config.fingerprint import fingerprint
from bpsx.errors import JobOverError, RendezvousError
from bpsx.scheduler import messages
from bpsx.scheduler.sockets import (
    REFUSALS,
    REFUSED,
    no_secret_in_common,
    open_socket,
    speaks_zeromq,
)
from bpsx.scheduler.waiting import why_silent
from bpsx.system.address import is_ipv6, join_host_port, tcp_url
from bpsx.system.host import scheduler_address

log = logging.getLogger("bpsx.link")
_GOODBYE_SECONDS, _MOST_FAILURE = 2.0, 4096
#: Seconds for which a server asks at least why its connection has ended.
_WHY_SECONDS = 1.0


class Entering:
    """The part of a node's :class:`~bpsx.scheduler.client.SchedulerLink` that enters the job.

    For one thread, which later hands the socket over to the link's own.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.where = f"scheduler at {config.root_uri}:{config.root_port}"
        self.address = ""  # numeric address of the scheduler, once resolved
        self._context = zmq.Context(1)
        self._opened = 0  # number of sockets so far
        self._made = False  # the present socket has made a connection
        self._open_socket()
        self._in_job = False
        self._hello: dict[str, Any] = {}
        self._greeting = b""  # HELLO, encoded
        #: Whether this node goes on for a while after the scheduler's death.
        self.outlives_scheduler = False
        self._wait = 0.0  # seconds for which to look for a scheduler after the connection's end
        # Descriptor of the connection of the hub's last message; -1 before the first.
        self._descriptor = -1
        self._refusals = 0  # handshakes that failed in a row
        # A handshake failed; the next disconnect event is for that connection, which never counted.
        self._refused = False
        #: Messages that :meth:`news` has read, for the link's thread to handle.
        self.early: list[dict[str, Any]] = []

    def _open_socket(self) -> None:
        self._opened += 1
        self._made = False
        self._socket = open_socket(self._context, zmq.DEALER, self._config)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # An explicit address: pyzmq leaks some memory each time it makes one up.
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | REFUSED,
            f"inproc://monitor.{id(self)}.{self._opened}",
        )

    def _connect(self, address: str) -> None:
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
        self._socket.connect(tcp_url(address, self._config.root_port))

    def enter_job(
        self, role: str, rank: int, host: str, lanes: list[str], again: bool = False
    ) -> dict[str, Any]:
        """Introduce this node and wait for all others; returns the WELCOME message.

        ``rank``: -1 if the scheduler is to choose: WELCOME says which. ``again``: whether this
        process was in a job before.

        Raises :class:`RendezvousError` when the scheduler refuses the node, or at the deadline,
        naming the missing nodes. Raises :class:`JobOverError` when the job has already begun or
        ended.
        """
        address = scheduler_address(self._config)
        self.address = join_host_port(address, self._config.root_port)
        self._address = address
        self._connect(address)
        self._hello = {
            "protocol": messages.PROTOCOL,
            "role": role,
            "rank": rank,
            "host": host,
            "pid": os.getpid(),
            "lanes": lanes,
            "config": fingerprint(self._config),
            "token": secrets.token_hex(8) if role == "worker" and rank < 0 else "",
        }
        self._greeting = messages.encode("HELLO", **self._hello, again=again)
        self._socket.send(self._greeting)
        return self.await_welcome()

    def await_welcome(self) -> dict[str, Any]:
        """Wait for WELCOME, and return it. Raises as :meth:`enter_job`."""
        # Wait one second longer than the scheduler, whose list of missing nodes is more complete.
        end = time.monotonic() + self._config.rendezvous_timeout + 1
        role, rank, address = self._hello["role"], self._hello["rank"], self._address
        who = f"{role} {rank}" if rank >= 0 else role
        missing = ""
        report = time.monotonic() + 10
        # Deadline after which a scheduler that was heard before and is now gone counts as dead.
        alone = never = float("inf")
        while True:
            message = self._receive(min(end, report, alone) - time.monotonic())
            alone = alone if message is None else never
            if self._disconnected():
                message = self._last_word(message)
                if message is not None and message["type"] == "WELCOME":
                    # The job began without this node: the scheduler sends nothing on the connection
                    # that libzmq makes now.
                    raise RendezvousError(
                        f"{who}: the {self.where} is gone: its connection broke just as the job"
                        " began"
                    )
                alone = min(
                    alone,
                    never if self._descriptor < 0 else time.monotonic() + self._config.gather_grace,
                )
                # The connection broke while the job was gathering. libzmq makes a new one, on which
                # the scheduler does not know this node yet.
                self._socket.send(self._greeting)
                if message is None:
                    continue
            if self._refusals >= REFUSALS:
                self._explain_refusals(who, address)
            now = time.monotonic()
            if now >= alone:
                raise RendezvousError(
                    f"{who}: the {self.where} is gone: its connection broke, and it did not come"
                    f" back within {self._config.gather_grace:g} s (BPSX_GATHER_GRACE) while the"
                    " job was gathering"
                )
            if message is None and now >= end:
                raise RendezvousError(
                    f"{who}: the job was not complete after {self._config.rendezvous_timeout:g} s"
                    " (BPSX_RENDEZVOUS_TIMEOUT); "
                    + (
                        f"missing: {missing}"
                        if missing
                        else f"no reply from the {self.where}: {self._why_silent(address)}"
                    )
                )
            if message is None:
                if now < report:  # woken by a connection event only
                    continue
                report = now + 10
                log.warning(
                    "waiting for %s", missing or f"the {self.where}: {self._why_silent(address)}"
                )
            elif message["type"] == "STATUS":
                if not missing:
                    log.info(
                        "%s: known to the %s, which waits for %s",
                        who,
                        self.where,
                        message["missing"],
                    )
                missing = str(message["missing"])
            elif message["type"] == "REFUSED":
                kind = JobOverError if message.get("over") else RendezvousError
                by = "" if message.get("ended") else f"refused by the {self.where}: "
                raise kind(f"{who}: {by}{message['reason']}")
            elif message["type"] == "WELCOME":
                log.info("%s: the job is complete", who)
                self._in_job = True
                self._hello.update(job=message["job"], rank=message.get("rank", rank))
                self._decide_to_wait(message)
                return message

    def _decide_to_wait(self, welcome: dict[str, Any]) -> None:
        """Decide for how long this node waits for a scheduler if its connection ends."""
        self._wait = self._config.scheduler_wait if welcome["may_lose_scheduler"] else 0.0
        self.outlives_scheduler = self._wait > 0
        if welcome["elastic"] and "first" in welcome:
            # The scheduler may have replaced a server that was silent. It says so when asked.
            self._wait = max(self._wait, _WHY_SECONDS)

    def _receive(self, timeout: float) -> dict[str, Any] | None:
        """Return the next message; None after ``timeout`` seconds or on a connection event."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(max(0, int(timeout * 1000) + 1))
        if not self._socket.poll(0):
            return None
        frame = self._socket.recv(copy=False)
        self._descriptor = int(frame.get(zmq.SRCFD))
        return messages.decode(frame.bytes)

    def _last_word(self, message: dict[str, Any] | None) -> dict[str, Any] | None:
        """Read what is left on a broken connection, starting from ``message``.

        Returns the WELCOME or REFUSED among it, which ends the gathering, else the latest message.
        Nothing can come on another connection before the next HELLO, but messages of this one may
        still be on their way through ZeroMQ.
        """
        while (
            message is None or message["type"] not in ("WELCOME", "REFUSED")
        ) and self._socket.poll(100):
            message = self._receive(0)
        return message

    def _disconnected(self) -> bool:
        """Whether the connection of the hub's last message, or any before the first, has broken."""
        found = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusals = 0
                self._made = True
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                found = found or (not self._refused and self._descriptor in (-1, event["value"]))
                self._refused = False
            else:
                self._refused = True
                self._refusals += 1
        return found

    def _why_silent(self, address: str) -> str:
        return why_silent(address, self._config.root_port)

    def _explain_refusals(self, who: str, address: str) -> None:
        """Raise :class:`RendezvousError` if the peer that fails our handshakes is a ZeroMQ socket.

        If not, it may be a proxy in front of a scheduler that is still starting.
        """
        self._refusals = 0
        if speaks_zeromq(address, self._config.root_port):
            raise RendezvousError(f"{who}: the {self.where} {no_secret_in_common(self._config)}")

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message between :meth:`enter_job` and :meth:`start`."""
        self._socket.send(messages.encode(kind, **fields))

    def news(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """Return the next message, or None; LOST if the scheduler is gone.

        ``timeout``: seconds to wait for one. For use between :meth:`enter_job` and :meth:`start`.
        """
        message = self._receive(timeout)
        if message is None and self._disconnected():
            return {"type": "LOST", "text": f"the {self.where} is gone: its connection broke"}
        if message is not None and message["type"] != "LOST":
            self.early.append(message)
        return message

    def give_up(self, failure: str) -> None:
        """Leave the job between :meth:`enter_job` and :meth:`start`; send the others the reason.

        Waits up to 2 seconds for the reply: if the connection ended first, the others would learn
        only that.
        """
        if not self._in_job:
            return
        self._socket.send(messages.encode("BYE", failure=failure[:_MOST_FAILURE]))
        end = time.monotonic() + _GOODBYE_SECONDS
        with contextlib.suppress(messages.BadMessage):
            while (left := end - time.monotonic()) > 0 and not self._disconnected():
                message = self._receive(left)
                if message is not None and message["type"] == "GOODBYE":
                    return
