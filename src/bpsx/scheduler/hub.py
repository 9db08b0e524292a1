"""The scheduler: :class:`Rebuilding`, a :class:`Membership`, behind a ZeroMQ ROUTER socket.

A dead connection is identified by its file descriptor. libzmq gives it in the monitor's
DISCONNECTED event and with every message received. Descriptors are reused, so the hub always reads
the monitor before it handles a message.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from bpsx.config import Config
from bpsx.errors import ConfigError, TransportError, in_short
from bpsx.scheduler import messages
from bpsx.scheduler.ends import Ends
from bpsx.scheduler.gathering import Output, newcomer
from bpsx.scheduler.observers import KINDS, Observers
from bpsx.scheduler.rebuilding import Rebuilding
from bpsx.scheduler.rejections import EVENTS, Refusals
from bpsx.scheduler.roster import Node, names
from bpsx.scheduler.sockets import open_socket
from bpsx.scheduler.states import JobState
from bpsx.scheduler.terms import REPLACE, SHRINK
from bpsx.scheduler.waiting import doubtful_name, loopback_hint
from bpsx.system.address import is_ipv6, resolve, tcp_url
from bpsx.system.host import allow_descriptors, require_trust
from bpsx.transports.ports import bind_one

if TYPE_CHECKING:
    from bpsx.scheduler.metrics import Exporter

log = logging.getLogger("bpsx.scheduler")
connections = logging.getLogger("bpsx.connections")
REPORT_EVERY = 10.0
GRACE = 5.0


#: Seconds between two looks whether a running job can go on.
_REBUILD_EVERY = 0.05


class Interrupted(Exception):
    """Raised between messages after a signal has asked the scheduler to end."""


#: Longest wait in seconds. Python runs the handler of a signal that arrived just before a wait only
#: when the wait ends.
_LONGEST_WAIT = 1.0
#: Seconds after a silence of the scheduler in which an ended connection counts as due to it.
_AFTERMATH = 2.0


class Hub:
    """One job's scheduler.

    :meth:`run` blocks until the job is over and returns the exit status.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._context = zmq.Context(1)
        self._socket = open_socket(self._context, zmq.ROUTER, config)
        # Makes a send to a node without a connection fail. Such a node may have died before its
        # HELLO was read, in which case no disconnect event will name it.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.port = self._bind()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signal = ""
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | EVENTS)
        self._refusals = Refusals()
        # ZeroMQ does not say whether a connection broke or its heartbeats timed out.
        silent = (
            f", or it was silent for {config.heartbeat_timeout:g} s (PS_HEARTBEAT_TIMEOUT)"
            if config.heartbeat_interval > 0
            else ""
        )
        self._broke = f"its connection to the scheduler broke{silent}"
        self._ends = Ends()
        self._hint = ""
        self._reported = 0  # number of lost servers that have been reported
        # Nodes whose connections have ended, and whether by silence. Their last messages may still
        # be unread.
        self._gone: list[tuple[bytes, bool]] = []
        self._unwelcome: list[tuple[bytes, dict[str, Any]]] = []
        self._looked = time.monotonic()  # time of the last wait for events
        self._silence, self._silent_until = 0.0, -math.inf  # the latest silence of this process
        self._members = Rebuilding(
            config.num_worker,
            config.num_server,
            config.local_size,
            secrets.randbits(63),
            stall_warn=config.stall_warn,
            deadlock_after=config.deadlock_after,
            elastic_wait=config.elastic_wait,
            wait=config.scheduler_wait,
            grace=config.gather_grace,
            balances=config.elastic_balance,
        )
        self._members.patience = config.rendezvous_timeout
        self._members.silence = config.heartbeat_interval + config.heartbeat_timeout + 1.0
        self._observers = Observers(self._members, config.root_uri)
        try:
            self._exporter = self._serve_metrics()
        except TransportError:
            self._socket.disable_monitor()
            self._context.destroy(0)
            os.close(self._wake)
            raise

    def _serve_metrics(self) -> Exporter | None:
        if self._config.metrics_port is None:
            return None
        # Needs prometheus-client, without which a scheduler with this option does not start.
        from bpsx.scheduler.metrics import Exporter

        host, port = self._config.metrics_port
        return Exporter(host, port, self._observers, self._config.ports or ())

    def _bind(self) -> int:
        host = self._config.root_uri
        try:
            require_trust(self._config, resolve(host, self._config.root_port))
        except OSError as e:
            self._context.destroy(0)
            raise ConfigError(
                f"DMLC_PS_ROOT_URI={host!r}: the scheduler cannot resolve its own address: {e}"
            ) from e
        except ConfigError:
            self._context.destroy(0)
            raise
        allow_descriptors()
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6(host)))
        try:
            bind_one(
                (self._config.ports or ()) if not self._config.root_port else (),
                lambda port: self._socket.bind(
                    tcp_url(host, self._config.root_port or port or "*")
                ),
            )
        except TransportError:
            self._context.destroy(0)
            raise
        except zmq.ZMQError as e:
            self._context.destroy(0)
            raise TransportError(
                f"the scheduler cannot listen on {host}:{self._config.root_port} (DMLC_PS_ROOT_URI,"
                f" DMLC_PS_ROOT_PORT): {e}; it has to run on the machine that has this address, and"
                " the port must be free"
            ) from e
        return int(self._socket.getsockopt(zmq.LAST_ENDPOINT).rsplit(b":", 1)[1].strip(b"\0"))

    def announce(self) -> None:
        """Publish the scheduler's address.

        It goes to the log, to the port file that the launcher named, and to the worker that started
        this scheduler.
        """
        self._tell_launcher("waiting")
        if self._config.port_file:
            path = Path(self._config.port_file)
            draft = path.with_name(path.name + ".new")
            draft.unlink(missing_ok=True)
            with open(
                os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w"
            ) as file:
                file.write(f"{self.port}\n")
            os.replace(draft, path)
        if self._config.lifeline_fd >= 0:
            with contextlib.suppress(OSError):  # the worker may be gone
                os.write(self._config.lifeline_fd, b"%d" % self.port)
        log.info("listening on %s:%d", self._config.root_uri, self.port)
        if doubt := doubtful_name(self._config):
            log.warning("%s", doubt)

    def _tell_launcher(self, line: str) -> None:
        if self._config.state_fd >= 0:
            with contextlib.suppress(OSError):  # the launcher may be gone
                os.write(self._config.state_fd, f"{line}\n".encode())

    def interrupt(self, name: str) -> None:
        """End because of the signal called ``name``; for use in its handler.

        It takes effect between messages. An exception raised in the handler could interrupt the
        reading of a message, and the remaining frames would be taken for the next message's.
        """
        self._signal = name
        os.eventfd_write(self._wake, 1)

    @property
    def serving(self) -> bool:
        """Whether a running job needs this scheduler."""
        return self._members.state is JobState.RUNNING

    def orphaned(self) -> None:
        """Handle the end of the worker that started this scheduler; for any thread.

        It ends only a job that is still gathering: in a running job, the scheduler detects dead
        nodes itself.
        """
        if self._members.state is JobState.WAITING:
            self.interrupt("the exit of the worker that started it")

    def run(self) -> int:
        """Serve until the job is over. Returns 0 if all workers left in good order, else 1."""
        ended_for_us = broken = False
        try:
            self._serve()
        except Interrupted as e:
            # A launcher that runs this scheduler either sent the signal and reports why itself, or
            # learns from this line that another process sent it.
            ended_for_us = self._config.state_fd >= 0 and self._in_need
            self._end_by(str(e))
        except Exception as e:
            # The other processes would learn only that the scheduler is gone, not why.
            broken = True
            log.exception("unexpected error")
            self._abort(f"has failed: {in_short(e)}")
        finally:
            if self._exporter is not None:
                self._exporter.close()
            self._socket.disable_monitor()
            self._ends.close()
            self._context.destroy(500)
            os.close(self._wake)
        failure = self._members.failure
        if self._members.deserted:
            failure += "; if it lives, it goes on with another scheduler at this address"
            self._tell_launcher("deserted")
        else:
            self._tell_launcher("over")
        if self._members.survived:
            log.warning("the job is over: %s", self._members.failure)
        elif self._members.state is not JobState.DONE:
            log.log(
                logging.INFO if ended_for_us else logging.ERROR, "the job has failed: %s", failure
            )
        return 0 if self._members.state is JobState.DONE and not broken else 1

    def _serve(self) -> None:
        self._gather()
        if self._members.state is JobState.RUNNING:
            self._tell_launcher("running")
            if self._may_die:
                self._tell_launcher("may die")
            log.info("the job is complete: %s", names(self._members.present()))
            if self._members.asynchronous and self._config.elastic in (SHRINK, REPLACE):
                log.warning(
                    "BPSX_ELASTIC=%s: this asynchronous job goes on without workers that it loses,"
                    " but no worker can join it while it runs",
                    self._config.elastic,
                )
            if self._exporter is not None:
                self._send(self._observers.watch_for(1e9))
            while self._members.state is JobState.RUNNING:
                self._turn(_LONGEST_WAIT)
                self._send(self._members.settle(time.monotonic()))
                self._send(self._members.tend(time.monotonic()))
                self._report_losses()
            if not self._members.deserted:
                self._blame()
        self._farewell()

    def _blame(self) -> None:
        """Tell the launcher which process ended first, and why."""
        if blamed := self._members.blamed:
            own, failure = f"{blamed} has failed: ended by ", self._members.failure
            cause = failure.removeprefix(own) if failure.startswith(own) else ""
            words = ["blame", blamed.role, str(blamed.rank), str(blamed.pid), *cause.split()]
            self._tell_launcher(" ".join(words))

    def _report_losses(self) -> None:
        """Report nodes that have joined or been survived since the last call, and recoveries."""
        members, watched = self._members, bool(self._members.notes)
        self._log_notes()
        for i, loss in enumerate(members.losses[self._reported :], self._reported):
            if i >= members.restored:  # the scheduler before has logged the others
                log.warning("%s", loss.text)
            self._tell_launcher(f"lost {loss.node.role} {loss.node.rank} {loss.node.pid}")
            told = i < members.restored
            if loss.node.role == "server" and not (loss.planned or told):
                self._tell_launcher(f"gone server {loss.node.pid}")
            back = told and members.lives(loss.node.rank)
            if loss.node.role == "worker" and not (loss.planned or back):
                self._tell_place("gone", loss.node.rank)
        for node in members.turned_away:
            self._tell_launcher(f"lost {node.role} {node.rank} {node.pid}")
        members.turned_away.clear()
        for rank in members.let_in:
            self._tell_place("entered", rank)
        members.let_in.clear()
        self._reported = len(members.losses)
        if watched and self._exporter is not None:  # a server may have joined
            self._send(self._observers.watch_for(1e9))
        if members.terms is not None and members.terms.finished:
            for recovery in members.terms.finished:
                log.warning("%s", recovery)
            members.terms.finished.clear()

    def _tell_place(self, word: str, rank: int) -> None:
        """Tell the launcher of a worker's end or entry; and of its machine, as far as it is one."""
        self._tell_launcher(f"{word} worker {rank}")
        each = self._members.local_size
        machine = range(rank - rank % each, rank - rank % each + each)
        if word == "entered" or not any(self._members.lives(other) for other in machine):
            self._tell_launcher(f"{word} machine {rank // each}")

    def _log_notes(self) -> None:
        for note in self._members.notes:
            log.warning("%s", note)
        self._members.notes.clear()
        for choice in self._members.choices:
            log.info("%s", choice)
        self._members.choices.clear()

    @property
    def _in_need(self) -> bool:
        """Whether the job needs this scheduler, to begin or to go on."""
        return self._members.state in (JobState.WAITING, JobState.RUNNING)

    @property
    def _may_die(self) -> bool:
        """Whether the running job goes on with another scheduler if this one ends."""
        return self._members.may_lose_scheduler and self._config.scheduler_wait > 0

    def _end_by(self, signal: str) -> None:
        """End this scheduler because of a signal.

        SIGTERM comes from those that need the machine: the job goes on if it can. SIGINT comes from
        a person who wants to end it.
        """
        why = f"was ended by {signal}"
        if signal == "SIGTERM" and self._members.state is JobState.RUNNING and self._may_die:
            self._members.desert(f"the scheduler at {self._config.root_uri}:{self.port} {why}")
        else:
            self._abort(why)

    def _abort(self, why: str) -> None:
        """End the job because of this scheduler, and give the nodes time to leave."""
        if self._in_need:
            self._tell_launcher(f"blame scheduler 0 {os.getpid()}")
        self._send(
            self._members.abort(f"the scheduler at {self._config.root_uri}:{self.port} {why}")
        )
        self._farewell()

    def _gather(self) -> None:
        """Wait for all nodes; report the missing ones every :data:`REPORT_EVERY` seconds."""
        end = time.monotonic() + self._config.rendezvous_timeout
        report = time.monotonic() + REPORT_EVERY
        while self._members.state is JobState.WAITING:
            now = time.monotonic()
            self._send(self._members.rebuild(now))
            self._log_notes()
            if self._members.state is not JobState.WAITING:
                return
            vanished = self._members.vanished.due(now, self._config.gather_grace)
            # A running job that is back does not need a node that wanted to enter it.
            rebuilds = self._members.rebuilds
            lost = vanished is not None and now >= vanished[0] and not rebuilds
            if now >= end or lost:
                text = (
                    f"after {self._config.rendezvous_timeout:g} s still missing:"
                    f" {self._status()['missing']}"
                )
                text = vanished[1] if vanished and lost else text
                self._send(self._members.expire(text))
                return
            if now >= report:
                report, self._hint = now + REPORT_EVERY, loopback_hint(self._config)
                status = self._status()
                if text := self._members.returned_text():
                    log.warning("nodes of a running job: %s", text)
                log.warning("waiting for %s; present: %s", status["missing"], status["here"])
                self._send([(i, status) for i in list(self._members.nodes)])
            if rebuilds:
                self._turn(_REBUILD_EVERY)
            else:
                self._turn(min(end, report, vanished[0] if vanished else end) - now)

    def _status(self) -> dict[str, Any]:
        missing = self._members.missing_text() + self._refusals.hint() + self._hint
        return {
            "type": "STATUS",
            "missing": missing,
            "here": self._members.present_text() or "none",
        }

    def _farewell(self) -> None:
        """Give all nodes :data:`GRACE` seconds to receive the outcome and leave."""
        end = time.monotonic() + GRACE
        while not self._members.everybody_left() and time.monotonic() < end:
            self._turn(max(0.0, end - time.monotonic()))

    def _turn(self, timeout: float | None) -> None:
        """Wait up to ``timeout`` seconds for events and handle them."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        timeout = 0 if self._gone else timeout
        self._note_silence(time.monotonic() - self._looked)
        due = time.monotonic() + (math.inf if timeout is None else timeout)
        poller.poll(None if timeout is None else max(0, int(timeout * 1000) + 1))
        self._looked = time.monotonic()
        self._note_silence(self._looked - due)
        if self._signal:
            os.eventfd_read(self._wake)
            name, self._signal = self._signal, ""
            raise Interrupted(name)
        self._read_monitor()
        for _ in range(256):
            try:
                ident, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                self._settle()
                return
            self._read_monitor()
            message = self._parse(ident.bytes, frames)
            if message is not None and self._comes_in_vain(ident.bytes, message):
                self._unwelcome.append((ident.bytes, message))
            elif message is not None:
                self._handle(ident.bytes, message)

    def _note_silence(self, late: float) -> None:
        """Note whether this process has not run for so long that nodes may count it as dead.

        ``late``: seconds since it should have run.
        """
        limit = self._config.heartbeat_timeout
        if self._config.heartbeat_interval > 0 and late >= limit:
            self._silence, self._silent_until = late, time.monotonic()

    def _lost_by_silence(self, node: Node | None) -> bool:
        """Whether a node's connection may have ended because this scheduler was silent.

        The node may live, and the job go on with another scheduler: this one must not lose it.
        """
        recent = time.monotonic() - self._silent_until < _AFTERMATH
        running = self._members.state is JobState.RUNNING and self._members.may_lose_scheduler
        return recent and running and node is not None and not node.left

    def _comes_in_vain(self, ident: bytes, message: dict[str, Any]) -> bool:
        """Whether a node will be refused unless connections turn out to have ended.

        After a silence of the scheduler itself, nodes come back before it has handled the ends of
        their connections.
        """
        if message["type"] == "AGAIN":
            return self._members.state is not JobState.WAITING
        return message["type"] == "HELLO" and self._members.would_refuse(ident, message)

    def _settle(self) -> None:
        """Handle ended connections, then nodes to be refused.

        Call this once all messages have been read.
        """
        if self._unwelcome and self._members.state is JobState.WAITING:
            # The node that holds the wanted place may have died right after its HELLO, without an
            # event that names it. A send to it reveals that.
            status = self._status()
            self._send([(i, status) for i in list(self._members.nodes)])
        self._bury()
        unwelcome, self._unwelcome = self._unwelcome, []
        for ident, message in unwelcome:
            self._handle(ident, message)

    def _read_monitor(self) -> None:
        """Note which nodes' connections have ended.

        Descriptors are reused, so call this before handling each message.
        """
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            ended = self._refusals.event(event)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                found = self._ends.ended(int(event["value"]))
                if found is not None and ended:
                    self._gone.append(found)

    def _bury(self) -> None:
        """Handle ended connections.

        Call this once everything received on them has been read, as that may include a BYE.
        """
        while self._gone:
            ident, silent = self._gone.pop(0)
            node = self._members.nodes.get(ident)
            connections.info(
                "the connection of %s %s",
                node or "a former node",
                "has ended" if node and node.left else "is gone",
            )
            if self._lost_by_silence(node):
                why = f"this scheduler was silent for {self._silence:.1f} s, and has lost {node}"
                self._members.desert(why)
                self._gone.clear()
                return
            if silent:
                self._members.note_silence(ident)
            self._send(self._members.gone(ident, self._broke, time.monotonic()))

    def _parse(self, ident: bytes, frames: list[Any]) -> dict[str, Any] | None:
        """Decode and check ``frames``; returns None, with a log entry, if they are invalid."""
        try:
            if len(frames) != 1:
                raise messages.BadMessage(f"{len(frames)} frames; exactly one is allowed")
            message = messages.decode(frames[0].bytes)
            messages.check(message)
        except messages.BadMessage as e:
            log.warning("dropped an invalid message: %s", e)
            return None
        if message["type"] in ("HELLO", "AGAIN"):
            self._ends.note(int(frames[0].get(zmq.SRCFD)), ident)
        return message

    def _handle(self, ident: bytes, message: dict[str, Any]) -> None:
        try:
            self._send(self._dispatch(ident, message))
        except (ValueError, TypeError, KeyError, OverflowError) as e:
            log.warning("dropped an invalid %s message: %s", message["type"], e)

    def _dispatch(self, ident: bytes, message: dict[str, Any]) -> list[Output]:
        kind = message["type"]
        if kind == "HELLO":
            out = self._members.hello(ident, message)
            if any(m["type"] == "REFUSED" for _, m in out):
                log.warning("refused %s: %s", newcomer(message), out[0][1]["reason"])
            elif ident in self._members.nodes:
                log.info(
                    "arrived: %s; missing: %s",
                    self._members.nodes[ident],
                    self._members.missing_text() or "none",
                )
                connections.info("%s has connected", newcomer(message))
            return out or [(ident, self._status())]
        if kind == "AGAIN":
            out = self._members.come_back(ident, message, time.monotonic())
            verb = f"refused: {out[0][1]['reason']}" if out else "is back"
            log.info("%s %s", newcomer(message, returning=True), verb)
            return out
        if kind == "KNOWN":
            return self._members.known(ident, message)
        if kind == "ENDED":
            return self._members.ended(ident, message)
        if kind == "CANNOT":
            log.warning("%s could not start: %s", newcomer(message), message["reason"])
            return self._members.cannot_start(ident, message)
        if kind in KINDS:
            return self._observers.handle(ident, message, time.monotonic())
        if kind in ("RATE", "PEAK", "COUNTS", "TAKEN"):
            return self._members.hear_size(ident, message)
        if kind == "DECLARE":
            return self._members.declare(ident, message)
        if kind == "WAITING":
            return self._members.waiting(ident, message, time.monotonic())
        if kind == "HEARD":
            return self._members.heard(ident)
        if kind == "DOUBT":
            return self._members.doubt(ident, message)
        if kind == "JOIN":
            return self._members.join(ident, message["generation"])
        if kind == "CLEARED":
            return self._members.cleared(ident, message)
        if kind == "MOVED":
            return self._members.moved(ident, message, time.monotonic())
        if kind == "CONNECTED":
            return self._members.connected(ident, message, time.monotonic())
        if kind == "BROKEN":
            return self._members.broken(ident, message, time.monotonic())
        if kind == "AT":
            return self._members.said_at(ident, message)
        if kind == "HERE":
            return self._members.here(ident, message)
        if kind == "SYNCED":
            return self._members.synced(ident)
        if kind == "READY":
            return self._members.ready(ident, message)
        if kind == "DEPART":
            return self._members.depart(ident, message, time.monotonic())
        return self._members.bye(ident, message, time.monotonic())

    def _send(self, outputs: list[Output]) -> None:
        last, data = None, b""
        for ident, message in outputs:
            if message["type"] == "WARN":
                log.warning("%s", message["text"])
            if message is not last:  # a message for several nodes is encoded once
                fields = dict(message)
                last, data = message, messages.encode(fields.pop("type"), **fields)
            try:
                self._socket.send_multipart([ident, data])
            except zmq.ZMQError as e:
                if e.errno != zmq.EHOSTUNREACH:
                    raise
                # Not handled as a death yet: the node's BYE may be among the unread messages.
                # Handling it now would also send its messages before the rest of ``outputs``, and
                # no server may get END before the failure.
                self._read_monitor()  # it knows how the connection has ended
                self._gone.append((ident, False))
