"""Runs the test suites that need an RDMA adapter in a virtual machine with a software adapter."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpus import pretend
from machine.emulated import Finished, MachineError, NoPackages, compiling, run, why_not

_WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT), pytest.mark.timeout(2600)]
_SUITES = [
    "tests/conformance/test_transports.py",
    "tests/conformance/test_lent_memory.py",
    "tests/conformance/test_drop.py",
    "tests/conformance/test_known_workers.py",
    "tests/cluster/test_rdma.py",
    "tests/cluster/test_rdma_deaths.py",
    "tests/gpus/test_rdma_on_gpus.py",
]


#: Tests of these suites that need no adapter.
_ON_THE_HOST = [
    "tests/cluster/test_rdma.py::test_without_libibverbs_the_error_says_what_to_install"
]

# What servers load when they start, and what these suites compress.
_COMPILE = """
from bpsx import kernels
from bpsx.compression.spec import compression, make
from bpsx.dtypes import BY_CODE
for code in BY_CODE:
    kernels.load(code)
for given in (
    {"compressor": "onebit", "ef": "vanilla"},
    {"compressor": "topk", "k": 0.9, "ef": "vanilla"},
    {"compressor": "topk", "k": 4096},
):
    make(compression(given), "float32", 4096, 0, None)
"""


def in_machine(
    *words: str,
    timeout: float = 2400,
    device: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a Python command in the machine; return its result."""
    try:
        return run(
            shlex.join([sys.executable, *words]),
            timeout=timeout,
            device=device,
            memory_mb=4096,
            environment=environment,
        )
    except NoPackages as e:
        pytest.skip(str(e))


def test_the_suites_that_need_an_adapter_pass(tmp_path: Path) -> None:
    """Conformance; sums, training, limits, and deaths with and without an end, in whole jobs."""
    subprocess.run(
        [sys.executable, "-c", _COMPILE], env={**os.environ, **compiling()}, check=True, timeout=120
    )
    # All processes can see the pretend GPUs, so those of all tests are forks of the same few.
    paths = pretend.environment(pretend.build(tmp_path / "pretend"))
    environment = {
        "BPSX_TEST_PATIENCE": "4",
        "BPSX_TEST_PRETEND": str(tmp_path / "pretend"),
        **{name: paths[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH")},
    }
    options = ["-q", "-p", "no:cacheprovider", "-k", "rdma", "--timeout", "900"]
    options += [word for test in _ON_THE_HOST for word in ("--deselect", test)]
    done = in_machine("-m", "pytest", *options, *_SUITES, environment=environment)
    assert done.status == 0, done.output[-6000:]
    passed = re.search(
        r"(\d+) passed, 1 skipped", done.output
    )  # a test of a machine without an adapter
    assert passed and int(passed[1]) >= 80, done.output[-3000:]


def test_a_machine_without_an_adapter() -> None:
    """Its kernel supports RDMA."""
    done = in_machine(
        "-c",
        "from bpsx.transports.rdma.endpoint import RdmaEndpoint\n"
        "RdmaEndpoint(heartbeat_interval=5, heartbeat_timeout=30)",
        device=False,
    )
    assert done.status == 1 and "TransportError: this machine has no RDMA adapter" in done.output, (
        done.output
    )


def test_a_machine_that_does_not_end_is_stopped() -> None:
    with pytest.raises(MachineError, match="has not ended after 15"):
        in_machine("-c", "import time; print('here', flush=True); time.sleep(1000)", timeout=15)
