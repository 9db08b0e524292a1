"""``bench gpu``: tensors and gradients on GPUs, one process per GPU, against PyTorch's NCCL.

Both run in the same processes and take turns.

**nccl**: one machine without servers. *many*: 64 tensors of 4,096,000 B in flight together;
*large*: one of 512 MiB. Both are bytes of one worker over the seconds of the slower, against
all_reduce of the same tensors. *latency*: one tensor of 4 KiB and a synchronisation of the device.

**pcie**: an imitated machine per GPU, and two servers, all on this host. The same rates with
tensors on the GPUs, against tensors on the CPU in the same job. It shows whether the copies between
GPU and host are hidden behind the network.

**train**: one machine. A step of a network of :mod:`bench.shapes`, whose layers take their real
time and make gradients of these shapes (:mod:`bench.gpu_model`): DistributedOptimizer with SGD
against DistributedDataParallel. ``alone-<network>`` is a step that exchanges nothing, against the
same peer.

**links**: the same step with a machine per GPU, each in a network namespace whose link carries at
most the given rate, each way. ``k0``: a server beside each worker. ``k4``: four servers on machines
of their own with the same links, and none beside workers. With n workers and k such machines a
parameter server can be (n² + kn - 2k) / n² times as fast as any all-reduce, the *bound*.
``-onebit``, ``-topk``, ``-dithering``: with that compressor and error feedback, both ways.
``-rank4``: bpsx's PowerSGD of rank 4 with error feedback.
``-powersgd``, ``-bf16``: DistributedDataParallel with PyTorch's hook of that name, PowerSGD of rank
4. Needs root and iproute2.

If ``--machines`` is more than there are GPUs, machines share GPUs in turn: on networks as slow as
these a GPU is idle nearly all the time. ``--congestion`` is TCP's congestion control for both ways.
Hosts differ in it; Linux' own default is cubic. Namespaces may use those that the host allows
(``sysctl net.ipv4.tcp_allowed_congestion_control``).

``--device cpu`` tries the plan out where there is no GPU, with gloo for NCCL and small tensors; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import network, peers
from bench.jobs import TRANSPORTS, Job, progress
from bench.report import BenchError, Case, Draw, integers, median_case
from bench.shapes import NETWORKS

TRAIN, LINKS = ("resnet50", "vgg16", "bert-large"), ("vgg16", "bert-large")
RATES, EXTRA = ("10gbit", "5gbit"), (0, 4)
#: Shared memory within a machine and plain sockets between machines, as jobs have by default.
DEFAULT = "shm"
_UNITS = {"gbit": 1e9, "mbit": 1e6}
#: Burst that a link may send at once: seconds of its rate (4 MB at 10 Gbit/s), and bytes. With less
#: the rate is not reached.
_BURST = 3.2e-3, 256_000
_SERVERS = 2
_SECONDS = 300.0
_TRAIN_WAYS = ("ddp", "bpsx", "alone")
#: Ways of **links** besides ddp and bpsx.
WAYS = ("onebit", "topk", "dithering", "rank4", "powersgd", "bf16")


@dataclass(frozen=True)
class Plan:
    """Amount of measuring.

    ``turns``: how often ours and the peer's take turns. The other fields are per turn, or a size in
    bytes.
    """

    turns: int = 9
    rounds: int = 5
    calls: int = 300
    steps: int = 10
    pcie_turns: int = 7
    pcie_rounds: int = 2
    link_turns: int = 3
    count: int = 64
    part: int = 4_096_000
    large: int = 512 << 20
    small: int = 4096


QUICK = Plan(turns=3, rounds=2, calls=100, steps=3, pcie_turns=3, link_turns=1)


@dataclass(frozen=True)
class Setup:
    """Options of a run.

    ``device``: cuda or cpu. ``networks``: names of networks; None means each part's own.
    ``machines``, ``rates``, ``extra``, ``congestion``, ``ways``, ``transport``: for **links**, see
    the module's docstring.
    """

    device: str = "cuda"
    gpus: int = 2
    machines: int = 2
    networks: Sequence[str] | None = None
    rates: Sequence[str] = RATES
    extra: Sequence[int] = EXTRA
    congestion: str | None = None
    ways: Sequence[str] = ("onebit",)
    plan: Plan = Plan()
    transport: str = DEFAULT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default=",".join(PARTS),
        help="parts to run, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help=(
            "device of the tensors; cpu only checks that the benchmark runs (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=2,
        help="number of GPUs and of workers; links needs only one (default: %(default)s)",
    )
    parser.add_argument(
        "--machines",
        type=int,
        help=(
            "number of machines of links; if there are more machines than GPUs, they share them"
            " (default: --gpus)"
        ),
    )
    parser.add_argument(
        "--networks",
        help=(
            f"networks of train (default: {','.join(TRAIN)}) and links (default:"
            f" {','.join(LINKS)}); choices: {', '.join(NETWORKS)}"
        ),
    )
    parser.add_argument(
        "--rates",
        default=",".join(RATES),
        help="rates of the links, in tc's notation, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--extra",
        default=",".join(map(str, EXTRA)),
        help=(
            "numbers of extra machines with only a server, for links, separated by commas"
            " (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--ways",
        default="onebit",
        help=(
            "what links measures besides ddp and bpsx, separated by commas; allowed are"
            f" {', '.join(WAYS)} (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--congestion", help="TCP congestion control on links (default: the host's)"
    )
    parser.add_argument(
        "--transport",
        choices=sorted(TRANSPORTS),
        default=DEFAULT,
        help=(
            "transport of links (default: %(default)s: shared memory within a machine, plain"
            " sockets between machines)"
        ),
    )


def picture(_: argparse.Namespace) -> Draw:
    """Return the function that draws **links**. Raises :class:`BenchError` without matplotlib."""
    from bench.gpu_plot import draw

    return draw


def run(options: argparse.Namespace) -> list[Case]:
    """Return all cases. Raises :class:`BenchError` if one cannot run."""
    wanted, networks = (
        options.only.split(","),
        options.networks.split(",") if options.networks else None,
    )
    control = [options.congestion] if options.congestion else ()
    ways = options.ways.split(",")
    check_known("--only", wanted, PARTS)
    check_known("--networks", networks or (), NETWORKS)
    check_known("--congestion", control, network.congestions())
    check_known("--ways", ways, WAYS)
    setup = Setup(
        options.device,
        options.gpus,
        options.machines or options.gpus,
        networks,
        options.rates.split(","),
        integers("--extra", options.extra),
        options.congestion,
        ways,
        plan_of(options.device, options.quick),
        options.transport,
    )
    for rate in setup.rates:
        bits(rate)
    if reason := _why_not(setup, wanted):
        raise BenchError(reason)
    return [case for name, part in PARTS.items() if name in wanted for case in part(setup)]


def check_known(option: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise :class:`BenchError` if words ``given`` to ``option`` are not ``known``."""
    if unknown := set(given) - set(known):
        raise BenchError(
            f"{option}: unknown: {', '.join(sorted(unknown))}; expected {', '.join(known)}"
        )


def plan_of(device: str, quick: bool) -> Plan:
    """Return the amount of measuring: small without a GPU, since gloo and the CPU are slow."""
    plan = QUICK if quick else Plan()
    return replace(plan, count=8, part=65536, large=4 << 20) if device == "cpu" else plan


def bits(rate: str) -> float:
    """Convert ``"10gbit"`` to 1e10, bits per second."""
    match = re.fullmatch(r"([0-9.]+)(gbit|mbit)", rate)
    if match is None:
        raise BenchError(f"--rates: {rate!r} is not a rate such as 10gbit or 200mbit")
    return float(match[1]) * _UNITS[match[2]]


def _why_not(setup: Setup, wanted: Sequence[str]) -> str:
    """Return why this cannot run here, or an empty string if it can.

    It is called before anything is measured.
    """
    least = 1 if set(wanted) == {"links"} else 2  # the machines of "links" may share a GPU
    if setup.gpus < least:
        return f"--gpus {setup.gpus}: at least {least} are needed"
    if setup.device == "cpu" and "links" in wanted and "powersgd" in setup.ways:
        return "--ways powersgd: PyTorch's hook for PowerSGD needs NCCL, and so --device cuda"
    if setup.machines < 2:
        return f"--machines {setup.machines}: at least two are needed"
    if setup.device == "cuda":
        import torch

        if torch.cuda.device_count() < setup.gpus:
            return (
                f"PyTorch sees {torch.cuda.device_count()} GPUs, but {setup.gpus} are needed"
                " (--gpus); --device cpu checks that the benchmark runs"
            )
    if "links" in wanted and (reason := network.why_not()):
        return f"links needs links that can be slowed down: {reason}"
    return ""


def own(
    machines: int, gpus: int, visible: str | None, processes: int = 1
) -> dict[int, dict[str, str]]:
    """Return the variables of the workers of imitated machines, by index.

    Each machine has ``processes`` of ``gpus`` GPUs, of those that ``CUDA_VISIBLE_DEVICES`` names
    here. Each is another host to NCCL, which would refuse two processes of one host on one GPU.
    """
    known = visible.split(",") if visible else [str(i) for i in range(gpus)]
    found = {}
    for i in range(machines * processes):
        machine = i // processes
        of_machine = [known[(machine * processes + k) % gpus] for k in range(processes)]
        found[i] = {
            "CUDA_VISIBLE_DEVICES": ",".join(of_machine),
            "NCCL_HOSTID": f"machine{machine}",
        }
    return found


@contextlib.contextmanager
def gpu_job(
    device: str,
    workers: int,
    servers: int,
    own: Mapping[int, Mapping[str, str]] | None = None,
    *,
    links: network.Links | None = None,
    peer: bool = True,
    transport: str = "tcp",
    processes: int | None = None,
    **environment: str,
) -> Iterator[Job]:
    """Start a job of :mod:`bench.gpu_worker`; see :class:`bench.jobs.Job`.

    With ``peer`` its workers are torch.distributed's processes, too.
    """
    interface = "lo" if links is None else "net0"
    common = {
        "BENCH_DEVICE": device,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_IB_DISABLE": "1",
        **environment,
    }
    modules = dict.fromkeys(range(workers), "bench.gpu_worker")
    with (
        tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder,
        Job(workers, servers, transport, common, modules, links, own, processes) as job,
    ):
        if peer:
            for i, worker in enumerate(job.workers):
                worker.tell("join", store=str(Path(folder) / "store"), rank=i, size=workers)
            for worker in job.workers:
                worker.answer(_SECONDS)
        yield job


def visible_devices(device: str) -> str | None:
    """Return CUDA_VISIBLE_DEVICES, if tensors are on GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") if device == "cuda" else None


def _job(
    setup: Setup,
    servers: int,
    links: network.Links | None = None,
    peer: bool = True,
    transport: str = "tcp",
) -> contextlib.AbstractContextManager[Job]:
    """Start a job with a worker per GPU; with ``links``, a worker per machine.

    Without servers all workers are on one machine, otherwise each is on its own. ``peer``,
    ``transport``: see :func:`gpu_job`.
    """
    count = setup.gpus if links is None else setup.machines
    variables = own(count, setup.gpus, visible_devices(setup.device)) if servers else None
    return gpu_job(
        setup.device, count, servers, variables, links=links, peer=peer, transport=transport
    )


def nccl(setup: Setup) -> list[Case]:
    """Measure **nccl**: see the module's docstring."""
    plan = setup.plan
    kinds = {"many": (plan.count, plan.part), "large": (1, plan.large), "latency": (1, plan.small)}
    seconds: dict[str, list[float]] = defaultdict(list)
    with _job(setup, 0) as job:
        for kind, (count, nbytes) in kinds.items():
            for way in ("ddp", "bpsx"):
                _check_sums(job, way, setup.device, count, nbytes)
            calls = plan.calls if kind == "latency" else plan.rounds
            for turn in range(plan.turns):
                progress(f"nccl, {kind}: turn {turn + 1} of {plan.turns}")
                for way in ("ddp", "bpsx"):
                    found = peers.slowest(
                        job.workers,
                        "rounds",
                        way=way,
                        device=setup.device,
                        count=count,
                        nbytes=nbytes,
                        calls=calls,
                    )
                    seconds[f"{way} {kind}"] += [statistics.median(found)]
    return nccl_cases(plan, seconds)


def nccl_cases(plan: Plan, seconds: Mapping[str, list[float]]) -> list[Case]:
    """Return the cases of **nccl** from the medians of each turn, by way and kind."""
    cases = _rates(
        "nccl",
        plan,
        {kind: (seconds[f"bpsx {kind}"], seconds[f"ddp {kind}"]) for kind in ("many", "large")},
        ">= 0.9",
        "NCCL all_reduce of the same",
    )
    peer = 1e6 * statistics.median(seconds["ddp latency"])
    return [
        *cases,
        median_case(
            "nccl-latency",
            [1e6 * s for s in seconds["bpsx latency"]],
            "us",
            peer=peer,
            target="<= 1.5",
            note=(
                f"push_pull_inplace of {plan.small} B and synchronize; NCCL all_reduce and"
                " synchronize"
            ),
        ),
    ]


def _rates(
    name: str,
    plan: Plan,
    pairs: Mapping[str, tuple[list[float], list[float]]],
    target: str,
    peer: str,
) -> list[Case]:
    cases = []
    for kind, (ours, other) in pairs.items():
        nbytes = plan.count * plan.part if kind == "many" else plan.large
        what = (
            f"{plan.count} x {plan.part:,} B under way"
            if kind == "many"
            else f"one of {plan.large:,} B"
        )
        cases.append(
            median_case(
                f"{name}-{kind}",
                [nbytes / 1e9 / s for s in ours],
                "GB/s",
                peer=nbytes / 1e9 / statistics.median(other),
                target=target,
                note=f"per worker, {what}; {peer}",
            )
        )
    return cases


def _check_sums(job: Job, way: str, device: str, count: int, nbytes: int) -> None:
    if not all(
        job.ask("check", timeout=_SECONDS, way=way, device=device, count=count, nbytes=nbytes)
    ):
        raise BenchError(f"the sums of {way} of {count} x {nbytes} B on {device} are wrong")


def pcie(setup: Setup) -> list[Case]:
    """Measure **pcie**: see the module's docstring."""
    plan = setup.plan
    seconds: dict[str, list[float]] = defaultdict(list)
    with _job(setup, _SERVERS, peer=False) as job:
        for kind, (count, nbytes) in {
            "many": (plan.count, plan.part),
            "large": (1, plan.large),
        }.items():
            for turn in range(plan.pcie_turns):
                progress(f"pcie, {kind}: turn {turn + 1} of {plan.pcie_turns}")
                for name, device in (("cpu", "cpu"), ("gpu", setup.device)):
                    if not turn:
                        _check_sums(job, "bpsx", device, count, nbytes)
                    seconds[f"{name} {kind}"] += peers.slowest(
                        job.workers,
                        "rounds",
                        timeout=_SECONDS,
                        way="bpsx",
                        device=device,
                        count=count,
                        nbytes=nbytes,
                        calls=plan.pcie_rounds,
                    )
    return pcie_cases(plan, seconds)


def pcie_cases(plan: Plan, seconds: Mapping[str, list[float]]) -> list[Case]:
    """Return the cases of **pcie** from the seconds of rounds, by the tensors' place and kind."""
    pairs = {kind: (seconds[f"gpu {kind}"], seconds[f"cpu {kind}"]) for kind in ("many", "large")}
    return _rates(
        "pcie", plan, pairs, ">= 0.85", f"CPU tensors in the same job; {_SERVERS} servers"
    )


def _steps(
    job: Job, name: str, ways: Sequence[str], label: str, turns: int, count: int
) -> dict[str, list[float]]:
    """Return, by way, the seconds of a step in each turn: the mean of the slower worker."""
    for way in ways:
        progress(f"{label}: first steps of {way}")
        job.ask("make", timeout=_SECONDS, workload=name, way=way)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns):
        progress(f"{label}: turn {turn + 1} of {turns}")
        for way in ways:
            seconds[way] += peers.slowest(
                job.workers, "steps", timeout=_SECONDS, workload=name, way=way, count=count
            )
    for way in ways:
        if not all(job.ask("right", workload=name, way=way)):
            raise BenchError(f"{label}: the weights of {way} are wrong")
    job.ask("drop", workload=name)
    # Printed now, in case a later measurement fails.
    progress(
        f"{label}: "
        + ", ".join(f"{way} {_median_ms(found):.4g} ms" for way, found in seconds.items())
    )
    return seconds


def train(setup: Setup) -> list[Case]:
    """Measure **train**: see the module's docstring."""
    cases = []
    with _job(setup, 0) as job:
        for name in setup.networks or TRAIN:
            cases += train_cases(
                name,
                _steps(
                    job, name, _TRAIN_WAYS, f"train, {name}", setup.plan.turns, setup.plan.steps
                ),
            )
    return cases


def train_cases(name: str, seconds: Mapping[str, list[float]]) -> list[Case]:
    """Return the cases of **train** from the seconds of steps by way."""
    of, peer = NETWORKS[name](), _median_ms(seconds["ddp"])
    about = f"{of.elements / 1e6:.1f} M parameters in {of.tensors} tensors, batch {of.batch}"
    return [
        median_case(
            f"train-{name}",
            _ms(seconds["bpsx"]),
            "ms",
            peer=peer,
            target="<= 1.0",
            note=f"{about}; DDP",
        ),
        median_case(
            f"alone-{name}", _ms(seconds["alone"]), "ms", peer=peer, note="no exchange; DDP"
        ),
    ]


def links(setup: Setup) -> list[Case]:
    """Measure **links**: see the module's docstring."""
    cases = []
    for rate in setup.rates:
        for extra in setup.extra:
            with _linked(setup, rate, extra) as job:
                for name in setup.networks or LINKS:
                    seconds = _steps(
                        job,
                        name,
                        ("ddp", "bpsx", *setup.ways),
                        f"links, {rate}, k={extra}, {name}",
                        setup.plan.link_turns,
                        1,
                    )
                    cases += link_cases(
                        name,
                        rate,
                        setup.machines,
                        extra,
                        seconds,
                        setup.congestion or network.congestion(),
                    )
    return cases


@contextlib.contextmanager
def _linked(setup: Setup, rate: str, extra: int) -> Iterator[Job]:
    places, beside = places_of(setup.machines, extra)
    seconds, least = _BURST
    burst = str(max(least, int(seconds * bits(rate) / 8)))
    with (
        network.Links(
            places, rate, both=True, burst=burst, beside=beside, congestion=setup.congestion
        ) as made,
        _job(setup, extra or setup.machines, made, transport=setup.transport) as job,
    ):
        yield job


def places_of(workers: int, extra: int) -> tuple[list[str], dict[str, str]]:
    """Return the names of the namespaces, and the processes that share another's namespace."""
    names = ["scheduler", *(f"worker {i}" for i in range(workers))]
    if extra:
        return [*names, *(f"server {i}" for i in range(extra))], {}
    return names, {f"server {i}": f"worker {i}" for i in range(workers)}


def bound(workers: int, extra: int) -> float:
    """Return the largest factor by which a parameter server can be faster than an all-reduce."""
    return (workers * workers + extra * workers - 2 * extra) / (workers * workers)


def link_cases(
    name: str,
    rate: str,
    workers: int,
    extra: int,
    seconds: Mapping[str, list[float]],
    congestion: str,
) -> list[Case]:
    """Return the cases of **links** from the seconds of steps by way.

    Targets are ratios of times: without servers' machines at most the peer's time, with them at
    least nine tenths of the bound.
    """
    peer, most, label = (
        _median_ms(seconds["ddp"]),
        bound(workers, extra),
        f"links-{rate}-k{extra}-{name}",
    )
    # Share of the link's rate that the least traffic of an all-reduce uses. A share above 1 would
    # mean that the links are faster than stated.
    used = 1e3 * 2 * (workers - 1) / workers * 32 * NETWORKS[name]().elements / bits(rate) / peer
    faster = peer / _median_ms(seconds["bpsx"])
    note = (
        f"DDP, which uses {used:.0%} of its link ({congestion}); {faster:.2f} times as fast, bound"
        f" {most:.2f}: {faster / most:.2f} of it"
    )
    target = f"<= {1 / (0.9 * most):.4g}" if extra else "<= 1.0"
    return [
        median_case(label, _ms(seconds["bpsx"]), "ms", peer=peer, target=target, note=note),
        *(
            median_case(
                f"{label}-{way}",
                _ms(found),
                "ms",
                peer=peer,
                target="<= 0.2" if extra and way == "onebit" else None,
                note=f"{peer / _median_ms(found):.1f} times as fast as DDP, uncompressed",
            )
            for way, found in seconds.items()
            if way in WAYS
        ),
    ]


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * s for s in seconds]


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


#: Parts of the benchmark by name.
PARTS: Mapping[str, Callable[[Setup], list[Case]]] = {
    "nccl": nccl,
    "pcie": pcie,
    "train": train,
    "links": links,
}
