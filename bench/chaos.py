"""``bench chaos``: strike processes of training jobs, one after the other, until the time is over.

Every 0.5 to 2 s a worker, a server or the scheduler is killed, stopped, cut off or asked to leave
(:mod:`bench.deaths`). In every fourth case it goes together with the one before, in every fourth a
moment later. Another worker or server is started at once, another scheduler up to 2 s later. A
scheduler lives for at least 4 s (7.5 s where processes fall silent), as it waits for 3 s
(BPSX_GATHER_GRACE) for processes that have died with the one before. No step may take 10 s, besides
the time in which a silent process does not count as dead. In each step all workers must have the
weights that follow from who was in its sums. In a job that loses no workers all must be in, so that
the weights are those of an undisturbed job.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import deaths
from bench.diary import Verdict
from bench.jobs import TRANSPORTS, progress
from bench.mortal_job import ROLES, MortalJob, Watch
from bench.network import Links
from bench.report import BenchError, Case

#: Seconds between two deaths.
EVERY = (0.5, 2.0)
#: The same, if the second one comes during the recovery.
SOON = (0.02, 0.3)
#: Most seconds for which a job has no scheduler.
AWAY = 2.0
#: Seconds for which a scheduler lives at least; with silent processes longer, by their silence.
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

    ``equal``: jobs without a fault. ``killed``, ``again``: processes by role; ``kinds``: by kind.
    ``begun``, ``counted``: steps of survivors. ``longest``: step, in seconds.
    """

    jobs: int = 0
    equal: int = 0
    steps: int = 0
    begun: int = 0
    counted: int = 0
    longest: float = 0.0
    killed: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Number of processes that were struck."""
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
        self.kinds += job.kinds
        self.again += job.again
        self.log.append(
            f"{about}: {told(job.killed)} ({by_kind(job.kinds)}), {verdict.steps} steps, the"
            f" longest {verdict.longest:.2f} s, {'equal' if equal else 'OTHER'} weights"
        )


def told(count: Counter[str]) -> str:
    """Return the numbers of processes by role, in words."""
    return ", ".join(f"{count[role]} {role}s" for role in ROLES)


def by_kind(count: Counter[str]) -> str:
    """Return the numbers of processes by kind, in words."""
    return ", ".join(f"{kind} {count[kind]}" for kind in deaths.KINDS if count[kind])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time after which no job begins (default: 10)"
    )
    parser.add_argument("--kills", type=int, help="end after so many deaths instead")
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
        "--kinds",
        default="all",
        help=f"how they die: {','.join(deaths.KINDS)}, or some of them; all (default): those that"
        " this machine can do. cut needs root, iproute2 and nftables, and not shared memory",
    )
    parser.add_argument(
        "--logs",
        metavar="FOLDER",
        help="keep what all processes say; by default, only the end of a job that fails is shown",
    )
    parser.add_argument(
        "--transport",
        choices=[*sorted({*TRANSPORTS} - {"rdma"}), "all"],
        default="all",
        help="transport of the jobs; all: each in turn (default)",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return the cases. Raises :class:`BenchError` if a job fails."""
    roles_of_jobs, kinds = _roles(options), deaths.allowed(options.kinds)
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
        way = ways[course.jobs % len(ways)]
        roles = roles_of_jobs[course.jobs % len(roles_of_jobs)]
        with _network(options, way, kinds) as links:
            job = MortalJob(
                roles,
                options.workers,
                options.servers,
                way,
                steps=2**31,
                seconds=_COMPUTATION,
                rng=rng,
                away=AWAY,
                rest=REST + (deaths.SILENCE if {*kinds} & {*deaths.SILENT} else 0.0),
                kinds=kinds if links else [kind for kind in kinds if kind != "cut"],
                links=links,
                logs=Path(options.logs) / f"job {course.jobs}" if options.logs else None,
            )
            verdict = one_job(job, roles, most, rng)
        course.add(job, verdict, way)
        for fault in verdict.faults[:5]:
            progress(fault)
        progress(f"{course.jobs} jobs, {course.kills} kills; {course.log[-1]}")
    return cases(course)


@contextlib.contextmanager
def _network(
    options: argparse.Namespace, transport: str, kinds: Sequence[str]
) -> Iterator[Links | None]:
    """The network of a job in which links are cut; None: it needs none."""
    if "cut" not in kinds or transport == "shm":
        yield None
        return
    places = [f"{role} {i}" for role in ROLES[:2] for i in range(getattr(options, f"{role}s"))]
    with Links(["scheduler", *places]) as links:
        yield links


def _roles(options: argparse.Namespace) -> list[Sequence[str]]:
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
    """Run a job until ``most`` of its processes have been struck and all are there again."""
    with job:
        watch, due = Watch(), time.monotonic() + rng.uniform(*EVERY)
        while job.killed.total() < most or not job.complete:
            watch.see(job.steps)
            job.tend()
            if job.killed.total() < most and time.monotonic() >= due and job.steps:
                due = time.monotonic() + _pause(rng)
                job.kill(roles)
            time.sleep(0.01)
        job.stop()
        return job.finish(_SECONDS)


def _pause(rng: random.Random) -> float:
    """Return the seconds until the next death."""
    chance = rng.random()
    if chance < 0.25:
        return 0.0
    return rng.uniform(*(SOON if chance < 0.5 else EVERY))


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
            note=(
                f"longest of {course.steps} steps, with {told(course.killed)} lost"
                f" ({by_kind(course.kinds)})"
            ),
        ),
    ]
