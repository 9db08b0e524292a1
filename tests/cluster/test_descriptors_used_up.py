"""A server without a free file descriptor still sums element types and compressors that it has not
used before.
"""

from __future__ import annotations

import os
import resource
import sys
import textwrap
from pathlib import Path

import pytest

from support.jobs import Job

pytestmark = pytest.mark.timeout(600)  # the server compiles all that it can

WORKER = """
    import bpsx, ml_dtypes, numpy as np

    bpsx.init()
    report(float(bpsx.push_pull(np.ones(3, "float32"), "first", average=False)[0]))
    input()
    for dtype in ("float16", "float64", "uint8", "int8", "int32", "int64", ml_dtypes.bfloat16):
        report(float(bpsx.push_pull(np.ones(3, dtype), np.dtype(dtype).name, average=False)[2]))
    for name, own in {
        "onebit": {"scaling": True},
        "randomk": {"k": 3},
        "topk": {"k": 3},
        "dithering": {"k": 2},
    }.items():
        if name not in os.environ["COMPRESSORS"]:
            continue
        bpsx.declare(name, compression={"compressor": name, "ef": "vanilla", **own})
        report(float(bpsx.push_pull(np.ones(3, "float64"), name, average=False)[2]))
    bpsx.shutdown()
"""


class _SharedDescriptors(Job):
    """A server on a Linux whose threads cannot have descriptors of their own."""

    def command(self, name: str, words: list[str]) -> list[str]:
        text = """
            import runpy
            from bpsx.system import descriptors
            descriptors._unshare = lambda: False
            runpy.run_module("bpsx.server", run_name="__main__", alter_sys=True)
        """
        return [sys.executable, "-c", textwrap.dedent(text)] if name == "server 0" else words


@pytest.mark.parametrize(
    ("kind", "compressors"),
    [(Job, "onebit randomk topk dithering"), (_SharedDescriptors, "onebit")],
    ids=["own", "shared"],
)
def test_the_first_exchange_of_each_kind_works_without_free_descriptors(
    kind: type[Job], compressors: str, tmp_path: Path
) -> None:
    # The server compiles all, workers take what is there: half a minute less of a core.
    known = {"BPSX_CACHE_DIR": os.environ["BPSX_CACHE_DIR"]}
    new = {"BPSX_CACHE_DIR": str(tmp_path / "new"), "COMPRESSORS": compressors}
    with kind(
        WORKER, 2, 1, env={**new, "BYTEPS_MIN_COMPRESS_BYTES": "0"}, worker_env={0: known, 1: known}
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("2.0")
        server = job.servers[0].popen.pid
        # The server can open no more files, but keeps its open ones: the lowest free number is
        # beyond the limit.
        used = {int(name) for name in os.listdir(f"/proc/{server}/fd")}
        free = next(number for number in range(len(used) + 1) if number not in used)
        resource.prlimit(
            server,
            resource.RLIMIT_NOFILE,
            (free, resource.prlimit(server, resource.RLIMIT_NOFILE)[1]),
        )
        for worker in job.workers:
            worker.say("")
        assert job.results(300) == [[2.0] * (8 + len(compressors.split()))] * 2
