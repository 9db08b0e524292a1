"""A process with pretend GPUs that has a real NCCL loaded, as PyTorch's ordinary wheel does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpus.machines import gpu_job, gpu_run

#: Stands for a real NCCL: it has the functions' names, and no GPU that it could use.
REAL = (
    "".join(
        f"int {name}(void) {{ return 1; }}\n"
        for name in (
            "ncclGetVersion",
            "ncclGetUniqueId",
            "ncclCommInitRank",
            "ncclCommInitRankConfig",
            "ncclCommAbort",
            "ncclGroupStart",
            "ncclGroupEnd",
            "ncclAllReduce",
            "ncclReduce",
            "ncclBroadcast",
            "ncclReduceScatter",
            "ncclAllGather",
            "ncclCommGetAsyncError",
        )
    )
    + 'const char *ncclGetErrorString(int e) { (void)e; return "the real NCCL"; }\n'
)
SUM = """
import ctypes, os
ctypes.CDLL(os.environ["REAL"], ctypes.RTLD_GLOBAL)     # before bpsx looks for NCCL
bpsx.init()
x = PretendArray(np.full(5000, bpsx.rank() + 1, "f4"), main)
push_pull("x", x).wait(60)
report(float(x.get().sum()))
bpsx.shutdown()
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    (folder / "real.c").write_text(REAL)
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libnccl.so.2",
            "-o",
            folder / "libnccl.so.2",
            folder / "real.c",
        ],
        check=True,
        timeout=60,
    )
    return folder / "libnccl.so.2"


def test_the_pretend_nccl_is_used(pretend: Path, real: Path) -> None:
    assert gpu_run(SUM, pretend, 1, 2, 0, env={"REAL": real}) == [[15000.0]] * 2


def test_a_real_nccl_is_refused(pretend: Path, real: Path) -> None:
    with gpu_job(SUM, pretend, 1, 2, 0, env={"REAL": real, "PRETEND_NCCL": real}) as job:
        for worker in job.workers:
            assert worker.wait() != 0
            assert f"{real} is not the pretend NCCL" in worker.text(), worker.text()
