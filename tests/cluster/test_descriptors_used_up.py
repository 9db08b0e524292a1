"""A server without a free file descriptor still sums element types and compressors that it has not
used before.
"""

from __future__ import annotations

import os
import resource
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
    for name, own in (
        ("onebit", {"scaling": True}),
        ("randomk", {"k": 3}),
        ("topk", {"k": 3}),
        ("dithering", {"k": 2}),
    ):
        bpsx.declare(name, compression={"compressor": name, "ef": "vanilla", **own})
        report(float(bpsx.push_pull(np.ones(3, "float64"), name, average=False)[2]))
    bpsx.shutdown()
"""


def test_the_first_exchange_of_each_kind_works_without_free_descriptors(tmp_path: Path) -> None:
    # The server compiles all, workers take what is there: half a minute less of a core.
    known = {"BPSX_CACHE_DIR": os.environ["BPSX_CACHE_DIR"]}
    with Job(
        WORKER,
        2,
        1,
        env={"BPSX_CACHE_DIR": str(tmp_path / "new"), "BYTEPS_MIN_COMPRESS_BYTES": "0"},
        worker_env={0: known, 1: known},
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
        assert job.results(300) == [[2.0] * 12] * 2
