"""Other launchers' variables, and the place in a job that they give this process."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from bpsx.config.job_options import MOST_WORKERS
from bpsx.errors import ConfigError

#: End of messages about variables that belong to another program: how to run a job of one process.
ALONE = "to run this process alone, set DMLC_WORKER_ID=0"


@dataclass(frozen=True)
class Launcher:
    """Names of the variables with which a launcher tells a process its place; "" for none."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""


#: The most specific launchers first. mpirun and mpiexec start their daemons with srun, so their
#: processes inherit the daemons' Slurm variables.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    Launcher("PMIx", "PMIX_RANK", ""),
)
_TORCHRUN, _SLURM = LAUNCHERS[0], LAUNCHERS[5]
#: Ports for a store that no variable names. They are below those that Linux assigns on its own.
STORE_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class LaunchedPlace:
    """A process's place as given by a launcher, and the address of the store where workers meet.

    ``local_rank`` and ``local_size`` are None if the launcher does not give them; ``master_addr``
    is "" and ``master_port`` 0 if there is no store. ``run`` separates the entries of this job in
    the store from others'. ``told`` names the variables, for messages.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    master_addr: str = ""
    master_port: int = 0
    run: str = "none"
    launcher: str = "torchrun"
    told: str = ""


def place(variables: Mapping[str, str]) -> LaunchedPlace | None:
    """The place that another launcher gives this process; None if there is none.

    bpsx's own ``DMLC_WORKER_ID`` and ``BYTEPS_LOCAL_RANK`` take precedence: if one is set, there is
    none.

    Raises :class:`~bpsx.errors.ConfigError` if only some of the variables are set, and for
    impossible values.
    """
    set_ = {name: text.strip() for name, text in variables.items() if text.strip()}
    if "DMLC_WORKER_ID" in set_ or "BYTEPS_LOCAL_RANK" in set_:
        return None
    found = next((at for at in LAUNCHERS if at.rank in set_ and at.size in set_), None)
    if found is None:
        for launcher in LAUNCHERS:
            _refuse_half(launcher, set_)
        return _tensorflow(set_)
    rank, size = (
        _number(found.rank, set_, MOST_WORKERS - 1),
        _number(found.size, set_, MOST_WORKERS, 1),
    )
    _check_below(found.rank, rank, found.size, size)
    if found is not _TORCHRUN:
        _check_same(found, rank, size, set_)
    address, port = set_.get("MASTER_ADDR", ""), 0
    if "MASTER_PORT" in set_:
        port = _number("MASTER_PORT", set_, 65535, 1)
    run = set_.get("TORCHELASTIC_RUN_ID", "none")
    if found is _SLURM and not (address or port):
        address, port, run = _slurm_store(set_)
    told = f"{found.rank}={rank}, {found.size}={size}"
    return LaunchedPlace(
        rank, size, *_local(found, size, set_), address, port, run, found.name, told
    )


def _number(name: str, variables: Mapping[str, str], most: int, least: int = 0) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise ConfigError(f"{name}={text!r}: expected {least}..{most}")
    return int(text)


def _check_below(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise ConfigError(f"{rank_name}={rank}: expected 0..{size - 1} ({size_name}={size})")


def _refuse_half(launcher: Launcher, variables: Mapping[str, str]) -> None:
    """Raise ConfigError if an incomplete set of a launcher's variables shows several processes.

    Text that is no number belongs to another program. Slurm sets SLURM_PROCID also for a batch
    script, which is one process, and sets SLURM_STEP_NUM_TASKS only for processes that srun starts.
    """

    def number(name: str) -> int:
        text = variables.get(name, "")
        return int(text) if text.isascii() and text.isdigit() else -1

    if launcher is _SLURM:
        return
    rank, size = number(launcher.rank), number(launcher.size)
    if rank >= 0:
        missing = launcher.size or "WORLD_SIZE, and RANK"
        raise ConfigError(
            f"{launcher.rank}={rank} is set, but the number of processes is not; set {missing};"
            f" {ALONE}"
        )
    if size > 1:
        raise ConfigError(
            f"{launcher.size}={size} is set, but this process's rank is not; set {launcher.rank};"
            f" {ALONE}"
        )
    if number(launcher.local_size) > 1 or number(launcher.local_rank) > 0:
        name = launcher.local_size if number(launcher.local_size) > 1 else launcher.local_rank
        raise ConfigError(
            f"{name}={variables[name]} is set, but {launcher.rank} and {launcher.size} are not;"
            f" set both; {ALONE}"
        )


def _check_same(found: Launcher, rank: int, size: int, variables: Mapping[str, str]) -> None:
    """Raise ConfigError if a lone RANK or WORLD_SIZE contradicts ``found``."""
    for name, of_found, number in (
        (_TORCHRUN.rank, found.rank, rank),
        (_TORCHRUN.size, found.size, size),
    ):
        if name in variables and variables[name] != str(number):
            raise ConfigError(
                f"{name}={variables[name]}, but {of_found}={number}; make them equal, or unset the"
                " wrong one"
            )


def _local(
    found: Launcher, size: int, variables: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Local rank and local size, as far as the launcher gives them."""
    rank = count = None
    if found.local_rank in variables:
        rank = _number(found.local_rank, variables, MOST_WORKERS - 1)
    if found.local_size in variables:
        count = _number(found.local_size, variables, MOST_WORKERS, 1)
    if found is _SLURM:
        # "2(x3)": three machines of two tasks. The list for uneven machines holds several numbers.
        even = re.fullmatch(r"(\d+)(?:\(x\d+\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        count = int(even[1]) if even else None
    if rank is not None and count is not None:
        _check_below(found.local_rank, rank, found.local_size or "SLURM_STEP_TASKS_PER_NODE", count)
    if count is not None and count > size:
        raise ConfigError(f"{found.local_size}={count}: expected 1..{size} ({found.size}={size})")
    return rank, count


def _slurm_store(variables: Mapping[str, str]) -> tuple[str, int, str]:
    """Address, port and run of a store, computed alike by all tasks of an srun step.

    Task 0 runs on the first node, unless tasks are distributed arbitrarily.
    """
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
    if not nodes or variables.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return "", 0, "none"
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "")
    run = f"slurm-{job}.{step}"
    port = STORE_PORTS[zlib.crc32(run.encode()) % len(STORE_PORTS)]
    return first_node(nodes), port, run


def first_node(nodes: str) -> str:
    """The first name in a Slurm list of nodes: "a1" of "a[1-3,7],b"."""
    text = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", text[0]) if text else ""


def _tensorflow(variables: Mapping[str, str]) -> LaunchedPlace | None:
    """The place that TF_CONFIG gives a worker or a chief among several."""
    try:
        told = json.loads(variables.get("TF_CONFIG", "{}"))
        workers = {
            kind: len(told["cluster"].get(kind, ())) for kind in ("chief", "master", "worker")
        }
        kind, index = str(told["task"]["type"]), int(told["task"]["index"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    size, before = sum(workers.values()), workers["chief"] + workers["master"]
    if size < 2 or not 0 <= index < workers.get(kind, 0):
        return None  # alone, or a parameter server or an evaluator
    rank = index + (before if kind == "worker" else 0)
    return LaunchedPlace(
        rank,
        size,
        0,
        1,
        launcher="TF_CONFIG",
        told=f"TF_CONFIG names {size} workers, this is worker {rank}",
    )


def fields(ours: LaunchedPlace) -> dict[str, int] | None:
    """Convert the place to fields of :class:`~bpsx.config.Config`.

    Returns None unless ranks go machine by machine, with as many processes on each.
    """
    rank, each = ours.local_rank, ours.local_size
    if rank is None or each is None or ours.size % each or ours.rank % each != rank:
        return None
    return {
        "num_worker": ours.size // each,
        "local_size": each,
        "worker_id": ours.rank // each,
        "local_rank": rank,
    }


def run_id(address: str = "", port: str = "") -> str:
    """TORCHELASTIC_RUN_ID for a job of bpsx-run.

    It contains the address of PyTorch's store if bpsx-run has chosen that.
    """
    return f"bpsx-run/{address}:{port}" if address else "bpsx-run"


def own_store(variables: Mapping[str, str]) -> bool:
    """Whether bpsx-run has chosen the address of PyTorch's store.

    If so, worker 0 may open another store instead, on a port that is certainly free and at its own
    address only.
    """
    address, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    return bool(address) and variables.get("TORCHELASTIC_RUN_ID") == run_id(address, port)
