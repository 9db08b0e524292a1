"""Copies and system calls of a partition, counted in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.counting import Counts, counting
from support.jobs import Job

_N, _BYTES, _ROUNDS = 8, 512 << 10, 20
#: Each worker counts what it and the servers do in some rounds. All stand at a barrier then.
_ROUNDS_OF = f"""
    import bpsx, numpy as np
    from support.counting import counted

    bpsx.init()
    given = [np.ones({_BYTES} // 4, np.float32) for _ in range({_N})]
    sums = [np.empty_like(one) for one in given]

    def once():
        begun = [
            bpsx.push_pull_async(one, name=f"x{{i}}", output=sums[i], average=False)
            for i, one in enumerate(given)
        ]
        for handle in begun:
            bpsx.synchronize(handle)

    for _ in range(5):
        once()
    pids = [os.getpid(), *map(int, sys.stdin.readline().split())]
    bpsx.barrier()
    before = [counted(pid) for pid in pids]
    bpsx.barrier()
    for _ in range({_ROUNDS}):
        once()
    bpsx.barrier()
    report([counted(pid).since(then) for pid, then in zip(pids, before)])
    bpsx.barrier()
    bpsx.shutdown()
"""


#: Way -> its variables, and how often a worker copies a partition: the answer, and for shared
#: memory the push, too. What both may copy besides: what was read ahead, or by ZeroMQ.
_WAYS = {
    "tcp": ({"DMLC_ENABLE_RDMA": "tcp", "BYTEPS_ENABLE_IPC": "0"}, 1, 0.01),
    "tcp, I/O threads": (
        {"DMLC_ENABLE_RDMA": "tcp", "BYTEPS_ENABLE_IPC": "0", "BPSX_IO_THREADS": "2"},
        1,
        0.01,
    ),
    "shm": ({"DMLC_ENABLE_RDMA": "tcp", "BYTEPS_ENABLE_IPC": "1"}, 2, 0.01),
    "zmq": ({"DMLC_ENABLE_RDMA": "zmq", "BYTEPS_ENABLE_IPC": "0"}, 1, 0.1),
}


def _counts(folder: Path, **variables: str) -> list[list[Counts]]:
    """Return what each worker has counted: of itself, and of the servers."""
    with Job(_ROUNDS_OF, workers=2, servers=2, env={**counting(folder), **variables}) as job:
        pids = " ".join(str(server.popen.pid) for server in job.servers)
        for worker in job.workers:
            worker.say(pids)
        return [[Counts(*one) for one in counts] for (counts,) in job.results()]


@pytest.mark.parametrize("elastic", ["off", "servers", "shrink"])
@pytest.mark.parametrize("way", _WAYS)
def test_a_worker_copies_each_answer_once_and_a_server_nothing(tmp_path, way, elastic):
    """Jobs that survive deaths keep results without another copy, too."""
    variables, copies, more = _WAYS[way]
    partitions = _N * _ROUNDS
    for worker, *servers in _counts(tmp_path, BPSX_ELASTIC=elastic, **variables):
        made, *others = (one.copied / partitions / _BYTES for one in (worker, *servers))
        assert copies <= made < copies + more and all(other <= more for other in others)


@pytest.mark.parametrize("way", ["tcp", "tcp, I/O threads"])
def test_a_system_call_moves_many_bytes(tmp_path, way):
    partitions = _N * _ROUNDS
    for counts in _counts(tmp_path, **_WAYS[way][0]):
        worker, *servers = counts
        assert 0 <= worker.sent / partitions - _BYTES < 512  # headers
        assert 0 <= worker.received / partitions - _BYTES < 512
        # Each partition has two workers, and one of the servers.
        both = sum(one.sent + one.received for one in servers) / partitions / 4
        assert 0 <= both - _BYTES < 512
        for one in counts:  # as many as a segment of loopback has, on average
            assert one.sent / one.send_calls > 64 << 10
            assert one.received / one.receive_calls > 64 << 10
