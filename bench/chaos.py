"""``bench chaos``: kill servers and schedulers of training jobs at random until the time is over.

A job begins with a few servers. Every 0.5 to 2 s one of them is killed, or the scheduler. Another
server joins at once, another scheduler is started up to 2 s later. No step may take 10 s, and the
weights must equal those of an undisturbed job.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import time
from dataclasses import dataclass, field

from bench.jobs import TRANSPORTS, Job, progress
from bench.plain_model import digest_after
from bench.report import BenchError, Case

#: Seconds between two deaths.
EVERY = (0.5, 2.0)
#: Most seconds for which a job has no scheduler.
AWAY = 2.0
#: The part of all deaths that are those of a scheduler.
SCHEDULERS = 0.25
#: Deaths in one job.
DEATHS = 12
#: Seconds that a step may take.
LONGEST = 10.0
_MODEL = "mixed"
#: Steps that a job does at a time; a job ends with the first such block after its last death.
_BLOCK = 50
_SECONDS = 120.0


@dataclass
class Course:
    """What has happened so far.

    ``servers``, ``schedulers``: killed ones. ``longest``: of all steps, in seconds.
    """

    jobs: int = 0
    equal: int = 0
    servers: int = 0
    schedulers: int = 0
    steps: int = 0
    longest: float = 0.0
    log: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Number of killed processes."""
        return self.servers + self.schedulers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time after which no job begins (default: 10)"
    )
    parser.add_argument("--kills", type=int, help="end after so many kills instead")
    parser.add_argument("--seed", type=int, default=1, help="chooses victims and moments")
    parser.add_argument("--workers", type=int, default=2, help="workers of a job (default: 2)")
    parser.add_argument("--servers", type=int, default=3, help="servers of a job (default: 3)")
    parser.add_argument(
        "--transport",
        choices=[*sorted({*TRANSPORTS} - {"rdma"}), "all"],
        default="all",
        help="transport of the jobs; all: each in turn (default)",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return the cases. Raises :class:`BenchError` if a job fails."""
    if options.servers < 2:
        raise BenchError(f"--servers {options.servers}: at least 2, or none may be killed")
    rng, course = random.Random(options.seed), Course()
    end = time.monotonic() + 60 * (min(options.minutes, 0.5) if options.quick else options.minutes)
    ways = ["zmq", "tcp", "shm"] if options.transport == "all" else [options.transport]

    def over() -> bool:
        if options.kills is not None:
            return course.kills >= options.kills
        return time.monotonic() >= end

    while not over():
        most = DEATHS
        if options.kills is not None:
            most = min(most, options.kills - course.kills)
        one_job(ways[course.jobs % len(ways)], options, most, rng, course)
        progress(
            f"{course.jobs} jobs, {course.kills} kills, {course.steps} steps: {course.log[-1]}"
        )
    return cases(course)


class Victims:
    """The processes of a job that may die, and when the next one does."""

    def __init__(self, job: Job, most: int, rng: random.Random) -> None:
        self._job, self._rng, self._left = job, rng, most
        self._alive: list[subprocess.Popen[bytes]] = list(job.servers)
        self.servers = self.schedulers = 0
        self._next = time.monotonic() + rng.uniform(*EVERY)
        self._back: float | None = None  # when to start another scheduler

    @property
    def over(self) -> bool:
        """Whether nobody dies any more."""
        return self._left == 0 and self._back is None

    def strike(self) -> None:
        """Kill a process, or start another one in its place, if it is time."""
        now = time.monotonic()
        if self._back is not None and now >= self._back:
            self._back = None
            self._job.start_scheduler_again()
        if self._left == 0 or now < self._next:
            return
        self._next = now + self._rng.uniform(*EVERY)
        self._left -= 1
        if self._back is None and self._rng.random() < SCHEDULERS:
            self._kill_scheduler(now)
        else:
            self._kill_server()

    def _kill_scheduler(self, now: float) -> None:
        assert self._job.scheduler is not None
        self._job.scheduler.kill()
        self._job.scheduler.wait()
        self.schedulers += 1
        self._back = now + self._rng.uniform(0, AWAY)

    def _kill_server(self) -> None:
        victim = self._rng.choice(self._alive)
        self._alive.remove(victim)
        victim.kill()
        self.servers += 1
        self._job.add_server()
        self._alive.append(self._job.servers[-1])


def one_job(
    transport: str, options: argparse.Namespace, most: int, rng: random.Random, course: Course
) -> None:
    """Run a job until ``most`` of its processes have been killed, and check its weights."""
    environment = {
        "BPSX_ELASTIC": "servers",
        "BPSX_ELASTIC_WAIT": "60",
        "BPSX_FIXED_ORDER": "1",
        "BYTEPS_LOG_LEVEL": "error",
        "BPSX_ANNOUNCE": "0",
    }
    modules = dict.fromkeys(range(options.workers), "bench.elastic_worker")
    with Job(options.workers, options.servers, transport, environment, modules) as job:
        job.ask("begin", model=_MODEL, steps=0)
        victims, steps = Victims(job, most, rng), 0
        while not victims.over or not steps:
            steps += _BLOCK
            job.ask("more", steps=_BLOCK)
            while min(job.ask("passed")) < steps:
                victims.strike()
                time.sleep(0.01)
        # A block in which nobody dies.
        steps += _BLOCK
        job.ask("more", steps=_BLOCK)
        found = job.ask("end", timeout=_SECONDS + 10, seconds=_SECONDS)
    want = digest_after(_MODEL, steps, options.workers)
    equal = all(digest == want for _, digest in found)
    longest = max(b - a for times, _ in found for a, b in zip(times, times[1:]))
    course.jobs += 1
    course.equal += equal
    course.servers += victims.servers
    course.schedulers += victims.schedulers
    course.steps += steps
    course.longest = max(course.longest, longest)
    course.log.append(
        f"{transport}, {victims.servers} servers and {victims.schedulers} schedulers killed,"
        f" {steps} steps, the longest {longest:.2f} s,"
        f" {'equal' if equal else 'OTHER'} weights"
    )


def cases(course: Course) -> list[Case]:
    return [
        Case(
            "chaos-equal",
            100 * course.equal / course.jobs,
            "%",
            target=">= 100",
            samples=(course.equal, course.jobs),
            note=f"of {course.jobs} jobs that have the weights of undisturbed ones",
        ),
        Case(
            "chaos-longest",
            course.longest,
            "s",
            target=f"<= {LONGEST:g}",
            samples=(course.longest,),
            note=(
                f"longest of {course.steps} steps, with {course.servers} servers and"
                f" {course.schedulers} schedulers killed"
            ),
        ),
    ]
