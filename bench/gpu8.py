"""``bench gpu8``: a machine of two, four or eight GPUs, all that matters in one call.

It needs no network and no installation beside PyTorch, and ends within ``--minutes``: each part has
a share of them, and takes as many turns as fit. A part that fails is a case, and the others go on.

**tests**: tests/hardware, which use all GPUs.

**one**: parts **nccl** and **train** of :mod:`bench.gpu`, with all GPUs.

**roots**: one imitated machine with all GPUs, then two with half of them each, and a server beside
each machine. A step of a network of :mod:`bench.shapes` for each choice of the GPUs that copy to
the host, against DistributedDataParallel with NCCL in the same processes. ``default`` sets no
variable; ``all``, ``0``, ``2,3``, ``2`` are values of BYTEPS_REDUCE_ROOTS, and ``switch8``,
``switch4``, ``switch2`` of BYTEPS_PCIE_SWITCH_SIZE. The choices take turns: each is a job of its
own, whose processes stay. ``best``: the default against the fastest other choice. ``cpu``:
processor seconds per GB of a worker's tensors, against NCCL's all_reduce. ``pcie``, ``nvlink``:
bytes that the busiest GPU moved, per byte of a worker's tensors.

**links**: part **links** of :mod:`bench.gpu` with four imitated machines, and the compressors of
bpsx and of PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench import gpu, machine, peers
from bench.jobs import ROOT, Job, progress
from bench.report import BenchError, Case, median_case

NETWORKS = ("gpt2", "ugatit", "vgg16", "bert-large")
_LINK_NETWORKS = ("vgg16", "bert-large")
#: The first one needs NCCL.
_LINK_WAYS = ("powersgd", "onebit", "dithering", "topk", "rank4")
_RATES, _EXTRA, _MACHINES = ("10gbit", "25gbit", "100gbit"), (0, 4), 4
#: Share of the minutes that each part may take.
_SHARES = {"tests": 0.3, "one": 0.12, "roots": 0.33, "links": 0.25}
_SECONDS = 120.0
_ROUNDS = 5
_STEPS = 5


@dataclass(frozen=True)
class Setup:
    """Options of a run. ``end``: monotonic time at which the current part should be over."""

    device: str
    gpus: int
    networks: Sequence[str]
    quick: bool
    end: float = 0.0

    @property
    def late(self) -> bool:
        """Whether the part has used its share of the time."""
        return time.monotonic() >= self.end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default=",".join(PARTS),
        help="parts to run, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--gpus", type=int, help="number of GPUs (default: all that PyTorch sees; 4 on the CPU)"
    )
    parser.add_argument(
        "--networks",
        default=",".join(NETWORKS),
        help="networks of roots and links, separated by commas (default: %(default)s); links has"
        " vgg16 and bert-large",
    )
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="time that all may take (default: %(default)s)"
    )
    parser.add_argument(
        "--save", metavar="FILE", help="write the cases there as JSON after each part"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device of the tensors; cpu only checks that the benchmark runs",
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return the cases of all parts. Raises :class:`BenchError` if none can run."""
    wanted, networks = options.only.split(","), options.networks.split(",")
    gpu.check_known("--only", wanted, PARTS)
    gpu.check_known("--networks", networks, gpu.NETWORKS)
    setup = Setup(options.device, _gpus(options), networks, options.quick)
    # The jobs of all parts inherit it: multicast over NVLink is not what is compared here.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    cases: list[Case] = []
    total = sum(_SHARES[name] for name in PARTS if name in wanted)
    for name, part in PARTS.items():
        if name not in wanted:
            continue
        end = time.monotonic() + 60 * options.minutes * _SHARES[name] / total
        try:
            for case in part(dataclasses.replace(setup, end=end)):
                cases.append(case)
                progress(f"{case.case}: {case.value:.4g} {case.unit}, peer {case.peer}")
        except BenchError as error:
            progress(f"{name}: {error}")
            cases.append(Case(f"{name}-failed", 1, "parts", target="<= 0", note=str(error)))
        if options.save:
            found = {"cases": [case.as_dict() for case in cases], "machine": machine.describe()}
            Path(options.save).write_text(json.dumps(found), encoding="utf-8")
    return cases


def _gpus(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return options.gpus or 4
    import torch

    seen = torch.cuda.device_count()
    if min(options.gpus or seen, seen) < 2 or (options.gpus or 0) > seen:
        raise BenchError(
            f"PyTorch sees {seen} GPUs; at least 2 are needed, and --gpus may name no more than"
            " there are; --device cpu checks that the benchmark runs"
        )
    return options.gpus or seen


def tests(setup: Setup) -> Iterator[Case]:
    """Run **tests**: see the module's docstring."""
    with tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        options = ["-p", "no:benchmark", f"--junitxml={report}", "tests/hardware"]
        try:
            subprocess.run(
                [*command, *options],
                cwd=ROOT,
                stdout=2,
                timeout=max(1.0, setup.end - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BenchError("tests/hardware took longer than its share of the time") from None
        if not report.exists():
            raise BenchError("pytest has written no report")
        found = ElementTree.parse(report).getroot().find("testsuite")
        assert found is not None
        count = {k: int(found.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    yield Case("tests-passed", passed, "tests", note=f"{count['skipped']} skipped")
    yield Case("tests-failed", failed, "tests", target="<= 0")


def one(setup: Setup) -> Iterator[Case]:
    """Measure **one**: see the module's docstring."""
    plan = gpu.plan_of(setup.device, setup.quick)
    networks = ["tiny"] if setup.device == "cpu" else None
    same = gpu.Setup(setup.device, setup.gpus, setup.gpus, networks, plan=plan)
    yield from gpu.nccl(same)
    yield from gpu.train(same)


def choices(gpus: int) -> dict[str, dict[str, str | None]]:
    """Return, by name, the variables of each choice of the GPUs that copy to the host."""
    none: dict[str, str | None] = {"BYTEPS_REDUCE_ROOTS": None, "BYTEPS_PCIE_SWITCH_SIZE": None}
    half = gpus // 2
    roots = {
        "all": ",".join(map(str, range(gpus))),
        "0": "0",
        f"{half},{half + 1}": f"{half},{half + 1}",
        str(half): str(half),
    }
    return {
        "default": none,
        **{
            name: {**none, "BYTEPS_REDUCE_ROOTS": value}
            for name, value in roots.items()
            if max(map(int, value.split(","))) < gpus
        },
        **{
            f"switch{size}": {**none, "BYTEPS_PCIE_SWITCH_SIZE": str(size)}
            for size in (8, 4, 2)
            if gpus % size == 0
        },
    }


def roots(setup: Setup) -> Iterator[Case]:
    """Measure **roots**: see the module's docstring."""
    begin = time.monotonic()
    for count, share in ((1, 0.5), (2, 1.0)):
        end = begin + share * (setup.end - begin)
        yield from _Roots(dataclasses.replace(setup, end=end), count).run()


class _Roots:
    """Part **roots** with ``machines`` imitated machines."""

    def __init__(self, setup: Setup, machines: int) -> None:
        self._setup, self._machines = setup, machines
        # Two processes on a GPU take turns on it, and their machines' collectives wait for each
        # other's: machines that share GPUs would say nothing about real ones.
        self._each = setup.gpus // machines
        self._label = f"{machines}x{self._each}"
        #: (network, choice or "ddp") -> seconds of a step.
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def run(self) -> Iterator[Case]:
        if self._setup.late:
            raise BenchError(f"no time was left for {self._label}")
        wanted = choices(self._each)
        with self._job() as job:
            turn = 0
            while not self._setup.late:
                # To and fro, so that what changes slowly meets all choices alike.
                for name in list(wanted)[:: 1 if turn % 2 == 0 else -1]:
                    if self._setup.late:
                        break
                    self._choose(job, name, wanted[name])
                    if name == "default" and not turn:
                        yield from self._costs(job)
                turn += 1
        yield from roots_cases(self._label, self._seconds)

    def _job(self) -> AbstractContextManager[Job]:
        """Start the job of the first choice."""
        setup, machines, each = self._setup, self._machines, self._each
        visible = gpu.visible_devices(setup.device)
        return gpu.gpu_job(
            setup.device,
            machines * each,
            machines,
            gpu.own(machines, machines * each, visible, each),
            transport="shm" if machines == 1 else "tcp",
            processes=each,
            BYTEPS_LOG_LEVEL="info",  # a worker reports how bpsx groups the GPUs
        )

    def _choose(self, job: Job, name: str, variables: Mapping[str, str | None]) -> None:
        """Measure all networks with this choice, and DDP."""
        progress(f"roots, {self._label}: {name}")
        job.again(variables)
        for network in self._setup.networks:
            if not self._seconds[network, "ddp"]:
                job.ask("make", timeout=_SECONDS, workload=network, way="ddp")
            job.ask("make", timeout=_SECONDS, workload=network, way="bpsx")
            for way in ("ddp", "bpsx"):
                found = peers.slowest(
                    job.workers, "steps", timeout=_SECONDS, workload=network, way=way, count=_STEPS
                )
                self._seconds[network, name if way == "bpsx" else "ddp"] += found
            if not all(job.ask("right", timeout=_SECONDS, workload=network, way="bpsx")):
                raise BenchError(f"roots, {self._label}, {network}, {name}: the weights are wrong")
            job.ask("drop", workload=network, way="bpsx")

    def _costs(self, job: Job) -> Iterator[Case]:
        """Measure what moving many tensors costs, with the GPUs that are chosen by default."""
        plan = gpu.plan_of(self._setup.device, self._setup.quick)
        moved = _ROUNDS * plan.count * plan.part
        found: dict[str, dict[str, float]] = {}
        for way in ("ddp", "bpsx"):
            common = {
                "way": way,
                "device": self._setup.device,
                "count": plan.count,
                "nbytes": plan.part,
            }
            job.ask("rounds", timeout=_SECONDS, calls=1, **common)
            before, used = job.ask("counters"), _cpu(job)
            job.ask("rounds", timeout=_SECONDS, calls=_ROUNDS, warm=0, **common)
            after = job.ask("counters")
            found[way] = {k: v - used[k] for k, v in _cpu(job).items()}
            for key in before[0]:
                found[way][key] = max(b[key] - a[key] for a, b in zip(before, after))
        said = next((line for line in job.ask("grouping") if line), "nothing")
        progress(f"roots, {self._label}: bpsx says: {said}")
        yield from cost_cases(self._label, found, moved, len(job.workers), said)


def _cpu(job: Job) -> dict[str, float]:
    return {
        "workers": sum(machine.cpu_seconds(w.pid) for w in job.workers),
        "servers": sum(machine.cpu_seconds(s.pid) for s in job.servers),
    }


def roots_cases(label: str, seconds: Mapping[tuple[str, str], Sequence[float]]) -> list[Case]:
    """Return the cases of **roots** from the seconds of steps by network and choice."""
    cases = []
    for network in dict.fromkeys(network for network, _ in seconds):
        peer = 1e3 * statistics.median(seconds[network, "ddp"])
        found = {
            name: [1e3 * s for s in samples]
            for (of, name), samples in seconds.items()
            if of == network and name != "ddp"
        }
        cases += [
            median_case(f"roots-{label}-{network}-{name}", samples, "ms", peer=peer, note="DDP")
            for name, samples in found.items()
        ]
        if others := {n: statistics.median(s) for n, s in found.items() if n != "default"}:
            best = min(others, key=lambda name: others[name])
            cases.append(
                median_case(
                    f"roots-{label}-{network}-best",
                    found["default"],
                    "ms",
                    peer=others[best],
                    target="<= 1.02",
                    note=f"the default against {best}",
                )
            )
    return cases


def cost_cases(
    label: str, found: Mapping[str, Mapping[str, float]], moved: int, workers: int, said: str
) -> list[Case]:
    """Return the cases of processor time and of bytes.

    ``found``: for each way the processor seconds of workers and servers, and the bytes that the
    busiest GPU moved. ``moved``: bytes of one worker's tensors.
    """
    ours, theirs = found["bpsx"], found["ddp"]
    total = moved * workers / 1e9
    cases = [
        Case(
            f"cpu-{label}",
            (ours["workers"] + ours["servers"]) / total,
            "s/GB",
            peer=theirs["workers"] / total,
            note=f"of it servers {ours['servers'] / total:.3g}; NCCL all_reduce; {said}",
        )
    ]
    for key in sorted(set(ours) - {"workers", "servers"}):
        kind, direction = key.split("_")
        cases.append(
            Case(
                f"{kind}-{label}-{direction}",
                ours[key] / moved,
                "bytes",
                peer=theirs[key] / moved,
                note="per byte of a worker's tensors; NCCL all_reduce",
            )
        )
    return cases


def links(setup: Setup) -> Iterator[Case]:
    """Measure **links**: see the module's docstring."""
    plan = gpu.plan_of(setup.device, setup.quick)
    longest = 0.0  # seconds that one of the measurements has taken
    wanted = [name for name in _LINK_NETWORKS if name in setup.networks]
    for network in wanted if setup.device == "cuda" else ("tiny",):
        for rate in _RATES:
            for extra in _EXTRA:
                begin = time.monotonic()
                if begin + longest >= setup.end:
                    raise BenchError(f"no time was left for {network}, {rate}, k={extra}")
                yield from gpu.links(
                    gpu.Setup(
                        setup.device,
                        setup.gpus,
                        _MACHINES,
                        [network],
                        [rate],
                        [extra],
                        ways=_LINK_WAYS if setup.device == "cuda" else _LINK_WAYS[1:],
                        plan=plan,
                    )
                )
                longest = max(longest, time.monotonic() - begin)


#: Parts of the benchmark by name.
PARTS: Mapping[str, Callable[[Setup], Iterator[Case]]] = {
    "tests": tests,
    "one": one,
    "roots": roots,
    "links": links,
}
