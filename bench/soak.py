"""``bench soak``: start and stop jobs again and again, and count what they leave behind.

*cycles*: two workers that live through all cycles join (``init``), sum, leave (``shutdown``) and
join the next job, whose scheduler and server are new processes.

*jobs*: whole jobs by ``bpsx-run --local``, in which every process is new.

An error at once: a wrong sum, a status other than 0, a job that does not come together or does not
end. What grows is counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.failing import Roles
from bench.jobs import ROOT, ask_all, progress
from bench.report import BenchError, Case
from bpsx.config import child_environment

_LOOKS = 10
_JOB_SECONDS = 120.0
_SCRIPT = """
import numpy as np, bpsx
bpsx.init()
for step in range(3):
    assert (bpsx.push_pull(np.full(1000, bpsx.rank() + 1.0), name="x", average=False) == 3).all()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cycles", type=int, default=1000, help="repetitions of each case (default: 1000)"
    )
    parser.add_argument(
        "--only", default="cycles,jobs", help="cycles, jobs or both (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` at the first failure."""
    wanted = set(options.only.split(","))
    if unknown := wanted - {"cycles", "jobs"}:
        raise BenchError(f"--only: unknown: {', '.join(sorted(unknown))}; expected cycles or jobs")
    count = min(options.cycles, 20) if options.quick else options.cycles
    if count < 2:
        raise BenchError(f"--cycles {count}: at least 2 are needed to measure growth")
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="bpsx-soak-") as folder:
        before = _outside(folder)
        if "cycles" in wanted:
            cases += cycles(count, folder)
        if "jobs" in wanted:
            cases += jobs(count, folder)
        after = _outside(folder)
    cases += [
        Case(f"left-{name}", float(after[name] - before[name]), "", target="<= 0", note=note)
        for name, note in _OUTSIDE.items()
    ]
    return cases


def cycles(count: int, folder: str) -> list[Case]:
    """Run one job after another with the same worker processes."""
    course: list[dict[str, int]] = []
    seconds = []
    looks = {max(1, (i + 1) * count // _LOOKS) for i in range(_LOOKS)}
    with Roles(2, TMPDIR=folder, XDG_RUNTIME_DIR=folder) as job:
        for i in range(1, count + 1):
            before = time.perf_counter()
            port = None if i == 1 else job.start_roles()  # the first job's roles run already
            for op, arguments in (("init", {"port": port}), ("exchange", {}), ("leave", {})):
                ask_all(job.workers, op, **arguments)
            job.end_roles()
            seconds.append(time.perf_counter() - before)
            if i in looks:
                found = ask_all(job.workers, "resources")
                course.append({name: max(f[name] for f in found) for name in found[0]})
                progress(f"cycle {i} of {count}: {course[-1]}")
    note = f"init, sums, shutdown, end of all roles; {sum(seconds) / count:.2f} s each"
    return [Case("cycles", float(count), "cycles", samples=(count,), note=note), *_growth(course)]


def _growth(course: list[dict[str, int]]) -> list[Case]:
    """Return the growth of the worse worker from the first sample to the last.

    For memory it is the growth in the second half.
    """
    first, last, middle = course[0], course[-1], course[len(course) // 2]
    rows = [
        Case(
            f"growth-{name}",
            float(last[name] - first[name]),
            "",
            target="<= 0",
            samples=[float(c[name]) for c in course],
            note="growth from the first tenth of the samples to the end",
        )
        for name in ("descriptors", "threads", "children")
    ]
    return [
        *rows,
        Case(
            "growth-objects",
            float(last["objects"] - first["objects"]),
            "",
            target="<= 100",
            samples=[float(c["objects"]) for c in course],
            note="objects known to the garbage collector; caches of Python's own still fill",
        ),
        Case(
            "growth-rss",
            100 * (last["rss"] / middle["rss"] - 1),
            "%",
            target="<= 2",
            samples=[c["rss"] / 2**20 for c in course],
            note="in the second half; samples in MiB",
        ),
    ]


def jobs(count: int, folder: str) -> list[Case]:
    """Run whole jobs with the launcher."""
    seconds = []
    words = [
        sys.executable,
        "-m",
        "bpsx.launch",
        "--local",
        "--workers",
        "2",
        "--servers",
        "1",
        sys.executable,
        "-c",
        _SCRIPT,
    ]
    environment = child_environment(TMPDIR=folder, XDG_RUNTIME_DIR=folder)
    for i in range(1, count + 1):
        before = time.perf_counter()
        try:
            done = subprocess.run(
                words,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_JOB_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise BenchError(
                f"job {i} did not end within {_JOB_SECONDS:g} s; its output: {late.stdout!r}"
                f" {late.stderr!r}"
            ) from None
        if done.returncode:
            raise BenchError(
                f"job {i} ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        seconds.append(time.perf_counter() - before)
        if i % max(1, count // _LOOKS) == 0:
            progress(f"job {i} of {count}: {_outside(folder)}")
    return [
        Case(
            "jobs",
            float(count),
            "jobs",
            samples=(count,),
            note=f"bpsx-run --local, 2 workers and a server; {sum(seconds) / count:.2f} s each",
        )
    ]


_OUTSIDE = {
    "files": "in the temporary and the runtime folder",
    "shm": "names in /dev/shm",
    "zombies": "ended children of this process",
    "processes": "of any of the jobs",
}


def _outside(folder: str) -> dict[str, int]:
    """Return the counts of things that jobs could leave behind outside of their processes."""
    return {
        "files": sum(p.is_file() or p.is_socket() for p in Path(folder).rglob("*")),
        "shm": sum("bpsx" in name for name in os.listdir("/dev/shm")),
        **_processes(folder),
    }


def _processes(folder: str) -> dict[str, int]:
    zombies = ours = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            zombies += state == "Z" and int(parent) == os.getpid()
            ours += (
                int(entry.name) != os.getpid()
                and f"TMPDIR={folder}\0".encode() in (entry / "environ").read_bytes()
            )
        except OSError:
            continue
    return {"zombies": zombies, "processes": ours}
