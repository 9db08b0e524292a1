"""``bench demo``: the step time of the demo's example under bpsx.

The peer is the same script under DistributedDataParallel with gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.jobs import ROOT, progress
from bench.report import BenchError, Case, median_case
from bpsx.config import child_environment

_SCRIPT = "examples/pytorch/digits.py"
_SECONDS = 600.0
# The same for both sides: with two processes on few cores, more threads would measure the operating
# system's scheduler.
_THREADS = {"OMP_NUM_THREADS": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, help="epochs per run (default: the script's)")


def run(options: argparse.Namespace) -> list[Case]:
    """Return the case ``demo``. Raises :class:`BenchError` if the script is missing or fails."""
    if not (ROOT / _SCRIPT).exists():
        raise BenchError(f"{_SCRIPT} is missing")
    turns = 2 if options.quick else 5
    epochs = [] if options.epochs is None else ["--epochs", str(options.epochs)]
    ours, gloo = [], []
    for turn in range(turns):
        progress(f"turn {turn + 1} of {turns}")
        with tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder:
            ours.append(_ours(Path(folder) / "ours.json", epochs))
            gloo.append(_gloo(Path(folder) / "gloo.json", epochs))
    return [
        median_case(
            "demo",
            ours,
            "ms",
            peer=statistics.median(gloo),
            note="median step of digits.py, 2 workers and 1 server; the same under DDP with gloo",
        )
    ]


def _ours(result: Path, epochs: list[str]) -> float:
    launch = [sys.executable, "-m", "bpsx.launch", "--local", "--workers", "2", "--servers", "1"]
    _finish([_start([*launch, *_script(result, epochs)])])
    return _step_ms(result)


def _gloo(result: Path, epochs: list[str]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    _finish(
        [
            _start(
                [*_script(result, epochs), "--backend", "gloo"],
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                **where,
            )
            for rank in range(2)
        ]
    )
    return _step_ms(result)


def _script(result: Path, epochs: list[str]) -> list[str]:
    return [sys.executable, _SCRIPT, "--json", str(result), *epochs]


def _start(command: list[str], **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=child_environment(**_THREADS, **environment),
    )


def _finish(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all processes.

    Raises :class:`BenchError` if one fails or takes too long; then none is left running.
    """
    try:
        for process in processes:
            if process.wait(_SECONDS):
                raise BenchError(f"{process.args!r} ended with status {process.returncode}")
    except subprocess.TimeoutExpired as late:
        raise BenchError(f"{late.cmd!r} took longer than {_SECONDS:.0f} s") from None
    finally:
        for process in processes:
            # A terminated launcher ends its children; a killed one could not.
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()


def _step_ms(result: Path) -> float:
    """Return ``step_ms_median`` of the script's result: its median step in milliseconds."""
    try:
        return float(json.loads(result.read_text())["step_ms_median"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{_SCRIPT} --json wrote no step_ms_median: {type(error).__name__}: {error}"
        ) from None
