"""``bench chaos``: kill processes of training jobs, one after the other, until the time is over.

Every 0.5 to 2 s a worker, a server or the scheduler is killed. Another worker or server is started
at once, another scheduler up to 2 s later. A scheduler lives for at least 4 s, as it waits for 3 s
(BPSX_GATHER_GRACE) for processes that have died with the one before. No step may take 10 s. In each
step all workers must have the weights that follow from who was in its sums. In a job that loses no
workers all must be in, so that the weights are those of an undisturbed job.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.diary import Verdict
from bench.jobs import TRANSPORTS, progress
from bench.mortal_job import ROLES, MortalJob, Watch
from bench.report import BenchError, Case

#: Seconds between two deaths.
EVERY = (0.5, 2.0)
#: Most seconds for which a job has no scheduler.
AWAY = 2.0
#: Seconds for which a scheduler lives at least.
REST = 4.0
#: Deaths in one job.
DEATHS = 12
#: Seconds that a step may take.
LONGEST = 10.0
#: Seconds of the computation in a step.
_COMPUTATION = 0.01
_SECONDS = 120.0


@dataclass
class Course:
    """Sums over all jobs so far.

    ``equal``: jobs without a fault. ``killed``, ``again``: processes by role. ``begun``,
    ``counted``: steps of survivors. ``longest``: step, in seconds.
    """

    jobs: int = 0
    equal: int = 0
    steps: int = 0
    begun: int = 0
    counted: int = 0
    longest: float = 0.0
    killed: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Number of killed processes."""
        return self.killed.total()

    def add(self, job: MortalJob, verdict: Verdict, about: str) -> None:
        """Add a job that has ended."""
        equal = not verdict.faults and not verdict.discarded
        self.jobs += 1
        self.equal += equal
        self.steps += verdict.steps
        self.begun += verdict.begun
        self.counted += verdict.counted
        self.longest = max(self.longest, verdict.longest)
        self.killed += job.killed
        self.again += job.again
        self.log.append(
            f"{about}: {told(job.killed)} killed, {verdict.steps} steps, the longest"
            f" {verdict.longest:.2f} s, {'equal' if equal else 'OTHER'} weights"
        )


def told(count: Counter[str]) -> str:
    """Return the numbers of processes by role, in words."""
    return ", ".join(f"{count[role]} {role}s" for role in ROLES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time after which no job begins (default: 10)"
    )
    parser.add_argument("--kills", type=int, help="end after so many kills instead")
    parser.add_argument("--seed", type=int, default=1, help="chooses victims and moments")
    parser.add_argument("--workers", type=int, default=4, help="workers of a job (default: 4)")
    parser.add_argument("--servers", type=int, default=3, help="servers of a job (default: 3)")
    parser.add_argument(
        "--roles",
        default="all",
        help=f"which processes die: {','.join(ROLES)}, or some of them; all (default): in every"
        " second job all three, in the others servers and schedulers",
    )
    parser.add_argument(
        "--transport",
        choices=[*sorted({*TRANSPORTS} - {"rdma"}), "all"],
        default="all",
        help="transport of the jobs; all: each in turn (default)",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return the cases. Raises :class:`BenchError` if a job fails."""
    kinds = _kinds(options)
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
        way, roles = ways[course.jobs % len(ways)], kinds[course.jobs % len(kinds)]
        job = MortalJob(
            roles,
            options.workers,
            options.servers,
            way,
            steps=2**31,
            seconds=_COMPUTATION,
            rng=rng,
            away=AWAY,
            rest=REST,
        )
        verdict = one_job(job, roles, most, rng)
        course.add(job, verdict, way)
        for fault in verdict.faults[:5]:
            progress(fault)
        progress(f"{course.jobs} jobs, {course.kills} kills; {course.log[-1]}")
    return cases(course)


def _kinds(options: argparse.Namespace) -> list[Sequence[str]]:
    """Return the roles that die, of one job after the other."""
    if options.roles == "all":
        kinds: list[Sequence[str]] = [ROLES, ROLES[1:]]
    else:
        kinds = [options.roles.split(",")]
    if unknown := set(kinds[0]) - {*ROLES}:
        raise BenchError(f"--roles: unknown: {', '.join(sorted(unknown))}")
    for role, least in (("server", 2), ("worker", 3)):
        number = getattr(options, f"{role}s")
        if role in kinds[0] and number < least:
            raise BenchError(f"--{role}s {number}: at least {least}, or none may be killed")
    return kinds


def one_job(job: MortalJob, roles: Sequence[str], most: int, rng: random.Random) -> Verdict:
    """Run a job until ``most`` of its processes have been killed and all are there again."""
    with job:
        watch, due = Watch(), time.monotonic() + rng.uniform(*EVERY)
        while job.killed.total() < most or not job.complete:
            watch.see(job.steps)
            job.tend()
            if job.killed.total() < most and time.monotonic() >= due and job.steps:
                due = time.monotonic() + rng.uniform(*EVERY)
                job.kill(roles)
            time.sleep(0.01)
        job.stop()
        return job.finish(_SECONDS)


def cases(course: Course) -> list[Case]:
    again = course.again.total()
    return [
        Case(
            "chaos-equal",
            100 * course.equal / course.jobs,
            "%",
            target=">= 100",
            samples=(course.equal, course.jobs),
            note=f"of {course.jobs} jobs whose workers have the right weights in each step",
        ),
        Case(
            "chaos-discarded",
            course.begun - course.counted,
            "steps",
            target="<= 0",
            samples=(course.begun - course.counted, course.begun),
            note=f"of {course.begun} that survivors began; {again} newcomers had to start twice",
        ),
        Case(
            "chaos-longest",
            course.longest,
            "s",
            target=f"<= {LONGEST:g}",
            samples=(course.longest,),
            note=f"longest of {course.steps} steps, with {told(course.killed)} killed",
        ),
    ]
