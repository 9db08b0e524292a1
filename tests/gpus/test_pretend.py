"""Tests of the pretend CUDA driver and the pretend NCCL, on which other GPU tests rely."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpus.pretend import environment
from gpus.scenarios import SCENARIOS

VARIABLES: dict[str, dict[str, object]] = {
    "devices": {"PRETEND_GPUS": 2, "PRETEND_FIRST_GPU": 10},
    "asynchrony": {"PRETEND_DELAY_US": 400_000},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_pretend_driver_passes_each_scenario(name: str, pretend: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpus.scenarios", name],
        env=environment(pretend, **VARIABLES.get(name, {})),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def together(
    name: str, n: int, pretend: Path, folder: Path, one_gpu: bool = False
) -> list[tuple[int, str]]:
    """Run a scenario; return (exit status, stderr) of each rank."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "gpus.nccl_scenarios", name, str(k), str(n), str(folder)],
            text=True,
            stderr=subprocess.PIPE,
            env=environment(pretend, PRETEND_FIRST_GPU=0 if one_gpu else k),
        )
        for k in range(n)
    ]
    try:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, errors) for rank, errors in zip(ranks, said)]


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("collectives", 1),
        ("collectives", 2),
        ("collectives", 3),
        ("large", 3),
        ("sends", 2),
        ("aborted", 2),
        ("asked", 2),
    ],
)
def test_the_pretend_nccl_passes_each_scenario(
    name: str, n: int, pretend: Path, tmp_path: Path
) -> None:
    for status, errors in together(name, n, pretend, tmp_path):
        assert status == 0, errors


def test_nccl_refuses_one_gpu_twice(pretend: Path, tmp_path: Path) -> None:
    for status, errors in together("one_gpu_twice", 2, pretend, tmp_path, one_gpu=True):
        assert status == 0, errors


@pytest.mark.parametrize(
    ("name", "n", "told"),
    [
        (
            "another_order",
            2,
            (
                "rank 0 queued <#2 ncclAllReduce of 16 float32, sum>, rank 1 <#2 ncclAllReduce of"
                " 32 float32, sum>"
            ),
        ),
        (
            "another_root",
            3,
            (
                "rank 0 queued <#1 ncclBroadcast of 64 float32, root 0>, rank 1 <#1 ncclBroadcast"
                " of 64 float32, root 1>"
            ),
        ),
        (
            "another_size_sent",
            2,
            "rank 0 queued <ncclSend of 32 float32, to 1>, rank 1 <ncclRecv of 33 float32, from 0>",
        ),
    ],
)
def test_ranks_that_differ_abort_with_the_difference(
    name: str, n: int, told: str, pretend: Path, tmp_path: Path
) -> None:
    """Also operations that only wait for one of them."""
    for status, errors in together(name, n, pretend, tmp_path):
        gone = name == "another_root" and status == 0  # the rank that never came
        assert (
            gone
            or status == -signal.SIGABRT
            and re.findall("^pretend NCCL: (.*)$", errors, re.M) == [told]
        ), errors
