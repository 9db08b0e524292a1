"""A training job of which any process may go; another one then comes in its place."""

from __future__ import annotations

import contextlib
import math
import random
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench import deaths
from bench.deaths import Going
from bench.diary import Diary, Verdict, judge
from bench.jobs import Child, Job, progress
from bench.network import Links
from bench.report import BenchError

ROLES = ("worker", "server", "scheduler")
#: Processes that may end by themselves, in a row, before they are part of the job.
_TRIES = 20
#: Seconds after which a job without a step has failed.
_STALL = 60.0
#: Seconds between the moment in which a process counts as dead and its return: least and most.
_LATER = (0.5, 2.0)
#: What a server says once it has joined.
_JOINED = re.compile(r"server \d+: ")
#: Lines of each process that a failure shows.
_LINES = 12


@dataclass
class Member:
    """The process in a worker's place."""

    child: Child
    diary: Diary

    @property
    def has_model(self) -> bool:
        """Whether it has begun a step."""
        return bool(self.diary.begun)


class MortalJob:
    """A job whose processes may go, by role and kind. A context manager; not thread-safe.

    It also starts others in the place of processes that end by themselves before they are part of
    the job, as ``bpsx-run --max-restarts`` does. ``killed``: how many were struck, by role;
    ``kinds``: the same by kind; ``again``: how many ended by themselves.
    """

    def __init__(
        self,
        roles: Sequence[str],
        workers: int,
        servers: int,
        transport: str,
        *,
        steps: int,
        seconds: float,
        rng: random.Random,
        away: float = 0.0,
        rest: float = 0.0,
        kinds: Sequence[str] = ("kill",),
        links: Links | None = None,
        logs: Path | None = None,
    ) -> None:
        """``roles``: of which processes may die. ``steps``: that the job makes at most.

        ``seconds``: of the computation in a step. ``away``: most seconds without a scheduler.
        ``rest``: seconds for which a scheduler lives at least, to take the job over. ``kinds``: of
        :data:`bench.deaths.KINDS`. ``links``: the network in which the job runs; "cut" needs one.
        ``logs``: a folder that keeps what the processes and this job say; by default none does.
        """
        self._loses_workers = "worker" in roles
        environment = {
            "BPSX_ELASTIC": "shrink" if self._loses_workers else "servers",
            "BPSX_ELASTIC_WAIT": "60",
            "BPSX_FIXED_ORDER": "1",
            "BYTEPS_LOG_LEVEL": "info",
            "BPSX_ANNOUNCE": "0",
        }
        if {*kinds} & {*deaths.SILENT}:
            environment["PS_HEARTBEAT_INTERVAL"] = str(deaths.INTERVAL)
            environment["PS_HEARTBEAT_TIMEOUT"] = str(deaths.TIMEOUT)
        modules = dict.fromkeys(range(workers), "bench.elastic_member")
        self._about: tuple[Any, ...] = (workers, servers, transport, environment, modules, links)
        self._links, self._kinds, self._logs = links, kinds, logs
        self._places, self._rng, self._away, self._rest = workers, rng, away, rest
        self._orders = {"steps": steps, "seconds": seconds}
        self._stack = ExitStack()
        self._members: list[Member] = []
        self._diaries: list[Diary] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        self._back: float | None = None  # when to start another scheduler
        self._since = time.monotonic() - rest  # when the present one was started
        self._tries = 0
        self._going: list[Going] = []
        self._old: list[Child] = []  # workers in whose place there is another one
        self._silences: list[tuple[float, float]] = []
        self._faults: list[str] = []
        self.killed: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.again: Counter[str] = Counter()

    def __enter__(self) -> MortalJob:
        with self._stack:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bpsx-bench-"))
            self._folder = Path(folder)
            workers, servers, transport, environment, modules, links = self._about
            self._job = Job(
                workers, servers, transport, environment, modules, links, logs=self._log_folder()
            )
            self._stack.callback(self._close_old)
            self._stack.push(self._tell_failure)
            self._stack.enter_context(self._job)
            self._stack.callback(self._end_going)
            self._servers = list(self._job.servers)
            self._members = [self._member(i) for i in range(self._places)]
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *what: Any) -> None:
        self._stack.__exit__(*what)

    def _log_folder(self) -> Path:
        folder = self._logs or self._folder / "logs"
        folder.mkdir(parents=True)
        self._story = folder / "job.log"
        return folder

    def _note(self, text: str) -> None:
        """Write down what is done to the job."""
        with self._story.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now()} {text}\n")

    def _end_going(self) -> None:
        for going in self._going:
            with contextlib.suppress(BenchError):
                going.release(self._links)
            going.process.kill()

    def _close_old(self) -> None:
        for child in self._old:
            child.process.kill()
            child.close()

    def _tell_failure(self, kind: Any, *_: object) -> None:
        """Print what the processes have said last, if the job has failed."""
        if kind is None and not self._faults or kind is KeyboardInterrupt:
            return
        for log in [self._story, *sorted(self._job.logs.values())]:
            lines = log.read_text(errors="replace").splitlines()[-_LINES:]
            progress("\n".join([f"-- {log.stem}", *lines]))

    def _member(self, number: int) -> Member:
        """Let the process in a place train."""
        child = self._job.workers[number]
        diary = Diary(number, self._folder / f"diary-{len(self._diaries)}")
        self._diaries.append(diary)
        child.tell("train", diary=str(diary.path), stop=str(self._folder / "stop"), **self._orders)
        return Member(child, diary)

    # ---- what has happened

    @property
    def steps(self) -> int:
        """Number of steps that some worker has ended. Reads all diaries."""
        for member in self._members:
            member.diary.read()
        return max((d.ended[-1].step + 1 for d in self._diaries if d.ended), default=0)

    @property
    def complete(self) -> bool:
        """Whether nothing is going, the scheduler has had its time, and all workers train."""
        if self._going or not self._has_rested:
            return False
        return all(m.has_model for m in self._members)

    @property
    def _has_rested(self) -> bool:
        """Whether there is a scheduler, which has had its time to take the job over."""
        return self._back is None and time.monotonic() >= self._since + self._rest

    # ---- deaths

    def kill(self, roles: Sequence[str]) -> str | None:
        """Strike a process of one of these roles; returns which role.

        None: each such death would now be the end of the job.
        """
        for role in self._rng.sample(roles, len(roles)):
            for kind in self._rng.sample(self._kinds, len(self._kinds)):
                if deaths.can(kind, role) and getattr(self, f"_strike_{role}")(kind):
                    self.killed[role] += 1
                    self.kinds[kind] += 1
                    return role
        return None

    def _strike_worker(self, kind: str) -> bool:
        """Strike a worker, unless too few others have the model.

        More than half of the places must have one: a scheduler that is started again needs them.
        """
        number = self._rng.randrange(self._places)
        member = self._members[number]
        member.diary.read()
        others = [m for i, m in enumerate(self._members) if i != number and not self._goes(m)]
        if 2 * sum(m.has_model for m in others) <= self._places or self._goes(member):
            return False
        if kind == "kill":
            self._note(f"worker {number} (pid {member.child.pid}): kill")
            member.diary.killed = True
            self._job.workers[number].process.kill()
            self._replace(number)
        elif not member.has_model:
            return False
        else:
            going = self._strike("worker", number, member.child.process, kind)
            if kind in deaths.SILENT:
                member.diary.killed, member.diary.until = True, going.struck
        return True

    def _strike_server(self, kind: str) -> bool:
        place = self._rng.randrange(len(self._servers))
        server = self._servers[place]
        if any(going.process is server for going in self._going):
            return False
        if kind == "kill":
            self._note(f"server {place} (pid {server.pid}): kill")
            server.kill()
            server.wait()
            self._start_server(place)
        elif not _JOINED.search(self._job.logs[server.pid].read_text(errors="replace")):
            return False
        else:
            self._strike("server", place, server, kind)
        return True

    def _strike_scheduler(self, kind: str) -> bool:
        scheduler = self._job.scheduler
        assert scheduler is not None
        if not self._has_rested:
            return False
        if kind == "kill":
            self._note(f"scheduler (pid {scheduler.pid}): kill")
            scheduler.kill()
            scheduler.wait()
            self._back = time.monotonic() + self._rng.uniform(0, self._away)
            self.tend()
        else:
            self._back = math.inf
            self._strike("scheduler", 0, scheduler, kind)
        return True

    def _strike(self, role: str, place: int, process: subprocess.Popen[bytes], kind: str) -> Going:
        """Strike a process that ends later."""
        where = role if role == "scheduler" else f"{role} {place}"
        now = time.monotonic()
        going = Going(kind, role, place, where, process, self._job.logs[process.pid], now, now)
        if kind in deaths.SILENT:
            going.due = now + deaths.SILENCE + 0.2
            going.back = going.due + self._rng.uniform(*_LATER)
            # Two cannot have the scheduler's address, or one place in the network.
            going.early = kind == "stop" and role != "scheduler" and self._rng.random() < 0.5
            self._silences.append((now, now + deaths.SILENCE))
        self._going.append(going)
        self._note(str(going))
        going.strike(self._links)
        return going

    def _goes(self, member: Member) -> bool:
        return any(going.process is member.child.process for going in self._going)

    # ---- lives

    def tend(self) -> None:
        """Start the processes that are due. Raises :class:`BenchError` if the job has failed."""
        for going in list(self._going):
            self._tend_going(going)
        self._tend_scheduler()
        if self.complete:
            self._tries = 0
        gone = {id(going.process) for going in self._going}
        for place, server in enumerate(self._servers):
            if server.poll() is not None and id(server) not in gone:
                self._ended("server", server.returncode)
                self._start_server(place)
        for number, member in enumerate(self._members):
            process = member.child.process
            if (status := process.poll()) is not None and id(process) not in gone:
                member.diary.read()
                if member.has_model:
                    raise BenchError(f"worker {number} has ended with status {status}")
                self._ended("worker", status)
                self._replace(number)

    def _tend_scheduler(self) -> None:
        assert self._job.scheduler is not None
        if self._back is not None:
            if time.monotonic() >= self._back:
                self._back, self._since = None, time.monotonic()
                self._job.start_scheduler_again()
                self._note(f"scheduler: started again (pid {self._job.scheduler.pid})")
        elif (status := self._job.scheduler.poll()) is not None:
            raise BenchError(f"the scheduler has ended with status {status}")

    def _tend_going(self, going: Going) -> None:
        """Let another process come in the place of one that goes, when its time has come."""
        if going.kind in deaths.SILENT and not going.returned and going.role != "scheduler":
            going.may_stay |= not self._has_rested
        if going.early and not going.may_stay and time.monotonic() >= going.due:
            going.early = False
            self._take_place(going)
        if not going.tend(self._links):
            return
        self._going.remove(going)
        if going.stays:
            self._note(f"{going}: is still in the job")
            for member in self._members:
                if member.child.process is going.process:
                    member.diary.revive()
            return
        self._note(f"{going}: ended with status {going.process.returncode}")
        if going.fault:
            self._faults.append(going.fault)
        if going.role == "scheduler":
            self._back = time.monotonic() + self._rng.uniform(0, self._away)
        else:
            self._take_place(going)

    def _take_place(self, going: Going) -> None:
        """Start another process in the place of one that goes, unless there is one."""
        if going.role == "server" and self._servers[going.place] is going.process:
            self._start_server(going.place)
        elif going.role == "worker" and self._members[going.place].child.process is going.process:
            self._replace(going.place)

    def _replace(self, number: int) -> None:
        """Start another worker in a place."""
        self._old.append(self._job.workers[number])
        self._job.start_worker_again(number)
        self._members[number].diary.read()
        self._members[number] = self._member(number)
        self._note(f"worker {number}: started again (pid {self._members[number].child.pid})")

    def _start_server(self, place: int) -> None:
        self._job.add_server(place)
        self._servers[place] = self._job.servers[-1]
        self._note(f"server {place}: started again (pid {self._servers[place].pid})")

    def _ended(self, role: str, status: int) -> None:
        self.again[role] += 1
        self._tries += 1
        if self._tries > _TRIES:
            raise BenchError(f"{_TRIES} processes have ended; the latest: {role}, status {status}")

    # ---- the end

    def stop(self) -> None:
        """Let all workers end with the step that they make next."""
        (self._folder / "stop").touch()

    def finish(self, seconds: float) -> Verdict:
        """Wait until all workers have ended; returns what they have done.

        Those without the model have come too late; they end, too.
        """
        while self._back is not None:
            self.tend()
            time.sleep(0.01)
        for member in self._members:
            member.diary.read()
            if member.has_model:
                member.child.answer(seconds)
            else:
                member.child.process.kill()
                member.diary.killed = True
        for diary in self._diaries:
            diary.read()
        verdict = judge(
            self._diaries, self._places, loses_workers=self._loses_workers, silences=self._silences
        )
        verdict.faults += self._faults
        self._faults = verdict.faults
        return verdict


class Watch:
    """Notices a job that makes no steps."""

    def __init__(self) -> None:
        self._steps, self._since = -1, time.monotonic()

    def see(self, steps: int) -> None:
        """Note how many steps there are. Raises :class:`BenchError` if there were no others for a
        minute.
        """
        now = time.monotonic()
        if steps != self._steps:
            self._steps, self._since = steps, now
        elif now > self._since + _STALL:
            raise BenchError(f"step {steps} has not ended after {_STALL:g} s")
