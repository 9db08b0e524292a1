"""The control thread's part of a session: handles the scheduler's messages, deaths and broken
connections.
"""

from __future__ import annotations

import logging
from typing import Any

from bpsx.config import Config
from bpsx.core._late_lanes import LateLanes
from bpsx.errors import Status
from bpsx.local.devices import Devices
from bpsx.local.neighbourhood import Neighbourhood
from bpsx.scheduler.client import Report, SchedulerLink
from bpsx.session.boundaries import Boundaries
from bpsx.session.company import Company
from bpsx.session.decisions import parts
from bpsx.session.declarations import Declarations
from bpsx.session.lanes import Lanes
from bpsx.session.late_servers import LateServers
from bpsx.session.states import OVER, Event, Life
from bpsx.telemetry._recorder import monotonic_ns

log = logging.getLogger("bpsx.session.session")
#: Seconds between two reports of what the links carry.
PEAK_SECONDS = 10.0


class Liveness(Declarations):
    """The part of a session that its control thread runs."""

    _lanes: Lanes
    _near: Neighbourhood
    _endpoint: Any
    _company: Company
    devices: Devices
    config: Config
    job: int
    number: int

    def __init__(self, order: dict[str, int]) -> None:
        super().__init__(order)
        self._failure = ""  # why the job has failed
        self._goes_on = False  # ... for this process, while the others go on
        #: Number of times that workers have joined the running job; equal on all when they go on.
        self.entries = 0
        self._boundaries = Boundaries(self._life)
        self._why_leave = ""  # why this worker has asked to leave the running job
        self._asked_ns = 0  # when it has
        # None: this process does not speak to servers, or they cannot change.
        self._late: LateServers | None = None
        self._begun: dict[int, tuple[int, str]] = {}  # terms that this process moves to: when, why
        # Whether the partitions' size may change; when the peak has been told.
        self._tells_peaks, self._peak_told_ns = False, monotonic_ns()

    @property
    def state(self) -> Life:
        """The session's state."""
        return self._life.state

    def _listen(self) -> None:
        """Start the driver's own thread, and the control thread, from which on messages come."""
        link = self._link
        if link is None:
            return
        self._core.start()
        self.reporter.attach(
            link.send, lambda: {**self._core.counters(), **self._core.gauges()}, self.job
        )
        lanes, life = self._lanes, self._life
        if self._near.has_lanes and self.config.may_lose_servers:
            self._late = LateServers(
                lanes,
                LateLanes(self._core),
                self._endpoint,
                link,
                self.config.secret_bytes,
                # Of a worker that joins late itself, they are among the servers of WELCOME.
                range(self.config.num_server, len(self._decisions.servers)),
            )

        def look() -> None:
            gone = (Life.DEPARTED, Life.LEAVING, Life.CLOSED)
            lanes.take_broken(leaving=life.state in gone)
            self._tell_moved()
            if self._late is not None:
                self._late.look()

        watched = [(lanes.descriptor, look), (self._core.moved_descriptor, look)]
        link.start(
            self._handle,
            lost=self._peer_lost,
            tick=self._tick,
            watch=[(descriptor, call) for descriptor, call in watched if descriptor >= 0],
            report=self._report,
            resumed=self._resume,
        )

    def _report(self) -> Report:
        """Return the fields of AGAIN, and the messages KNOWN, for a restarted scheduler."""
        with self._lock:
            fields = {
                "size": self.config.size,
                "failure": None if self._goes_on else self._failure or None,
                "cleared": self._decisions.cleared,
                "state": self._decisions.report(
                    self._epoch,
                    self.state is Life.JOINED,
                    self._boundaries.fresh,
                    self._lanes.broken,
                    self._boundaries.awaits_goodbye,
                    self._goes_on,
                ),
            }
            return fields, parts(self._decisions.known(self._declared))

    def _resume(self) -> None:
        """The job has a scheduler again, which can explain broken connections."""
        assert self._link is not None
        self.reporter.mark("no scheduler", self._link.gone_ns)
        self._lanes.restart()
        self._send_unanswered()
        self._ask_to_leave()
        if not self._boundaries.fresh:  # perhaps not any more since AGAIN has been sent
            self._link.send("SYNCED")
        if self._late is not None:
            self._late.repeat()

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "PLACED":
            self._placed(message["name"], message["generation"], message["places"])
        elif kind == "FAILED":
            for name, generation in message["tensors"]:
                self._fail_declaration(name, generation, message["status"], message["text"])
            self._say_heard()
        elif kind == "RESET":
            self._reset(message["epoch"], message["status"], message["text"])
            self._say_heard()
        elif kind in ("ALL_JOINED", "UNJOINED"):
            if kind == "ALL_JOINED":
                self._joining.check_expected()  # lanes that restart by mistake confuse servers
            self.devices.announce_joined(kind == "UNJOINED")
            if kind == "ALL_JOINED":
                self._decisions.last = message["last"]
                self._count_from_zero()
            self._joining.hear(message)
        elif kind in ("COUNT", "CHANGE", "HOLD", "DROP"):
            self._resize(message)
        elif kind == "WARN":
            log.warning("%s", message["text"])
        elif kind == "LOST":
            self._goes_on = bool(message.get("goes_on"))
            self._peer_lost(message["text"], message.get("status", Status.PEER_LOST))
        elif kind == "TERM":
            self._begin_term(message)
        elif kind == "LANES" and self._late is not None:
            log.info("%s joins the running job", message["name"])
            self.reporter.mark(f"{message['name']} joins", monotonic_ns())
            self._decisions.come(message)
            self._late.come(message)
        elif kind == "GONE":
            log.warning("%s", message["text"])
            self._decisions.gone.update(message["lanes"])
            if self._late is not None:
                self._late.end(message["lanes"], message["text"])
        elif kind in ("SOON", "MEET", "OFF"):
            assert self._link is not None
            self._boundaries.hear(message, self._link.send)
        elif kind == "DEPART":  # another process of this machine has asked to leave
            self._note_wish(message["why"])
        elif kind == "STAY":
            log.warning("worker %d cannot leave the job now: %s", self.number, message["text"])
        elif kind == "GOODBYE":
            self._boundaries.let_go(self._tell_departure)
        elif kind == "ADOPT":
            self._adopt(message)
        elif kind in ("JOINED", "CLEAR") and message["generation"] < self._decisions.cleared:
            self._tell_cleared(message)  # another scheduler repeats what the one before had sent
        elif self._near.hear(message):
            self._core.notify()
            self._tell_cleared(message)
        else:
            self.reporter.handle(message)

    def _tell_departure(self) -> None:
        """Log that this worker has left the job, in which the others go on."""
        log.warning("worker %d has left the job: %s", self.number, self._why_leave)
        self.reporter.mark("leaves the job", self._asked_ns, why=self._why_leave)

    def _tell_cleared(self, message: dict[str, Any]) -> None:
        """Confirm ``message`` if it is a CLEAR."""
        if message["type"] == "CLEAR" and self._link is not None:
            self._decisions.cleared = max(self._decisions.cleared, message["generation"] + 1)
            self._link.send("CLEARED", generation=message["generation"])

    def _begin_term(self, message: dict[str, Any]) -> None:
        """Go on without a server or a worker: hand what TERM says to the core.

        A process that does not speak to servers has no keys to move. ``message``: TERM.
        """
        moves, text, dropped = message["moves"], message["text"], message["dropped"]
        log.warning("%s", text)
        self._decisions.begin_term(message)
        self._company.lose(dropped)
        if dropped and (what := self._company.needed_by):
            self._peer_lost(f"{text}; but {what} needs all workers")
            return
        if message["entered"]:
            self._count_on(message)
        elif self._near.has_lanes:
            self._begun[message["term"]] = monotonic_ns(), text
            self._lanes.lose((lane for lane, _ in moves), text)
            self._core.begin_term(
                message["term"],
                [(lane, _pairs(targets)) for lane, targets in moves],
                bool(message["missed"]),
                [(lane, limit, _pairs(targets)) for lane, limit, targets in message["yields"]],
                message["living"],
            )
        else:
            self.reporter.mark(f"term {message['term']}", monotonic_ns(), why=text)
        self._boundaries.lose(dropped)
        # Last: a script that divides by the new number of workers must push in the new term.
        if message["met"] or not self._boundaries.used:
            self._company.show()
        if message["met"]:
            entered = message["entered"]
            self._boundaries.meet(entered, self.number in entered, message["leaving"])

    def _count_from_zero(self) -> None:
        """Have lanes count rounds from zero, before any thread of the script goes on."""
        self._decisions.joins += 1
        self._calls = 0  # a worker that joined earlier has asked for fewer push_pulls
        self._begin_counts()
        self._core.all_joined()

    def _count_on(self, message: dict[str, Any]) -> None:
        """Add workers that have joined, perhaps this one. ``message``: TERM."""
        entered = message["entered"]
        self._count_from_zero()
        if self._near.has_lanes:
            self._core.begin_term(message["term"], [], living=message["living"], enters=True)
        self.reporter.mark(f"term {message['term']}", monotonic_ns(), why=message["text"])
        self._company.enter(entered)
        self.entries += 1

    def _tell_moved(self) -> None:
        """Tell the scheduler of each term in which this worker's partitions have moved."""
        if self._link is None:
            return
        for term, partitions, again in self._core.take_moved():
            self._decisions.moved = (term, partitions, again)
            begun, why = self._begun.pop(term, (monotonic_ns(), ""))
            self.reporter.mark(
                f"term {term}", begun, why=why, partitions=partitions, bytes_pushed_again=again
            )
            self._link.send("MOVED", term=term, partitions=partitions, again=again)

    def _note_wish(self, why: str) -> None:
        """Note that this worker wants to leave the running job. Signal handlers may call it."""
        self._asked_ns = self._asked_ns or monotonic_ns()
        self._why_leave, self._boundaries.asked = self._why_leave or why, True

    def _ask_to_leave(self) -> None:
        """Tell the scheduler if this worker wants to leave. Signal handlers may call it."""
        if self._why_leave and self._link is not None:
            self._link.send("DEPART", why=self._why_leave, needs=self._company.needed_by)

    def _say_heard(self) -> None:
        """Tell the scheduler that the error has arrived.

        Workers that want to leave wait until all workers have heard of it.
        """
        if self._link is not None:
            self._link.send("HEARD")

    def _peer_lost(self, text: str, status: int = Status.PEER_LOST) -> None:
        """End the job: fail everything in progress and everything that is asked for later."""
        with self._lock:  # leaving takes the failure along, or this is too late to matter
            counts = self.state not in (Life.FAILED, Life.DEPARTED, Life.LEAVING, Life.CLOSED)
            self._life.move(Event.JOB_FAILS)
            if not counts:
                return
            self._failure = text
        log.error("%s", text)
        self._core.fail(status, text)
        if lost := self._core.cut_off():
            log.error(
                "%d results did not arrive on the GPU, and are NaN (integers: all bits set): %s",
                len(lost),
                ", ".join(lost[:10]),
            )
        self._end_pending(status, text)

    def _gpu_failed(self, text: str) -> None:
        """Fail what needs the machine's GPUs after their communicator could not be set up.

        Thread bpsx-nccl calls it. The work fails here, and elsewhere when this worker leaves.
        """
        self._core.fail(Status.DEVICE, text)
        self._life.move(Event.CORE_FAILS)
        self._end_pending(Status.DEVICE, text)

    def _report_broken(self, away: bool) -> None:
        """Have the scheduler replace servers that this worker does not reach any more."""
        if self._link is not None and self._link.outlives_scheduler and not away:
            for server, alone in self._lanes.take_suspects():
                self._link.send("BROKEN", server=server, alone=alone)

    def _tick(self) -> None:
        """Check for broken connections, report waits, and free finished handles; called once a
        second.

        A broken connection counts as a death if the scheduler has sent no message about it in time.
        Without a scheduler there is no verdict.
        """
        self._lanes.note_mute(self._core.mute)
        away = self._link is not None and self._link.away
        self._report_broken(away)
        if not away and (gone := self._lanes.verdict()):
            self._peer_lost(gone)
        if self.state not in OVER and self._core.failed:
            self._life.move(Event.CORE_FAILS)
        if self._near.machine is not None and (
            self._near.machine.deserted or self._near.machine.collects
        ):
            # Another local process may have posted, before it learned of the failure, to an idle
            # root that would never reply. Or the root may have posted work that has failed here.
            self._core.notify()
        self._core.reap()
        self.compressing.check_told()
        self.reporter.tick()
        if self._link is not None and not away:
            self._report_waiting(min(1.0, self.config.stall_warn / 2))
            self._report_peak(self._link)

    def _report_peak(self, link: SchedulerLink) -> None:
        """Tell the scheduler what the links have carried, every :data:`PEAK_SECONDS`."""
        now = monotonic_ns()
        if self._tells_peaks and now - self._peak_told_ns >= PEAK_SECONDS * 1e9:
            self._peak_told_ns = now
            if rate := self._core.take_peak():
                link.send("PEAK", rate=rate)


def _pairs(targets: list[list[int]]) -> list[tuple[int, int]]:
    return [(lane, base) for lane, base in targets]
