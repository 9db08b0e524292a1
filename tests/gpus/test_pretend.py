"""The pretend CUDA driver and the pretend NCCL: what tests of the GPU's code rest on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpus.pretend import environment
from gpus.scenarios import SCENARIOS

VARIABLES: dict[str, dict[str, object]] = {
    "devices": {"PRETEND_GPUS": 2, "PRETEND_FIRST_GPU": 10}, "asynchrony": {"PRETEND_DELAY_US": 100_000}}


@pytest.mark.parametrize("name", SCENARIOS)
def test_driver(name: str, pretend: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "gpus.scenarios", name], env=environment(pretend, **VARIABLES.get(name, {})),
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
