"""Runs functions of a test module in every worker of a local job and collects their results; or
runs any command with ``bpsx-run``.

``torch_job`` and its neighbours call the functions in a worker of a framework.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from support.jobs import Job, Process

HERE = Path(__file__).parents[1] / "frameworks"
JOB_SECONDS = 300.0


class Finished(NamedTuple):
    """``results[rank][function]``: the function's result on that worker; a dead worker has none."""

    status: int
    output: str
    results: dict[int, dict[str, Any]]


def launch(
    command: list[str], workers: int, servers: int, processes: int = 1, **environment: str
) -> tuple[int, str]:
    """Run ``command`` in ``processes`` processes on each of ``workers`` imitated machines; returns
    the launcher's status and all output.

    Kills a job that does not end.
    """
    quick = {
        "OMP_NUM_THREADS": "1",
        "BPSX_RENDEZVOUS_TIMEOUT": "60",
        "BPSX_DEADLOCK_SECONDS": "8",
        **environment,
    }
    job = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bpsx.launch",
            "--local",
            "--workers",
            str(workers),
            "--servers",
            str(servers),
            "--processes",
            str(processes),
            *command,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **quick},
    )
    try:
        output, _ = job.communicate(timeout=JOB_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        output += f"\n[killed after {JOB_SECONDS} s]"
    return job.returncode, output


def train(script: list[str], workers: int, servers: int, **environment: str) -> tuple[int, str]:
    """Do what :func:`launch` does with ``python SCRIPT...``, without bpsx-run: output has the same
    marks, and the processes are forks of one that has imported the framework.

    ``script``: a file and its arguments, or ``-c`` and a source.
    """
    own = {"BYTEPS_ENABLE_IPC": "1", **_quick(), **environment}
    with Job("", workers, servers, env=own, script=script) as running:
        statuses = [p.wait(JOB_SECONDS) for p in running.processes]
        output = "".join(
            f"[{p.name}] {line}\n" for p in running.processes for line in (*p.lines, *p.errors)
        )
    return next((s for s in statuses if s), 0), output


def alone(script: list[str], **environment: str) -> tuple[int, str, str]:
    """Run ``python SCRIPT...`` without a job, as a fork of a process that has imported the
    framework; return the status, stdout and stderr.

    ``script``: a file and its arguments, or ``-c`` and a source.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_"))}
    own = {**clean, "OMP_NUM_THREADS": "1", **environment}
    process = Process("the process", [sys.executable, *script], own)
    try:
        status = process.wait(120)
        return status, "\n".join(process.lines), "\n".join(process.errors)
    finally:
        process.end()


def _quick() -> dict[str, str]:
    """As bpsx-run gives its jobs a secret."""
    return {"BPSX_DEADLOCK_SECONDS": "8", "BPSX_SECRET": secrets.token_hex(16)}


def source_of(job: str, module_file: str, functions: list[str], out: Path) -> str:
    """Return the source of a worker that calls ``functions`` of ``module_file`` and saves their
    results in ``out``.

    ``job``: the framework's module, such as ``torch_job``.
    """
    paths = [str(HERE), str(HERE.parent)]
    return (
        f"import sys\nsys.path[:0] = {paths!r}\nfrom support import {job}\n"
        f"{job}.work({module_file!r}, {str(out)!r}, {functions!r})"
    )


def run_job(
    job: str,
    module_file: str,
    functions: list[str],
    out: Path | pytest.TempPathFactory,
    workers: int = 2,
    servers: int = 1,
    processes: int = 1,
    *,
    apart: bool = False,
    **environment: str,
) -> Finished:
    """Call ``functions`` of ``module_file`` one after the other in each worker, between ``init``
    and ``shutdown``.

    ``out``: an empty folder for results, or pytest's factory of folders. With the factory, the job
    runs once for all processes of a test run.

    ``apart``: do not fork the workers from one process, which would give them the same hash seed
    and so the same order in sets of strings; see :mod:`support.forking`.
    """
    options = (workers, servers, processes)
    load = importlib.import_module(f"support.{job}").load
    if isinstance(out, Path):
        status, output = _run(job, module_file, functions, out, *options, apart, environment)
    else:
        out, status, output = _run_once(
            job, module_file, functions, out, *options, apart, environment
        )
    return Finished(status, output, {int(f.stem): load(f) for f in out.glob("*.results")})


def _run_once(
    job: str, module_file: str, functions: list[str], folders: pytest.TempPathFactory, *how: Any
) -> tuple[Path, int, str]:
    common = (
        folders.getbasetemp().parent
        if "PYTEST_XDIST_WORKER" in os.environ
        else folders.getbasetemp()
    )
    known = hashlib.sha256(repr((module_file, functions, how)).encode()).hexdigest()[:16]
    out, end = (
        common / f"{Path(module_file).stem}-{known}",
        common / f"{Path(module_file).stem}-{known}.json",
    )
    with open(common / f"{known}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not end.exists():
            end.write_text(json.dumps(_run(job, module_file, functions, out, *how)))
        status, output = json.loads(end.read_text())
    return out, status, output


def _run(
    job: str,
    module_file: str,
    functions: list[str],
    out: Path,
    workers: int,
    servers: int,
    processes: int,
    apart: bool,
    environment: dict[str, str],
) -> tuple[int, str]:
    out.mkdir(parents=True, exist_ok=True)
    source = source_of(job, module_file, functions, out)
    alone = workers * processes + servers == 1
    seeds = (
        {i: {"PYTHONHASHSEED": str(i + 1)} for i in range(workers * processes)} if apart else None
    )
    with Job(
        source,
        workers * processes,
        servers,
        processes=processes,
        env={**_quick(), **environment},
        worker_env=seeds,
        alone=alone,
    ) as running:
        statuses = [p.wait(JOB_SECONDS) for p in running.processes]
        output = "\n".join(p.text() for p in running.processes)
    return next((s for s in statuses if s), 0), output


def each(job: Finished, name: str) -> list[Any]:
    """Return the results of function ``name``, by worker."""
    return [job.results[rank][name] for rank in sorted(job.results)]


def module_at(file: str) -> ModuleType:
    """Import the test module in the way that a worker does."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # TensorFlow looks there for the functions that it rewrites
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def place(out: str, rank: int) -> Path:
    """Return the file with a worker's results, for its framework's ``load``."""
    return Path(out) / f"{rank}.results"
