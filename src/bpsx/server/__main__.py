"""Server role: ``python -m bpsx.server``.

Each lane has a thread; the main thread waits for the end of the job.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Any

# Lanes import both for the first compressed tensor; by then there may be no descriptor left.
import bpsx.compression.spec
import bpsx.planning.placement  # noqa: F401
from bpsx.config import Config
from bpsx.dtypes import BY_CODE
from bpsx.errors import BpsxError, ConfigError, in_short
from bpsx.kernels import loading
from bpsx.kernels.plugins import import_compressors
from bpsx.scheduler import failing
from bpsx.scheduler.client import Report, SchedulerLink
from bpsx.scheduler.waiting import introduce, patience
from bpsx.server._engine import Lane
from bpsx.server.broken import Broken
from bpsx.server.marks import Marks
from bpsx.system.address import join_host_port
from bpsx.system.descriptors import can_have_own
from bpsx.system.host import (
    allow_descriptors,
    heed_signals,
    hold,
    keep_memory,
    own_host,
    require_descriptors,
    require_trust,
)
from bpsx.system.logs import configure
from bpsx.system.threads import NamedThread
from bpsx.telemetry._recorder import monotonic_ns
from bpsx.telemetry.reporter import Reporter
from bpsx.transports import open_endpoint
from bpsx.transports.base import Endpoint

log = logging.getLogger("bpsx.server")
connections = logging.getLogger("bpsx.connections")
#: Seconds that a failed server stays at most, so that workers learn which process has died before
#: they lose their servers too.
LINGER_SECONDS = 2.0


class Server:
    """One server process: its lanes, and its link to the scheduler.

    :meth:`run` blocks until the job is over.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._over = threading.Event()
        self._failed = threading.Event()
        self._failure = ""
        self._joined = False
        #: Whether this server has asked the scheduler to join, or has joined.
        self.introduced = False
        self._signal = 0
        self._elastic = False  # whether the job may go on without this server
        self._asked = False  # this server has asked the scheduler to let it leave
        self._lanes: list[Lane] = []
        self._numbers = range(0)  # this server's lanes, as the job counts them
        self._threads: list[threading.Thread] = []
        self._link: SchedulerLink
        self._reporter: Reporter
        self._broken: Broken
        self._marks: Marks

    def run(self) -> int:
        """Join the job and sum until it ends; return the exit status.

        Raises :class:`~bpsx.errors.BpsxError` if the job does not begin.
        """
        config = self._config
        keep_memory(config.keep_memory)
        host = own_host(config)
        require_trust(config, host)
        endpoints = [open_endpoint(config) for _ in range(config.lanes)]
        link = SchedulerLink(config)
        try:
            self._link = link
            # Load while the other processes still start. Later, strangers' connections may have
            # used up the descriptors that loading needs; a codec is then loaded with others.
            with loading(*BY_CODE, codecs=not can_have_own()):
                lanes = [e.bind(host, config.ports or ()) for e in endpoints]
                self.introduced = True
                welcome = link.enter_job("server", -1, host, lanes)
                # Before anything slow: workers are connecting already and do not wait for long.
                for i, endpoint in enumerate(endpoints):
                    endpoint.join(welcome["job"], i)
            self._numbers = range(welcome["first"], welcome["first"] + len(lanes))
            self._elastic = welcome["elastic"]
            self._joined = True
            self._reporter = Reporter(
                config,
                "server",
                welcome["rank"],
                host,
                writers=len(endpoints),
                workers=welcome["workers"],
                processes=welcome["processes"],
            )
            self._reporter.attach(link.send, self._stats, welcome["job"])
            self._broken = Broken(
                endpoints,
                dict(welcome["peers"]),
                welcome["processes"],
                # A worker that has lost all its lanes must see its own verdict first.
                max(config.heartbeat_timeout, 2 * patience(config, self._elastic)),
            )
            self._marks = Marks(
                welcome["size"],
                [rank for rank, _ in welcome["peers"]],
                welcome["joins"],
                welcome["term"],
                welcome["dropped"],
            )
            try:
                self._start_lanes(endpoints, welcome)
                link.start(
                    self._handle,
                    lost=self._alone,
                    tick=self._tick,
                    watch=[(self._broken.descriptor, self._look)],
                    report=self._report,
                    resumed=self._resume,
                )
            # Whatever it is (no threads, no memory): without this the job would not learn that the
            # server has ended.
            except Exception as error:
                self._end_lanes()
                link.give_up(f"this server cannot start: {in_short(error)}")
                raise BpsxError(f"cannot start: {in_short(error)}") from error
            self._wait()
            self._stop(link)
        finally:
            link.stop()
            for endpoint in endpoints:
                endpoint.close()
        return 1 if self._failure else 0

    def _start_lanes(self, endpoints: list[Endpoint], welcome: dict[str, Any]) -> None:
        config = self._config
        for i, endpoint in enumerate(endpoints):
            lane = Lane(
                endpoint,
                job=welcome["job"],
                senders=welcome["workers"],
                processes=welcome["processes"],
                fixed_order=config.fixed_order,
                asynchronous=config.asynchronous,
                elastic=welcome["elastic"],
                scheduled=config.server_schedule,
                spin_us=config.spin_us,
                log=log.error,
                watch=self._reporter.watchers[i],
                secret=config.secret_bytes,
                joins=welcome["joins"],
                log_ratio=config.elastic_log if welcome["elastic"] else 0,
                shrinks=welcome["shrinks"],
                term=welcome["term"],
                vacant=welcome["vacant"],
            )
            self._lanes.append(lane)
        # This server may be late: repeat the losses, departures and joins that earlier ones know.
        for rank, term in welcome["dropped"]:
            self._go_without(rank, term)
        for left in welcome["left"]:
            self._handle(left)
        for rank in welcome["joined"]:
            self._handle({"type": "JOINED", "rank": rank, "generation": welcome["joins"]})
        for i, lane in enumerate(self._lanes):
            thread = NamedThread(target=self._run_lane, args=(lane,), name=f"bpsx-lane-{i}")
            thread.start()
            self._threads.append(thread)
        log.info("server %d: %s", welcome["rank"], ", ".join(e.address for e in endpoints))

    def _end_lanes(self) -> None:
        for lane in self._lanes:
            lane.stop()
        for thread in self._threads:
            thread.join()

    def _run_lane(self, lane: Lane) -> None:
        try:
            lane.run()
        # Whatever it is (no memory, no kernels): workers would wait for this lane for ever.
        except Exception as e:
            self._lost(f"a lane ended with an error: {e}")

    def _wait(self) -> None:
        while not self._over.wait(0.25):
            if self._asked and self._link.goodbye.is_set() and not self._failure:
                log.warning("other servers take the keys over; this one ends")
                return
            if self._signal:
                self._lost(f"ended by {signal.Signals(self._signal).name}")
                return
            if self._failed.is_set():
                self._over.wait(LINGER_SECONDS)
                return

    def _ask_to_leave(self) -> None:
        self._link.send("DEPART", why="SIGTERM", needs="")

    def _resume(self) -> None:
        """The job has a scheduler again, which can explain broken connections."""
        self._broken.restart()
        if self._asked:
            self._ask_to_leave()

    def _stop(self, link: SchedulerLink) -> None:
        self._end_lanes()
        self._reporter.close()
        link.leave(self._failure, self._config.shutdown_timeout)
        for i, lane in enumerate(self._lanes):
            counters = lane.counters()
            level = (
                logging.WARNING if counters["malformed"] or counters["dropped"] else logging.INFO
            )
            log.log(level, "lane %d: %s", i, ", ".join(f"{k} {v}" for k, v in counters.items()))

    def _stats(self) -> dict[str, int]:
        """Return the sum of all lanes' counters."""
        parts = [
            {**lane.counters(), **watcher.stats()}
            for lane, watcher in zip(self._lanes, self._reporter.watchers)
        ]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    @property
    def serving(self) -> bool:
        """Whether workers may need this server: it has joined, and the job has not failed."""
        return self._joined and not self._failure

    def leave(self) -> bool:
        """Ask the scheduler to let this server leave the running job; for a signal's handler.

        Returns whether it may: then :meth:`run` ends as soon as others have taken the keys over.
        """
        if self._elastic and not self._asked:
            self._asked = True
            self._ask_to_leave()
        return self._elastic

    def interrupt(self, signum: int) -> None:
        """Handle a signal: the job fails and reports the signal.

        Before the server has joined it just exits, because there is no job to inform.
        """
        if not self._joined:
            raise SystemExit(128 + signum)
        # Only set a field: the main thread may hold the lock that an Event would need.
        self._signal = signum

    def orphaned(self) -> None:
        """Exit because the process that started this one is gone. Any thread may call it.

        Does nothing once the job has begun, because the job itself notices lost processes.
        """
        if not self._joined:
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "LEFT":
            connections.info("worker %d has left", message["rank"])
            self._marks.leave(message["rank"], message["host"], message["pid"])
            self._broken.left(message["rank"])
            for lane in self._lanes:
                lane.gone(message["rank"])
        elif kind == "JOINED":
            news = self._marks.join(message["rank"], message["generation"])
            for lane in self._lanes if news else ():
                lane.joined(message["rank"])
        elif kind == "CLEAR":
            self._clear(message)
            self._link.send("CLEARED", generation=message["generation"])
        elif kind == "TERM":
            self._begin_term(message)
        elif kind == "STAY":
            log.warning(
                "this server has to stay until the job ends or BPSX_TERM_GRACE is over: %s",
                message["text"],
            )
        elif kind == "LOST":
            self._lost(message["text"])
        elif kind == "END":
            self._over.set()
        else:
            self._reporter.handle(message)

    def _clear(self, message: dict[str, Any]) -> None:
        """Count rounds from zero, and on workers that enter."""
        if not self._marks.clear(message["generation"]):
            return
        term, ranks = message["term"], [rank for rank, _ in message["entering"]]
        for rank, name in message["entering"]:
            self._marks.enter(rank, term)
            self._broken.came(rank, name)
        for lane in self._lanes:
            lane.all_joined(ranks, term)

    def _begin_term(self, message: dict[str, Any]) -> None:
        """Go on without the servers or workers that TERM names, or end if this is one of them.

        The lanes learn from the workers which keys they get.
        """
        text = message["text"]
        if any(lane in self._numbers for lane, _ in message["moves"]):
            self._lost(f"this server has been replaced: {text}")
            return
        log.info("%s", text)
        self._reporter.mark(f"term {message['term']}", monotonic_ns(), why=text)
        for rank in message["dropped"]:
            self._drop(rank, message["term"])

    def _drop(self, rank: int, term: int) -> None:
        """Go on without a worker, unless another one has its place already."""
        if self._marks.drop(rank, term):
            self._go_without(rank, term)

    def _go_without(self, rank: int, term: int) -> None:
        self._broken.left(rank)
        for lane in self._lanes:
            lane.drop(rank, term)

    def _report(self) -> Report:
        """Return the fields of AGAIN, for a restarted scheduler."""
        heard = max((lane.latest_term for lane in self._lanes), default=0)
        numbers = self._numbers_named()
        fields = self._marks.report(self._failure, self._broken.ranks, heard, numbers, self._asked)
        return fields, []

    def _numbers_named(self) -> dict[str, Any]:
        """Return the numbers of slots and keys that workers have named to the lanes."""
        named = [lane.named for lane in self._lanes]
        slots = [[number, n] for number, (n, _) in zip(self._numbers, named, strict=False)]
        return {"slots": slots, "key": max((keys for _, keys in named), default=0) - 1}

    def _look(self) -> None:
        """Note broken connections, and tell a scheduler that rebuilds the job of them."""
        known = self._broken.ranks
        self._broken.look()
        if self._broken.ranks != known:
            numbers = self._numbers_named()
            self._link.add_to_report("ENDED", broken=self._broken.ranks, **numbers)

    def _tick(self) -> None:
        if self._link.away and self._marks.all_left:
            self._over.set()
        if not self._link.away and (text := self._broken.verdict()):
            self._lost(text)
        self._reporter.tick()

    def _alone(self, text: str) -> None:
        """End because the scheduler is gone.

        The workers notice that themselves, so there is nothing to wait for.
        """
        if not self._marks.all_left:
            self._lost(text)
        self._over.set()

    def _lost(self, text: str) -> None:
        if not self._failure and not self._over.is_set():
            self._failure = text
            log.error("%s", text)
            self._failed.set()


def main() -> int:
    """Run a server; return the exit status: 0 after a job that ended well."""
    config, server = None, None
    try:
        config = Config(role="server")
        configure(config, "server")
        config.check()
        allow_descriptors()
        require_descriptors("server")
        introduce(config, join_host_port(config.root_uri, config.root_port))
        import_compressors(config.compressors)
        server = Server(config)
        heed_signals(
            "server", server.interrupt, lambda: server.serving, config.term_grace, server.leave
        )
        if config.lifeline_fd >= 0:
            hold(config.lifeline_fd, server.orphaned)
        return server.run()
    except Exception as e:
        if server is None or not server.introduced:
            failing.tell("server", e, config)
        if not isinstance(e, BpsxError):
            raise
        print(f"bpsx server: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
