"""Workers started by other launchers, which set their own variables for rank and size."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.jobs import _PRELUDE, Job, Process

WORK = """
import torch
import bpsx.torch as bps

bps.init()
total = bps.push_pull(torch.full((3,), 1.0 + bps.rank()), name="x", average=False)
report([bps.rank(), bps.size(), bps.local_rank(), bps.local_size(), total.tolist()])
"""
MPI = "OMPI_COMM_WORLD_{}"


class Servers(Job):
    """Scheduler and servers of a job whose workers the test starts itself."""

    def start_worker(self, i: int, source: str | None = None) -> None:
        """Do nothing."""


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run(
    places: Sequence[dict[str, str]], folder: Path, source: str = WORK, **environment: str
) -> list[Process]:
    """Run ``source`` in one process for each of ``places`` and return the ended processes."""
    ours = ("DMLC_", "BYTEPS_", "BPSX_", "PS_", "SLURM_", "OMPI_", "PMI")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours) or k == "BPSX_CACHE_DIR"}
    shared = {
        **clean,
        "OMP_NUM_THREADS": "1",
        "BPSX_RENDEZVOUS_TIMEOUT": "60",
        "BYTEPS_SOCKET_PATH": str(folder),
        **environment,
    }
    started = [
        Process(f"process {i}", [sys.executable, "-c", _PRELUDE + source], {**shared, **place})
        for i, place in enumerate(places)
    ]
    try:
        for process in started:
            process.wait()
    finally:
        for process in started:
            process.end()
    return started


def reports(processes: Sequence[Process]) -> list[object]:
    for process in processes:
        assert process.popen.returncode == 0, process.text()
    return [report for process in processes for report in process.reports()]


def mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        MPI.format("RANK"): str(rank),
        MPI.format("SIZE"): str(size),
        MPI.format("LOCAL_RANK"): str(local_rank),
        MPI.format("LOCAL_SIZE"): str(local_size),
    }


def slurm(rank: int, size: int, job: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
    }


@pytest.mark.parametrize("launcher", ["kubeflow", "mpi", "slurm"])
def test_two_workers_of_another_launcher_join_one_job(tmp_path, launcher):
    """If the launcher does not set local ranks, they follow from the machine."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    places = {
        "kubeflow": [{"RANK": str(r), "WORLD_SIZE": "2", **store} for r in range(2)],
        "mpi": [{**mpi(r, 2, r, 2), **store} for r in range(2)],
        "slurm": [slurm(r, 2, store["MASTER_PORT"]) for r in range(2)],
    }[launcher]
    assert reports(run(places, tmp_path)) == [[rank, 2, rank, 2, [3.0] * 3] for rank in range(2)]


def test_processes_without_a_common_folder_are_separate_machines(tmp_path):
    """Like pods on one node that do not share the folder in which a machine's processes meet."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    places = [
        {"RANK": str(r), "WORLD_SIZE": "2", **store, "BYTEPS_SOCKET_PATH": str(tmp_path / str(r))}
        for r in range(2)
    ]
    assert reports(run(places, tmp_path)) == [[rank, 2, 0, 1, [3.0] * 3] for rank in range(2)]


@pytest.mark.parametrize("module", ["bpsx", "bpsx.torch", "bpsx.tensorflow"])
def test_a_place_without_a_store_is_refused(tmp_path, module):
    if module == "bpsx.tensorflow":
        find_spec("tensorflow") or pytest.skip(
            "no TensorFlow"
        )  # not imported, because this process has PyTorch
    (process,) = run(
        [mpi(0, 2, 0, 2)], tmp_path, f"import {module} as bps\nbps.init()\nreport(bps.size())"
    )
    missing = (
        "Set MASTER_ADDR and MASTER_PORT"
        if module == "bpsx.torch"
        else "DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and DMLC_NUM_SERVER"
    )
    assert process.popen.returncode == 1 and process.reports() == []
    assert (
        "one of 2 (OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2)" in process.text()
        and missing in process.text()
    )


@pytest.mark.parametrize("module", ["bpsx", "bpsx.torch"])
def test_a_place_and_a_scheduler_are_enough(tmp_path, module):
    """mpirun with a scheduler and servers of the user needs neither DMLC_NUM_WORKER nor
    DMLC_WORKER_ID.
    """
    source = f"""
import numpy, bpsx
import {module} as bps
bps.init()
report([bps.rank(), bps.size(), bpsx.push_pull(numpy.ones(2), name="x", average=False).tolist()])
"""
    with Servers("", 2, 1) as job:
        shared = {
            k: job._env[k]
            for k in (
                "DMLC_PS_ROOT_URI",
                "DMLC_PS_ROOT_PORT",
                "DMLC_NUM_SERVER",
                "BYTEPS_ENABLE_IPC",
            )
        }
        assert reports(run([mpi(r, 2, 0, 1) for r in range(2)], tmp_path, source, **shared)) == [
            [r, 2, [2.0, 2.0]] for r in range(2)
        ]


def test_single_tasks_train_alone(tmp_path):
    """One srun task, a batch script before its srun, and a place that DMLC_WORKER_ID overrides."""
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}
    for place in (slurm(0, 1, "1"), batch, {**mpi(0, 2, 0, 2), "DMLC_WORKER_ID": "0"}):
        assert reports(run([place], tmp_path)) == [[0, 1, 0, 1, [1.0] * 3]]


pytestmark = pytest.mark.timeout(240)
