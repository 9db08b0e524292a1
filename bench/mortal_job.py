"""A training job of which any process may be killed; another one then comes in its place."""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.diary import Diary, Verdict, judge
from bench.jobs import Child, Job
from bench.report import BenchError

ROLES = ("worker", "server", "scheduler")
#: Processes that may end by themselves, in a row, before they are part of the job.
_TRIES = 20
#: Seconds after which a job without a step has failed.
_STALL = 60.0


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
    """A job whose processes may be killed, by role. A context manager; not thread-safe.

    It also starts others in the place of processes that end by themselves before they are part of
    the job, as ``bpsx-run --max-restarts`` does. ``killed``: how many were, by role; ``again``:
    how many ended by themselves.
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
    ) -> None:
        """``roles``: of which processes may die. ``steps``: that the job makes at most.

        ``seconds``: of the computation in a step. ``away``: most seconds without a scheduler.
        ``rest``: seconds for which a scheduler lives at least, to take the job over.
        """
        self._loses_workers = "worker" in roles
        environment = {
            "BPSX_ELASTIC": "shrink" if self._loses_workers else "servers",
            "BPSX_ELASTIC_WAIT": "60",
            "BPSX_FIXED_ORDER": "1",
            "BYTEPS_LOG_LEVEL": "error",
            "BPSX_ANNOUNCE": "0",
        }
        modules = dict.fromkeys(range(workers), "bench.elastic_member")
        self._job = Job(workers, servers, transport, environment, modules)
        self._places, self._rng, self._away, self._rest = workers, rng, away, rest
        self._orders = {"steps": steps, "seconds": seconds}
        self._stack = ExitStack()
        self._members: list[Member] = []
        self._diaries: list[Diary] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        self._back: float | None = None  # when to start another scheduler
        self._since = time.monotonic() - rest  # when the present one was started
        self._tries = 0
        self.killed: Counter[str] = Counter()
        self.again: Counter[str] = Counter()

    def __enter__(self) -> MortalJob:
        with self._stack:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bpsx-bench-"))
            self._folder = Path(folder)
            self._stack.enter_context(self._job)
            self._servers = list(self._job.servers)
            self._members = [self._member(i) for i in range(self._places)]
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

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
        """Whether the scheduler has had its time, and the process in each worker's place trains."""
        return self._has_rested and all(m.has_model for m in self._members)

    @property
    def _has_rested(self) -> bool:
        """Whether there is a scheduler, which has had its time to take the job over."""
        return self._back is None and time.monotonic() >= self._since + self._rest

    # ---- deaths

    def kill(self, roles: Sequence[str]) -> str | None:
        """Kill a process of one of these roles; returns which role.

        None: each such death would now be the end of the job.
        """
        for role in self._rng.sample(roles, len(roles)):
            if getattr(self, f"_kill_{role}")():
                self.killed[role] += 1
                return role
        return None

    def _kill_worker(self) -> bool:
        """Kill a worker, unless too few others have the model.

        More than half of the places must have one: a scheduler that is started again needs them.
        """
        number = self._rng.randrange(self._places)
        self._members[number].diary.read()
        others = sum(m.has_model for i, m in enumerate(self._members) if i != number)
        if 2 * others <= self._places:
            return False
        self._members[number].diary.killed = True
        self._replace(number)
        return True

    def _replace(self, number: int) -> None:
        """Start another worker in a place."""
        self._job.replace_worker(number)
        self._members[number].diary.read()
        self._members[number] = self._member(number)

    def _kill_server(self) -> bool:
        victim = self._rng.randrange(len(self._servers))
        self._servers[victim].kill()
        self._start_server(victim)
        return True

    def _start_server(self, place: int) -> None:
        self._servers[place].wait()
        self._job.add_server()
        self._servers[place] = self._job.servers[-1]

    def _kill_scheduler(self) -> bool:
        assert self._job.scheduler is not None
        if not self._has_rested:
            return False
        self._job.scheduler.kill()
        self._job.scheduler.wait()
        self._back = time.monotonic() + self._rng.uniform(0, self._away)
        self.tend()
        return True

    # ---- lives

    def tend(self) -> None:
        """Start the processes that are due. Raises :class:`BenchError` if the job has failed."""
        assert self._job.scheduler is not None
        if self._back is not None:
            if time.monotonic() >= self._back:
                self._back, self._since = None, time.monotonic()
                self._job.start_scheduler_again()
        elif (status := self._job.scheduler.poll()) is not None:
            raise BenchError(f"the scheduler has ended with status {status}")
        if self.complete:
            self._tries = 0
        for place, server in enumerate(self._servers):
            if server.poll() is not None:
                self._ended("server", server.returncode)
                self._start_server(place)
        for number, member in enumerate(self._members):
            if (status := member.child.process.poll()) is not None:
                member.diary.read()
                if member.has_model:
                    raise BenchError(f"worker {number} has ended with status {status}")
                self._ended("worker", status)
                self._replace(number)

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
        return judge(self._diaries, self._places, loses_workers=self._loses_workers)


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
