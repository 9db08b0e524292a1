"""Jobs whose workers read and write their TCP connections on several I/O threads."""

from __future__ import annotations

import pytest

from cluster.test_server_deaths import CUT, lose_two_servers
from cluster.test_tracing import counted, tracing
from support.jobs import Job, run
from support.traces import load

#: Over the network, and through shared memory.
WAYS = {"tcp": "0", "shared": "1"}
_SUMS = """
    import bpsx, threading, numpy as np

    bpsx.init()
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith("bpsx-io-"))
    assert names == [f"bpsx-io-{i}" for i in range(3)], names
    sizes = [1, 7, 5_000, 9_000, 40_000, 300_000, 1_000_000]
    for step in range(20):
        begun = []
        for i in range(28):
            n, priority = sizes[i % 7], i * (-1) ** step
            values = np.arange(n, dtype=np.int64) * (bpsx.rank() + 1) + step
            begun.append((n, bpsx.push_pull_async(
                values, name=f"t{i}", average=False, priority=priority
            )))
        for n, handle in begun:
            all_ranks = bpsx.size() * (bpsx.size() + 1) // 2
            want = np.arange(n, dtype=np.int64) * all_ranks + step * bpsx.size()
            assert (bpsx.synchronize(handle) == want).all(), (step, n)
    assert bpsx.push_pull(np.ones(3, np.float32), name="last", average=False).tolist() == [3.0] * 3
    bpsx.shutdown()
    assert not [t for t in threading.enumerate() if t.name.startswith("bpsx-")]
"""


def _env(way: str, threads: int) -> dict[str, str]:
    return {
        "DMLC_ENABLE_RDMA": "tcp",
        "BYTEPS_ENABLE_IPC": WAYS[way],
        "BPSX_IO_THREADS": str(threads),
        "BYTEPS_SERVER_ENGINE_THREAD": "2",
    }


@pytest.mark.parametrize("cut", [CUT, {}], ids=["small partitions", "large"])
@pytest.mark.parametrize("way", WAYS)
def test_many_sums_of_all_sizes_at_once(way, cut):
    run(_SUMS, workers=3, servers=2, env={**_env(way, 3), **cut})


@pytest.mark.parametrize("processes", [1, 2])
def test_threads_of_the_pool_copy_large_sums(tmp_path, processes):
    source = """
        import bpsx, numpy as np

        bpsx.init()
        for step in range(1, 4):
            for n in (1_000_000, 10):
                values = np.full(n, step, np.float32)
                total = bpsx.push_pull(values, name=f"t{n}", average=False)
                assert (total == step * bpsx.size()).all()
        bpsx.shutdown()
    """
    shown = {"BYTEPS_DEBUG_SAMPLE_TENSOR": "0", "BYTEPS_LOG_LEVEL": "debug"}
    traced = tracing(tmp_path, workers=4, **shown, **_env("tcp", 2))
    with Job(source, servers=1, processes=processes, **traced) as job:
        job.results()
    root = job.workers[processes - 1]
    # Two partitions of the large tensor, one of the small one, which the driver copies.
    sent = {"PUSH": 9, "PULL": 9, "COPY": 6}
    (trace,) = (tmp_path / f"worker-{processes - 1}").rglob("comm.json")
    found = counted(load(trace))
    assert {stage: found[stage] for stage in sent} == sent, found
    for stage in ("PULL", "COPY"):
        assert f"step 3 {stage}: 524288 elements, first 12, last 12" in root.text()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_of_an_undisturbed_job_when_servers_die(tmp_path, way, threads):
    # Other threads copy the partitions of the last tensor.
    env = {**_env(way, threads), "BYTEPS_PARTITION_BYTES": "1000000"}
    lose_two_servers(tmp_path, 3, env, [100, 30_000, 300_000, 1_000_000])


@pytest.mark.parametrize("way", WAYS)
def test_a_script_that_fails_ends_its_job(way):
    source = """
        import bpsx, numpy as np

        bpsx.init()
        begun = [bpsx.push_pull_async(np.ones(300_000), name=f"t{i}") for i in range(20)]
        if bpsx.rank() == 1:
            raise RuntimeError("on purpose")
        for handle in begun:
            bpsx.synchronize(handle)
        bpsx.push_pull(np.ones(3), name="needs both")
    """
    with Job(source, workers=2, servers=1, env=_env(way, 2)) as job:
        assert job.workers[1].wait() == 1 and "on purpose" in job.workers[1].text()
        assert job.workers[0].wait() == 1 and "worker 1" in job.workers[0].text()
