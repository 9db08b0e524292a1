"""``bench trust``: how soon a death is known, what joining costs, and how long a job takes to start
and stop.

docs/run/trust.md describes the measurements.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from bench import handshake as mechanisms
from bench import machine
from bench.failing import ROLES, STAGES, Outcome, Roles, strike
from bench.jobs import ROOT, ask_all, progress
from bench.report import BenchError, Case, median_case
from bpsx.config import child_environment

#: Promised seconds from the moment when a death can be known until every process has an exception.
PROMISED = 5.0
_INTERVAL, _TIMEOUT = 0.5, 2.0
_KILLS = tuple(f"kill-{role}" for role in ROLES)
_STOPS = tuple(f"stop-{role}" for role in ROLES)
#: Modules of other benchmarks that add cases here. Each has ``trust_cases(quick: bool) ->
#: list[Case]``.
_OTHERS = {"trace-overhead": "bench.trace", "fuzz": "bench.fuzz"}
_SCRIPT = """
import sys, time
import bpsx
bpsx.init()
bpsx.barrier()
print("up", time.monotonic(), flush=True)
bpsx.barrier()
print("down", time.monotonic(), flush=True)
bpsx.shutdown()
"""


def _offered() -> list[str]:
    here = [
        name for name, module in _OTHERS.items() if importlib.util.find_spec(module) is not None
    ]
    return [*_KILLS, *_STOPS, "handshake", "start-stop", *here]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default=",".join(_offered()),
        help="cases to run, separated by commas (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    wanted = set(options.only.split(","))
    if unknown := wanted - set(_offered()):
        raise BenchError(
            f"--only: unknown: {', '.join(sorted(unknown))}; expected {', '.join(_offered())}"
        )
    turns = 1 if options.quick else 3
    cases = kills([r for r in ROLES if f"kill-{r}" in wanted], turns)
    cases += stops([r for r in ROLES if f"stop-{r}" in wanted], turns)
    if "handshake" in wanted:
        cases += handshakes(2 if options.quick else 15)
    if "start-stop" in wanted:
        cases += start_stop(2 if options.quick else 11)
    for name, module in _OTHERS.items():
        if name in wanted:
            progress(name)
            cases += importlib.import_module(module).trust_cases(options.quick)
    return cases


def kills(roles: list[str], turns: int) -> list[Case]:
    """Send SIGKILL to each role at each stage; the case of a role is its worst stage."""
    cases: list[Case] = []
    for role in roles:
        found: dict[str, list[Outcome]] = defaultdict(list)
        for turn in range(turns):
            for stage in STAGES:
                progress(f"kill-{role}: {stage}, turn {turn + 1} of {turns}")
                found[stage].append(strike(role, stage))
        rows = [
            median_case(
                f"kill-{role}.{stage}",
                [o.raised for o in outcomes],
                "s",
                peer=PROMISED,
                note=(
                    f"all processes gone after {statistics.median(o.gone for o in outcomes):.2f} s"
                ),
            )
            for stage, outcomes in found.items()
        ]
        worst = max(rows, key=lambda row: row.value)
        cases.append(
            Case(
                f"kill-{role}",
                worst.value,
                "s",
                peer=PROMISED,
                target="<= 1",
                samples=worst.samples,
                note=(
                    "from kill -9 to the exception on the others, worst stage:"
                    f" {worst.case.partition('.')[2]}"
                ),
            )
        )
        cases += rows
    return cases


def stops(roles: list[str], turns: int) -> list[Case]:
    """Send SIGSTOP to each role.

    Only silence shows that a process has stopped, so the time in which it may stay unnoticed is
    subtracted.
    """
    heartbeats = {"PS_HEARTBEAT_INTERVAL": str(_INTERVAL), "PS_HEARTBEAT_TIMEOUT": str(_TIMEOUT)}
    silence = _INTERVAL + _TIMEOUT
    cases = []
    for role in roles:
        progress(f"stop-{role}")
        seconds = [strike(role, "pull", signal.SIGSTOP, **heartbeats).raised for _ in range(turns)]
        cases.append(
            median_case(
                f"stop-{role}",
                [max(0.0, s - silence) for s in seconds],
                "s",
                peer=PROMISED,
                target="<= 1",
                note=(
                    f"from SIGSTOP to the exception, less {silence:g} s: interval and timeout of"
                    " the heartbeats; stage pull"
                ),
            )
        )
    return cases


def handshakes(turns: int) -> list[Case]:
    """Measure joining when all others are there: a hello, a data connection, a greeting on it."""
    progress("handshake")
    plain = [_joining() for _ in range(turns)]
    note = "init() of the last worker: control connection, hello, one data connection, greeting"
    secret = [_joining(BPSX_SECRET="5bd6a3f0" * 8) for _ in range(turns)]
    cases = [
        median_case(
            "handshake",
            [1e3 * s for s in secret],
            "ms",
            peer=1e3 * statistics.median(plain),
            note=note + "; with a secret, without",
        )
    ]
    each = {
        mechanism: [1e3 * mechanisms.seconds(mechanism, 20) for _ in range(turns)]
        for mechanism in mechanisms.MECHANISMS
    }
    bare = statistics.median(each.pop("null"))
    return cases + [
        median_case(
            f"connection-{mechanism}",
            samples,
            "ms",
            peer=bare,
            note="a data connection and a greeting on it; without any proof",
        )
        for mechanism, samples in each.items()
    ]


def _joining(**environment: str) -> float:
    with Roles(2, **environment) as job:
        job.workers[0].ask("begin", stage="init")
        _settled(job.server.pid)
        job.workers[1].ask("resources")  # its reply shows that the worker has imported bpsx
        seconds = float(job.workers[1].ask("init"))
        job.workers[0].ask("ended", timeout_s=60)
        ask_all(job.workers, "leave")
        return seconds


def _settled(pid: int, seconds: float = 0.3) -> None:
    """Wait until a process is idle: a server that has loaded its kernels and waits for the job to
    begin.
    """
    before, end = -1.0, time.monotonic() + 60
    while (now := machine.cpu_seconds(pid)) - before > 1e-3 or now < 0.05:
        if time.monotonic() >= end:
            raise BenchError("the server did not become idle within 60 s")
        before = now
        time.sleep(seconds)


def start_stop(turns: int) -> list[Case]:
    """Measure a job of 2 workers, a server and a scheduler by ``bpsx-run --local``.

    Beside it is the cost of starting four interpreters alone.
    """
    up, down, bare = [], [], []
    for turn in range(turns):
        progress(f"start-stop: turn {turn + 1} of {turns}")
        started, out, ended = _timed(
            [
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
        )
        told = [
            line.split()[-2:] for line in out.splitlines() if " up " in line or " down " in line
        ]
        if len(told) != 4:
            raise BenchError(f"start-stop: the workers' output is incomplete: {out!r}")
        up.append(max(float(when) for word, when in told if word == "up") - started)
        down.append(ended - min(float(when) for word, when in told if word == "down"))
        bare.append(_bare())
    return [
        median_case(
            "start",
            up,
            "s",
            peer=statistics.median(bare),
            note=(
                "bpsx-run --local to the first barrier of 2 + 1 + 1; "
                "importing numpy and zmq in as many processes at once"
            ),
        ),
        median_case("stop", down, "s", note="shutdown() to the end of bpsx-run"),
    ]


def _timed(words: list[str]) -> tuple[float, str, float]:
    """Run a command. Returns when it started, what it printed, and when it ended."""
    started = time.monotonic()
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"start-stop: status {done.returncode}: {done.stderr}")
    return started, done.stdout, time.monotonic()


def _bare() -> float:
    started = time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-c", "import numpy, zmq"]) for _ in range(4)]
    for process in processes:
        process.wait(120)
    return time.monotonic() - started
