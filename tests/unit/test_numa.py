"""Which CPUs a worker process gets: plans for imitated machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpsx.config import Config
from bpsx.config.parsers import cpu_list
from bpsx.errors import ConfigError
from bpsx.launch.numa import PhysicalCore, plan, text, topology, wanted


def machine(folder: Path, nodes: list[list[list[int]]]) -> Path:
    """Create a sysfs of NUMA nodes: lists of cores, each a list of hardware threads."""
    for number, cores in enumerate(nodes):
        (node := folder / "node" / f"node{number}").mkdir(parents=True)
        (node / "cpulist").write_text(text([cpu for core in cores for cpu in core]) + "\n")
        for core in cores:
            for cpu in core:
                (place := folder / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
                (place / "thread_siblings_list").write_text(text(core) + "\n")
    return folder


# Two nodes of four cores; the second threads of the cores are 8 to 15.
TWO = [[[i, i + 8] for i in range(4)], [[i, i + 8] for i in range(4, 8)]]


@pytest.fixture
def cores(tmp_path: Path) -> list[PhysicalCore]:
    return topology(range(16), machine(tmp_path, TWO))


def plans(cores: list[PhysicalCore], processes: int, **variables: str) -> list[str]:
    return [
        text(cpus)
        for cpus in plan(Config({f"BYTEPS_{k}": v for k, v in variables.items()}), processes, cores)
    ]


def test_cores_and_their_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    found = topology(range(16), machine(tmp_path, TWO))
    assert found == [PhysicalCore((i, i + 8), i // 4) for i in range(8)]


def test_hardware_threads_are_read_from_the_system(tmp_path: Path) -> None:
    found = topology(range(4), machine(tmp_path, [[[0, 1], [2, 3]]]))
    assert found == [PhysicalCore((0, 1)), PhysicalCore((2, 3))]


def test_a_container_has_a_part(tmp_path: Path) -> None:
    found = topology([1, 9, 3, 12], machine(tmp_path, TWO))
    assert found == [PhysicalCore((1, 9), 0), PhysicalCore((3,), 0), PhysicalCore((12,), 1)]


def test_a_machine_without_topology_files_has_one_core_per_cpu(tmp_path: Path) -> None:
    assert topology([0, 5], tmp_path) == [PhysicalCore((0,)), PhysicalCore((5,))]


def test_a_node_without_cpus(tmp_path: Path) -> None:
    folder = machine(tmp_path, TWO)
    (folder / "node" / "node2").mkdir()
    (folder / "node" / "node2" / "cpulist").write_text("\n")
    assert len(topology(range(16), folder)) == 8


def test_equal_parts_inside_a_node(cores: list[PhysicalCore]) -> None:
    assert plans(cores, 4) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert plans(cores, 2) == ["0-3,8-11", "4-7,12-15"]


def test_the_root_gets_the_remaining_cores(cores: list[PhysicalCore]) -> None:
    assert plans(cores, 3) == ["0-1,8-9", "2-3,10-11", "4-7,12-15"]
    assert plans(cores, 3, NUMA_DEFAULT_QUOTA="1") == ["0,8", "1,9", "2-7,10-15"]


def test_no_process_gets_a_blacklisted_cpu(cores: list[PhysicalCore]) -> None:
    assert plans(cores, 2, CPU_BLACKLIST="0,8,12-15") == ["1-3,9-11", "4-7"]
    assert plans(cores, 1, CPU_BLACKLIST="0-3") == ["4-15"]


def test_explicit_lists(cores: list[PhysicalCore]) -> None:
    assert plans(cores, 2, VISIBLE_CPU_CORES="0-2,9:4,6") == ["0-2,9", "4,6"]
    assert plans(cores, 2, VISIBLE_CPU_CORES="0:0", CPU_BLACKLIST="0", NUMA_DEFAULT_QUOTA="99") == [
        "0",
        "0",
    ]


def test_nothing_is_bound_unless_wanted(cores: list[PhysicalCore]) -> None:
    assert plans(cores, 1) == [""]
    assert plans(cores, 4, NUMA_ON="0", VISIBLE_CPU_CORES="0") == [""] * 4
    assert plans(cores, 1, NUMA_DEFAULT_QUOTA="2") == ["0-15"]
    assert not wanted(Config({}), 1)


def test_fewer_cores_than_processes(cores: list[PhysicalCore]) -> None:
    assert plans(cores[:2], 3) == [""] * 3


@pytest.mark.parametrize(
    ("variables", "processes", "said"),
    [
        (
            {"VISIBLE_CPU_CORES": "0:1"},
            3,
            (
                "BYTEPS_VISIBLE_CPU_CORES=0:1: 2 lists for 3 worker processes; expected one per"
                " process"
            ),
        ),
        (
            {"VISIBLE_CPU_CORES": "0:15-16"},
            2,
            "BYTEPS_VISIBLE_CPU_CORES=0:15-16: this process may not use 16; expected 0-15",
        ),
        (
            {"CPU_BLACKLIST": "0-15"},
            2,
            "BYTEPS_CPU_BLACKLIST=0-15: this leaves none of the CPUs 0-15",
        ),
        (
            {"NUMA_DEFAULT_QUOTA": "4"},
            3,
            "BYTEPS_NUMA_DEFAULT_QUOTA=4: expected 0..3, because 3 processes share 8 cores",
        ),
        (
            {"NUMA_DEFAULT_QUOTA": "1"},
            10,
            "BYTEPS_NUMA_DEFAULT_QUOTA=1: expected 0..0, because 10 processes share 8 cores",
        ),
    ],
)
def test_the_impossible_is_refused(
    cores: list[PhysicalCore], variables: dict[str, str], processes: int, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        plans(cores, processes, **variables)
    assert said in str(error.value)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 4))
def test_no_cpu_is_shared_or_invented(sizes: list[int], processes: int, each: int) -> None:
    cores = [
        PhysicalCore((2 * i, 2 * i + 1), node)
        for i, node in enumerate(n for n, size in enumerate(sizes) for _ in range(size))
    ]
    try:
        bound = plan(Config({}, numa_default_quota=each), processes, cores)
    except ConfigError:
        assert each
        return
    assert len(bound) == processes
    every = [cpu for cpus in bound for cpu in cpus]
    assert len(every) == len(set(every)) <= 2 * len(cores)
    for rank, cpus in enumerate(bound[:-1]):
        taken = {core for core in cores if cpus & set(core.cpus)}
        assert not cpus or len(cpus) == len(taken) * 2
        if each and cpus:
            assert len(taken) == each, rank


@pytest.mark.parametrize(
    ("given_text", "cpus"), [("0", {0}), ("0-2,7", {0, 1, 2, 7}), (" 1 , 3-3", {1, 3})]
)
def test_lists_of_cpus(given_text: str, cpus: set[int]) -> None:
    assert cpu_list(given_text) == cpus
    assert cpu_list(text(cpus)) == cpus


@pytest.mark.parametrize("wrong", ["", "a", "3-1", "-1", "1--2", "1,,2", "70000"])
def test_a_malformed_list_of_cpus_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        cpu_list(wrong)
