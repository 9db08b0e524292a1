"""``bpsx-run advise``: predicts the step time of each way of sending gradients, and picks one.

docs/internals/advise.md describes how.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from bpsx.config import Config, child_environment
from bpsx.config.fingerprint import fingerprint
from bpsx.errors import BpsxError, ConfigError
from bpsx.launch import advise_profile, cli, trial
from bpsx.launch.advise_methods import (
    METHODS,
    PLAIN,
    Measured,
    exchange,
    keeps_cuts,
    shown,
    used_now,
)
from bpsx.launch.advise_profile import Profile
from bpsx.launch.arguments import whole
from bpsx.launch.job_view import RECORDS_ALREADY, Observer, add_job_arguments, find, timelines
from bpsx.launch.spawn import runnable
from bpsx.launch.top import aligned
from bpsx.planning.link_rate import partition_size
from bpsx.planning.partitioner import most_bytes
from bpsx.planning.step_model import Cluster, Costs, Gradient, fitted_link, step_seconds
from bpsx.scheduler.tuning import tunes_partitions
from bpsx.system.threads import NamedThread

#: Steps of a command before the recorded ones.
_WARM = 4
#: Seconds until a measuring job has failed, and until a command that got SIGTERM is killed.
_PATIENCE, _GRACE = 180.0, 10.0
#: Variables that say which job a process belongs to.
_IDENTITY = ("DMLC_", "BYTEPS_LOCAL_", "BPSX_SECRET")
#: Workers of the two jobs that measure costs. Their difference is what one more worker costs.
_FEW, _MORE = 2, 3
#: A method has to be this much faster than one that changes gradients less.
_NOTABLE = 0.05
#: With so many cores, the processes of a job that measures do not wait for each other's work.
_MANY_CORES = 8
#: Round-trip time in ms where none is known.
_NEAR_MS = 0.1
#: Worker machines at most: the simulation of more would take minutes.
_MOST_WORKERS = 512
#: Bytes per second of 1 Gbit/s that are left for data: Ethernet, IP and TCP have headers in each
#: packet of 1,500 bytes.
_GBIT = 1e9 / 8 * 1448 / 1514


class Row(NamedTuple):
    """Predictions for a method: seconds of a step by number of spare machines."""

    method: str
    megabytes: float
    seconds: dict[int, float]


class Advice(NamedTuple):
    """Predictions, the facts that they rest on, and the method to use."""

    profile: Profile
    cluster: Cluster
    link_from: str
    now: str
    rows: list[Row]
    pick: str
    why: str


# ---- what is known of the cluster


class Layout(NamedTuple):
    """The machines of a job: as :class:`~bpsx.planning.step_model.Cluster` has them."""

    workers: int
    spare: int
    together: bool


def layout(nodes: Iterable[Mapping[str, Any]]) -> Layout | None:
    """Return the layout of the job with these nodes of a VIEW; None if it is on one machine."""
    hosts: dict[str, set[str]] = {"worker": set(), "server": set()}
    for node in nodes:
        if node["state"] == "running":
            hosts[node["role"]].add(node["host"])
    if len(hosts["worker"] | hosts["server"]) < 2:
        return None
    spare = len(hosts["server"] - hosts["worker"])
    both, lacking = hosts["server"] & hosts["worker"], sorted(hosts["worker"] - hosts["server"])
    if both and lacking:
        raise ConfigError(
            f"some worker machines have servers and others not ({', '.join(lacking[:3])}):"
            " predictions need a server on each of them, or on none"
        )
    return Layout(len(hosts["worker"]), spare, bool(both))


class Partitions(NamedTuple):
    """Bytes of a job's partitions: at most ``most``, and fewer on slow links if they are tuned."""

    most: int
    tuned: bool

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the choice of a job with these options."""
        return cls(
            config.partition_bytes, tunes_partitions(fingerprint(config), 2, config.asynchronous)
        )

    def size(self, method: str, cluster: Cluster) -> int:
        """Return the bytes of a partition on these machines."""
        if keeps_cuts(method):
            return most_bytes(self.most, compressed=True)
        if not self.tuned:
            return self.most
        return partition_size([cluster.link / cluster.card_load()], self.most)


class Model(NamedTuple):
    """Predicts steps of one script on one kind of machine."""

    gradients: list[Gradient]
    measured: Mapping[str, Measured]
    least: int
    partitions: Partitions

    def seconds(self, method: str, cluster: Cluster) -> float:
        """Return the seconds of a step."""
        return step_seconds(
            self.gradients,
            lambda g: exchange(method, g, self.measured, self.least),
            cluster,
            self.partitions.size(method, cluster),
        )

    def wire(self, method: str) -> float:
        """Return the bytes that a worker pushes in a step."""
        return sum(sum(exchange(method, g, self.measured, self.least).wire) for g in self.gradients)


# ---- measuring


def _tell(text: str) -> None:
    print(f"bpsx-run advise: {text}", file=sys.stderr, flush=True)


def measured_costs(found: Sequence[Mapping[str, Any]], cores: int) -> dict[str, Measured]:
    """Return what methods cost, from the answers of two jobs with different numbers of workers.

    ``cores``: of this machine. With few, the jobs' processes have waited for each other.
    """
    few, more = sorted(found, key=lambda answer: answer["workers"])
    grown = more["workers"] - few["workers"]
    costs = {}
    for name in METHODS:
        one, other = few["methods"][name], more["methods"][name]
        push = max(0.0, (other["servers"] - one["servers"]) / grown)
        rest = max(0.0, one["servers"] - few["workers"] * push)
        worker = (one["worker"] + other["worker"]) / 2
        alone = one["seconds"] if cores >= _MANY_CORES else 0.0
        costs[name] = Measured(Costs(worker, push, rest, alone), one["wire"])
    return costs


def _probe(words: Sequence[str], options: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Run a job of :mod:`bpsx.launch.advise_probe`; return its answer. ``words``: its arguments.

    Raises :class:`~bpsx.errors.BpsxError` if it fails.
    """
    ended = trial.run(options, ["bpsx.launch.advise_probe", *words], env, _PATIENCE)
    if ended.status is None:
        raise BpsxError(f"the job that measures {words[0]} has not ended within {_PATIENCE:g} s")
    if ended.status or not ended.answer:
        raise BpsxError(
            f"the job that measures {words[0]} failed (status {ended.status}): {ended.telling}"
        )
    return ended.answer


def measure_costs(on_gpu: bool) -> dict[str, Measured]:
    """Measure what each method costs the processors of this machine; takes some seconds."""
    env, cores = trial.environment(BYTEPS_ENABLE_IPC="0"), len(os.sched_getaffinity(0))
    servers = max(1, min(4, cores // 4))
    words = ["costs", *(["gpu"] if on_gpu else [])]
    found = []
    for workers in (_FEW, _MORE):
        _tell(f"measures what methods cost on this machine, with {workers} workers")
        options = ["--local", "--workers", str(workers), "--processes", "1"]
        found.append(_probe(words, [*options, "--servers", str(servers)], env))
    return measured_costs(found, cores)


class MeasuredLink(NamedTuple):
    """Bytes and seconds of a push_pull over a job's links, and seconds of a tiny one."""

    nbytes: int
    seconds: float
    trip: float
    layout: Layout


def measure_link(options: Sequence[str]) -> MeasuredLink:
    """Run a job with these options of bpsx-run, and measure its links.

    Raises :class:`~bpsx.errors.BpsxError` if it fails, or is on one machine.
    """
    _tell("measures the links")
    found = _probe(["link"], options, child_environment())
    where = layout(found["nodes"])
    if where is None:
        raise ConfigError("all hosts of the hostfile are one machine: it has no links to measure")
    return MeasuredLink(found["bytes"], found["seconds"], found["trip"], where)


def record(command: Sequence[str], steps: int) -> Profile:
    """Run a command as the only worker of a job, until it has made some steps.

    Raises :class:`~bpsx.errors.ConfigError` if its timeline cannot be used.
    """
    _tell(f"runs the command alone, for {_WARM} steps and {steps} more")
    with tempfile.TemporaryDirectory(prefix="bpsx-advise-") as folder:
        # Of a job's variables, only its identity would be wrong.
        kept = {k: v for k, v in child_environment().items() if not k.startswith(_IDENTITY)}
        kept |= {
            "BPSX_TERM_GRACE": str(_GRACE / 2),
            "BYTEPS_FORCE_DISTRIBUTED": "1",
            "BYTEPS_TRACE_ON": "1",
            "BYTEPS_TRACE_START_STEP": str(_WARM + 1),
            "BYTEPS_TRACE_END_STEP": str(_WARM + steps),
            "BYTEPS_TRACE_DIR": folder,
            "PYTHONUNBUFFERED": "1",
        }
        words = [*trial.own_python(), "bpsx.launch", "--local", "--workers", "1", "--servers", "1"]
        with subprocess.Popen(
            [*words, "--processes", "1", "--", *command],
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as job:
            output = _Output(job)
            try:
                path = _await_timeline(Path(folder), job)
            finally:
                if job.poll() is None:
                    _tell("ends the command")
                    output.wanted = False  # complaints about that end
                _end(job)
                output.join()
        if path is None:
            raise ConfigError(
                f"the command ended with status {job.returncode}, after fewer than"
                f" {_WARM + 1} steps in which it exchanged gradients with bpsx"
            )
        return advise_profile.read(path)


class _Output:
    """Hands a job's output on to standard error, as long as it is :attr:`wanted`."""

    def __init__(self, job: subprocess.Popen[bytes]) -> None:
        self.wanted, self._job = True, job
        self._thread = NamedThread(target=self._hand_on, name="bpsx-output", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the output."""
        self._thread.join()

    def _hand_on(self) -> None:
        assert self._job.stdout is not None
        for line in self._job.stdout:
            if self.wanted:
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()


def _await_timeline(folder: Path, job: subprocess.Popen[bytes]) -> Path | None:
    while True:
        over = job.poll() is not None  # look for the file after that: it may be written last
        found = sorted(folder.glob("worker-*/*/comm.json"))
        if found or over:
            return found[0] if found else None
        time.sleep(0.2)


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the command; bpsx-run ends all of its processes."""
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(_GRACE)
        except subprocess.TimeoutExpired:
            job.kill()
    job.wait()


def watch(observer: Observer, seconds: int) -> tuple[Profile, dict[str, Any]]:
    """Record a running job; returns the profile of a worker on this machine, and the job's VIEW.

    Raises :class:`~bpsx.errors.BpsxError`.
    """
    why = "no worker of the job runs on this machine, so their timelines are elsewhere"
    for (role, rank), item in timelines(observer, seconds):
        if role != "worker" or item is None:
            continue
        path = Path(item["path"])
        if not item["path"]:
            why = f"worker {rank} {RECORDS_ALREADY}"
        elif path.is_file() and item["records"]:
            return advise_profile.read(path), observer.ask()
    raise ConfigError(f"{why}: run bpsx-run advise on a worker's machine")


# ---- advice


def choose(rows: Sequence[Row], spare: int) -> tuple[str, str]:
    """Return the method to use with ``spare`` spare machines, and why."""
    plain = next(row.seconds[spare] for row in rows if row.method == PLAIN)
    best = min(rows, key=lambda row: row.seconds[spare])
    least = best.seconds[spare]
    pick = next(row for row in rows if row.seconds[spare] <= least * (1 + _NOTABLE))
    if pick.method == PLAIN:
        gain = 1 - least / plain
        return PLAIN, f"do not compress: no method would save more than {gain:.0%} of a step"
    text = f"{pick.method} takes {pick.seconds[spare] / plain:.2f} of the time without compression"
    if pick is not best:
        text += (
            f"; {best.method}, the fastest, {1 - least / pick.seconds[spare]:.1%} less than that"
        )
    return pick.method, text


def advise(model: Model, cluster: Cluster, spares: Sequence[int]) -> tuple[list[Row], str, str]:
    """Predict all methods with the numbers of spare machines; returns rows, pick and why."""
    rows = [
        Row(
            method,
            model.wire(method) / 1e6,
            {k: model.seconds(method, cluster._replace(spare=k)) for k in spares},
        )
        for method in METHODS
    ]
    return rows, *choose(rows, cluster.spare)


def text(advice: Advice) -> str:
    """Format the advice as text."""
    c, p = advice.cluster, advice.profile
    kind = "a server each" if c.together else "no server"
    lines = [
        f"steps: {len(p.gradients)} gradients of {p.nbytes / 1e6:,.1f} MB, the last one ready after"
        f" {p.ready * 1e3:,.1f} ms (medians of {p.steps} steps)",
        f"machines: {c.workers} with a worker and {kind}, {c.spare} spare; {c.cores:g} cores each",
        f"links: {c.link / _GBIT:,.3g} Gbit/s, {advice.link_from}",
    ]
    if advice.now:
        lines.append(f"now: {advice.now}, {p.seconds * 1e3:,.1f} ms a step")
    spares = list(advice.rows[0].seconds)
    head = ["method", "MB sent", *(f"ms, {k} spare" for k in spares)]
    table = [
        [row.method, f"{row.megabytes:,.1f}", *(f"{row.seconds[k] * 1e3:,.1f}" for k in spares)]
        for row in advice.rows
    ]
    lines += ["", *aligned([head, *table], left=(0,))]
    lines += ["", f"advice: {advice.why}"]
    if advice.pick != PLAIN:
        lines.append(f"use: {shown(advice.pick)}")
        lines.append("Compression changes gradients: compare the accuracy, too.")
    return "\n".join(lines)


def as_json(advice: Advice) -> str:
    """Format the advice as JSON."""
    p = advice.profile
    return json.dumps(
        {
            "step": {"gradients": len(p.gradients), "bytes": p.nbytes, "ready_seconds": p.ready},
            "seconds_now": p.seconds if advice.now else None,
            "cluster": advice.cluster._asdict(),
            "link_from": advice.link_from,
            "methods": {
                row.method: {"megabytes": row.megabytes, "seconds": row.seconds}
                for row in advice.rows
            },
            "pick": advice.pick,
            "why": advice.why,
        },
        indent=1,
    )


# ---- command line


def _positive(given: str, what: str = "a number") -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{given!r}: expected {what} above 0")
    return value


def _rate(given: str) -> float:
    """Parse Gbit/s; returns bytes per second."""
    return _positive(given, "a number of Gbit/s") * _GBIT


def _numbers(given: str) -> list[int]:
    if not all(part.isascii() and part.isdigit() for part in given.split(",")):
        raise argparse.ArgumentTypeError(f"{given!r}: expected whole numbers, with commas between")
    return [int(part) for part in given.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options before COMMAND."""
    made = argparse.ArgumentParser(
        "bpsx-run advise",
        usage=(
            "bpsx-run advise [options] --workers N --link GBIT COMMAND...\n"
            "       bpsx-run advise [options] --hostfile FILE [ssh options] COMMAND...\n"
            "       bpsx-run advise [options] [--scheduler HOST:PORT | --job PID]"
        ),
        description=(
            "Predict the time of a training step for each way of sending gradients, with and"
            " without spare machines, and pick one. COMMAND runs alone on this machine for a few"
            " steps and is then ended. Without COMMAND, a running job is recorded. Either way, run"
            " it on a machine like the workers'."
        ),
        epilog=(
            "Options of bpsx-run's ssh back end, such as --ssh, belong before COMMAND, too. See"
            " docs/tune/advise.md."
        ),
        allow_abbrev=False,
    )
    made.add_argument(
        "--workers", type=whole(2, _MOST_WORKERS), metavar="N", help="worker machines"
    )
    made.add_argument(
        "--link", type=_rate, metavar="GBIT", help="rate of each machine's link, in Gbit/s"
    )
    made.add_argument(
        "--round-trip",
        type=_positive,
        metavar="MS",
        help="round-trip time between machines, in ms (default: measured, or 0.1)",
    )
    made.add_argument(
        "--hostfile", "-H", metavar="FILE", help="measure the links between the hosts of this file"
    )
    made.add_argument(
        "--spare",
        type=_numbers,
        metavar="K,...",
        help="numbers of spare machines, which have a server only (default: none, half as many as"
        " workers, as many as workers, and the job's)",
    )
    made.add_argument(
        "--cores",
        type=_positive,
        metavar="C",
        help="cores of a machine that are free for the exchange (default: this machine's)",
    )
    made.add_argument(
        "--steps",
        type=whole(advise_profile.FEWEST + 2, 1000),
        default=10,
        metavar="N",
        help="recorded steps of COMMAND (default: %(default)s)",
    )
    made.add_argument(
        "--seconds",
        type=whole(1, 3600),
        default=5,
        metavar="S",
        help="seconds for which a running job is recorded (default: %(default)s)",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    add_job_arguments(made)
    return made


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return advise's options, those for bpsx-run's ssh back end, and the command."""
    made = parser()
    words, command = cli.split(arguments, made)
    options, more = made.parse_known_args(words)
    if more and options.hostfile is None:
        made.error(f"unknown option {more[0]}")
    cli.parser().parse_args(more)  # ends with a message if one is unknown
    if command and (options.link is None) == (options.hostfile is None):
        made.error("COMMAND needs either --link and --workers, or --hostfile")
    if options.link is not None and command and options.workers is None:
        made.error("--link needs --workers, the number of worker machines")
    if not command and options.hostfile is not None:
        made.error("--hostfile needs COMMAND")
    if command and (options.scheduler or options.job):
        made.error("--scheduler and --job choose a running job, which needs no COMMAND")
    return options, more, command


class _Facts(NamedTuple):
    """Sources of a prediction."""

    profile: Profile
    layout: Layout
    link: MeasuredLink | None
    now: str


def _gather(options: argparse.Namespace, more: Sequence[str], command: Sequence[str]) -> _Facts:
    """Record steps, and find out about the machines."""
    if command:
        profile = record(list(runnable(command)), options.steps)
        if options.hostfile is None:
            return _Facts(profile, Layout(options.workers, 0, True), None, "")
        link = measure_link(["--hostfile", options.hostfile, *more])
        return _Facts(profile, link.layout, link, "")
    with Observer(find(options.scheduler, options.job)) as observer:
        profile, view = watch(observer, options.seconds)
    where = layout(view["nodes"])
    if where is None and (options.link is None or options.workers is None):
        raise ConfigError(
            "the job runs on one machine and uses no links: give --link and --workers to predict"
            " it on several machines"
        )
    if where is None:
        return _Facts(profile, Layout(options.workers, 0, True), None, "")
    return _Facts(profile, where, None, used_now(profile.compression))


def _find_link(
    options: argparse.Namespace, facts: _Facts, cluster: Cluster, model: Model
) -> tuple[Cluster, str]:
    """Return the cluster with the rate of its links, and where the rate is from."""
    if options.link is not None:
        return cluster._replace(link=options.link), "as given"
    if facts.link is not None:
        whole_ = [Gradient("link", facts.link.nbytes, 0.0)]
        alone = model._replace(gradients=whole_)
        if options.round_trip is None:
            cluster = cluster._replace(round_trip=facts.link.trip)
        rate = fitted_link(
            facts.link.seconds, lambda r: alone.seconds(PLAIN, cluster._replace(link=r))
        )
        what = f"from a push_pull of {facts.link.nbytes / 1e6:,.0f} MB"
    else:
        said = model.wire(facts.now)
        if not 0.8 < said / max(facts.profile.sent, 1) < 1.25:
            raise ConfigError(
                f"the job sends {facts.profile.sent / 1e6:,.1f} MB a step, and {facts.now} as"
                f" advise knows it would send {said / 1e6:,.1f} MB, so its steps do not show the"
                " links: give the links' rate with --link"
            )
        rate = fitted_link(
            facts.profile.seconds, lambda r: model.seconds(facts.now, cluster._replace(link=r))
        )
        what = "from the job's own steps"
    if rate is None:
        raise ConfigError(
            "the processors of this machine explain the measured time without any link: give the"
            " links' rate with --link, or the cores that are free with --cores"
        )
    return cluster._replace(link=rate), what


def _spares(given: Sequence[int] | None, cluster: Cluster) -> list[int]:
    """Return the numbers of spare machines to predict, among them the cluster's own."""
    n = cluster.workers
    found = {*(given or (0, -(-n // 2), n)), cluster.spare}
    return sorted(k for k in found if k or cluster.together)


def main(arguments: Sequence[str]) -> int:
    """Run ``bpsx-run advise``; returns the exit status.

    Raises :class:`~bpsx.errors.BpsxError`.
    """
    options, more, command = _split(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end what it has started
    try:
        return _run(options, more, command)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace, more: Sequence[str], command: Sequence[str]) -> int:
    facts = _gather(options, more, command)
    if facts.layout.workers < 2 and None in (options.link, options.workers):
        raise ConfigError(
            "the job has a single worker machine, which exchanges nothing: give --link and"
            " --workers to predict it on several"
        )
    cores = options.cores or float(len(os.sched_getaffinity(0)))
    config = Config()
    measured = measure_costs(facts.profile.on_gpu)
    model = Model(
        facts.profile.gradients, measured, config.min_compress_bytes, Partitions.of(config)
    )
    workers, spare, together = facts.layout
    cluster = Cluster(
        workers, spare, _GBIT, (options.round_trip or _NEAR_MS) / 1e3, cores, together
    )
    cluster, link_from = _find_link(options, facts, cluster, model)
    if options.workers is not None:  # others than those of the job that has been measured
        cluster = cluster._replace(workers=options.workers)
    rows, pick, why = advise(model, cluster, _spares(options.spare, cluster))
    advice = Advice(facts.profile, cluster, link_from, facts.now, rows, pick, why)
    print((as_json if options.json else text)(advice), flush=True)
    return 0
