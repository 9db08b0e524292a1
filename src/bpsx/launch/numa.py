"""CPU binding of a machine's worker processes.

:func:`topology` reads the kernel's description of the machine; the rest is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bpsx.config import Config
from bpsx.config.parsers import cpu_list
from bpsx.errors import ConfigError

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class PhysicalCore:
    """A physical core.

    ``cpus``: its usable hardware threads, as ascending logical CPU numbers. ``node``: its NUMA
    node.
    """

    cpus: tuple[int, ...]
    node: int = 0


def topology(allowed: Iterable[int], system: Path = _SYSTEM) -> list[PhysicalCore]:
    """The physical cores of this machine within ``allowed``, ordered by node and number.

    ``allowed``: this process's affinity mask, as a container may hold only a part. A machine that
    does not show siblings or nodes counts as one thread per core and one node.
    """
    usable = frozenset(allowed)
    nodes = {cpu: number for number, cpus in _nodes(system) for cpu in cpus}
    siblings: dict[frozenset[int], int] = {}
    for cpu in sorted(usable):
        threads = _cpus(
            system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        ) or frozenset((cpu,))
        siblings.setdefault(threads & usable | {cpu}, nodes.get(cpu, 0))
    return sorted(
        (PhysicalCore(tuple(sorted(cpus)), node) for cpus, node in siblings.items()),
        key=lambda core: (core.node, core.cpus),
    )


def _nodes(system: Path) -> Iterable[tuple[int, frozenset[int]]]:
    for folder in (system / "node").glob("node[0-9]*"):
        yield int(folder.name.removeprefix("node")), _cpus(folder / "cpulist")


def _cpus(file: Path) -> frozenset[int]:
    try:
        return cpu_list(file.read_text().strip())
    except (OSError, ValueError):  # a node without CPUs has an empty list
        return frozenset()


def wanted(config: Config, processes: int) -> bool:
    """Whether any process is bound.

    Several processes would compete for the same cores; a single one is bound only on request.
    """
    asked = config.visible_cpu_cores or _blacklist(config) or config.numa_default_quota
    return bool(config.numa_on and (processes > 1 or asked))


def plan(config: Config, processes: int, cores: Sequence[PhysicalCore]) -> list[frozenset[int]]:
    """The CPUs of each of ``processes`` worker processes, by local rank.

    An empty set leaves a process's affinity unchanged.

    Raises :class:`~bpsx.errors.ConfigError` for what this machine cannot provide.
    """
    if not wanted(config, processes):
        return [frozenset()] * processes
    if config.visible_cpu_cores:
        return _explicit(config.visible_cpu_cores, processes, cores)
    blacklist = _blacklist(config)
    kept = [
        PhysicalCore(tuple(cpu for cpu in core.cpus if cpu not in blacklist), core.node)
        for core in cores
    ]
    free = [core for core in kept if core.cpus]
    if not free:
        raise ConfigError(
            f"BYTEPS_CPU_BLACKLIST={config.cpu_blacklist}: this leaves none of the CPUs"
            f" {text(_all(cores))}"
        )
    sizes = quotas(config, processes, len(free))
    bound = []
    for size in sizes:
        taken = _take(free, size)
        free = [core for core in free if core not in taken]
        bound.append(_all(taken))
    return bound


def quotas(config: Config, processes: int, cores: int) -> list[int]:
    """The number of physical cores, out of ``cores``, for each process.

    All are 0 if no quota is set and there are fewer cores than processes.
    """
    others, each = processes - 1, config.numa_default_quota
    if not each and cores < processes:
        return [0] * processes
    each = each or cores // processes
    if each * others >= cores:  # the root needs a core, too
        raise ConfigError(
            f"BYTEPS_NUMA_DEFAULT_QUOTA={each}: expected 0..{(cores - 1) // others}, because"
            f" {processes} processes share {cores} cores"
        )
    return [each] * others + [cores - each * others]


def _take(free: Sequence[PhysicalCore], size: int) -> list[PhysicalCore]:
    """Choose ``size`` cores of one node if possible, from the node with the fewest that fit.

    Otherwise choose from the nodes with the most free cores.
    """
    by_node: dict[int, list[PhysicalCore]] = {}
    for core in free:
        by_node.setdefault(core.node, []).append(core)
    fitting = [cores for cores in by_node.values() if len(cores) >= size]
    if fitting:
        return min(fitting, key=len)[:size]
    return [core for cores in sorted(by_node.values(), key=len, reverse=True) for core in cores][
        :size
    ]


def _blacklist(config: Config) -> frozenset[int]:
    return frozenset() if config.cpu_blacklist == "-1" else cpu_list(config.cpu_blacklist)


def _explicit(given: str, processes: int, cores: Sequence[PhysicalCore]) -> list[frozenset[int]]:
    lists = [cpu_list(part) for part in given.split(":")]
    if len(lists) != processes:
        raise ConfigError(
            f"BYTEPS_VISIBLE_CPU_CORES={given}: {len(lists)} lists for {processes} worker"
            " processes; expected one per process, separated by colons"
        )
    missing = frozenset().union(*lists) - _all(cores)
    if missing:
        raise ConfigError(
            f"BYTEPS_VISIBLE_CPU_CORES={given}: this process may not use {text(missing)}; expected"
            f" {text(_all(cores))}"
        )
    return lists


def _all(cores: Sequence[PhysicalCore]) -> frozenset[int]:
    return frozenset(cpu for core in cores for cpu in core.cpus)


def text(cpus: Iterable[int]) -> str:
    """Format CPUs as the kernel does: ``0-3,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1] = [parts[-1][0], cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
