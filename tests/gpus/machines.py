"""Real jobs whose workers have pretend GPUs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpus.pretend import environment
from support.jobs import Job

PRELUDE = "from gpus.worker import *\n"
#: Source of a worker whose kernels run on Numba's simulator.
SIMULATED = """
    from bpsx.kernels.cuda import device

    launch = device.Kernel.launch


    def after_the_stream(self, blocks, stream, *arguments):
        # The simulator runs a kernel at once, wherever it is queued.
        cuda.sync(stream)
        launch(self, blocks, stream, *arguments)


    device.Kernel.launch = after_the_stream
"""
#: Number of machines, of processes per machine, of servers.
SHAPES = {"alone": (1, 2, 0), "direct": (2, 1, 1), "machine": (1, 2, 1), "one": (1, 1, 0)}


def gpu_job(
    source: str,
    pretend: Path,
    machines: int = 1,
    processes: int = 1,
    servers: int = 0,
    *,
    env: Mapping[str, object] | None = None,
    worker_env: Mapping[int, Mapping[str, object]] | None = None,
) -> Job:
    """A job of ``machines`` x ``processes`` workers, each with its own GPU.

    They run ``source`` with the names of gpus.worker.
    """
    paths = environment(pretend)
    everybody = {
        name: paths[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "PRETEND_NCCL")
    } | {"BPSX_SPIN_US": "0"}
    if servers and machines == 1:
        everybody["BYTEPS_FORCE_DISTRIBUTED"] = "1"
    everybody |= {name: str(value) for name, value in (env or {}).items()}
    own: dict[int, dict[str, str]] = {
        i: {"PRETEND_FIRST_GPU": str(i % processes)} for i in range(machines * processes)
    }
    for i, more in (worker_env or {}).items():
        own[i] |= {k: str(v) for k, v in more.items()}
    return Job(
        PRELUDE + textwrap.dedent(source),
        machines * processes,
        servers,
        env=everybody,
        worker_env=own,
        processes=processes,
        alone=machines * processes == 1 and not servers,
    )


def gpu_run(
    source: str, pretend: Path, machines: int = 1, processes: int = 1, servers: int = 0, **more: Any
) -> list[list[Any]]:
    """Run such a job until it has ended well; return the values that each worker reported."""
    with gpu_job(source, pretend, machines, processes, servers, **more) as job:
        return job.results()


def run(names: str, source: str, pretend: Path, *shape: int, **more: Any) -> list[list[Any]]:
    """Call :func:`gpu_run` with ``names`` followed by ``source``, which may be indented."""
    return gpu_run(names + textwrap.dedent(source), pretend, *shape, **more)
