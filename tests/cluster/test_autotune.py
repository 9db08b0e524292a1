"""Partitions whose size fits the links, in real jobs; machines are namespaces, or addresses."""

from __future__ import annotations

import re
import signal

import pytest
from network import NetJob, Network, needed

from cluster.test_worker_joins import Growing
from support.jobs import Job

_KIB = 1 << 10
_SUMS = """
    import bpsx, zlib, numpy as np

    bpsx.init()
    bpsx.declare("x", {compression})
    total = np.zeros(1_500_000, np.float32)
    for step in range(3):
        values = np.random.default_rng([step, bpsx.rank()]).standard_normal(total.size)
        total += bpsx.push_pull(values.astype(np.float32), name="x", average=False)
    report(zlib.crc32(total.tobytes()))
"""
_COMMON = {
    "PS_KEY_LOG": "1",
    "BYTEPS_LOG_LEVEL": "info",
    "BPSX_FIXED_ORDER": "1",
    "BYTEPS_SERVER_ENGINE_THREAD": "3",
}


def _run(rate: str, compression: object = None, **env: str) -> tuple[int, int, str]:
    """Run a job whose links have this rate.

    Returns the sums' checksum, the largest partition's bytes and what the scheduler has logged.
    """
    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    script = _SUMS.replace("{compression}", repr(compression))
    with (
        Network(names, rate, both=True) as network,
        NetJob(script, network, env={**_COMMON, **env}, servers=2) as job,
    ):
        ((first,), (second,)) = job.results()
        assert first == second
        texts = [server.text() for server in job.servers]
        largest = max(int(n) for t in texts for n in re.findall(r"key \d+ is .* (\d+) bytes", t))
        return first, largest, job.scheduler.text()


@needed
def test_slow_links_get_small_partitions_and_the_same_bits():
    bits, largest, log = _run("200mbit")
    assert largest == 128 * _KIB
    chosen = r"partitions have 128 KiB, on 1 of 3 lanes of a server: workers exchange \d+ MB/s"
    assert re.search(chosen, log)
    for given, most in (
        ({"BPSX_AUTOTUNE": "0"}, 2048 * _KIB),
        ({"BYTEPS_PARTITION_BYTES": str(512 * _KIB)}, 512 * _KIB),
    ):
        same, largest, log = _run("200mbit", **given)
        assert same == bits and 0.8 * most < largest <= most
        assert "partitions have" not in log


@needed
def test_halves_get_small_partitions_too():
    """What keeps state of each partition does not: a job on other links must find it again."""
    for compression, most in (({"fp16": True}, 128), ({"compressor": "onebit"}, 4096)):
        bits, largest, _ = _run("200mbit", compression)
        assert 0.9 * most * _KIB < largest <= most * _KIB
        same, largest, _ = _run("200mbit", compression, BPSX_AUTOTUNE="0")
        assert same == bits and 0.9 * max(most, 2048) * _KIB < largest


_DIES = """
    import bpsx, numpy as np

    bpsx.init()
    try:
        total = bpsx.push_pull(np.ones(1_000, np.float32), name="x", average=False)
        report(float(total[0]))
    except bpsx.BpsxError as e:
        report([type(e).__name__, str(e)])
"""


@needed
@pytest.mark.parametrize("elastic", ["off", "shrink"])
def test_a_worker_dies_while_links_are_measured(elastic):
    """The first sum takes half a minute on these links."""
    names = ["scheduler", "server 0", "server 1", *(f"worker {i}" for i in range(3))]
    env = {"BPSX_ELASTIC": elastic, "BYTEPS_LOG_LEVEL": "debug"}
    with (
        Network(names, "1mbit", both=True, burst="8k") as network,
        NetJob(_DIES, network, env=env, workers=3, servers=2) as job,
    ):
        for worker in job.workers:
            worker.wait_for_line("measures the links")
        job.workers[1].signal(signal.SIGKILL)
        found = [job.workers[i].reports() for i in (0, 2) if job.workers[i].wait() == 0]
        if elastic == "shrink":
            assert found == [[2.0], [2.0]]
        else:
            assert [reports[0][0] for reports in found] == ["PeerLostError"] * 2
            assert all("worker 1 (" in reports[0][1] for reports in found)


class Apart(Growing):
    """A job whose workers claim to run on machines of their own."""

    def command(self, name: str, words: list[str]) -> list[str]:
        kind, _, number = name.partition(" ")
        return ["env", f"DMLC_NODE_HOST=127.0.1.{number}", *words] if kind == "worker" else words


def test_an_interrupted_measurement_leaves_nothing_open():
    apart = {i: {"DMLC_NODE_HOST": f"127.0.1.{i}"} for i in range(2)}
    with Job(
        """
        import os, signal, threading, bpsx, numpy as np
        from bpsx.session import session

        if os.environ["DMLC_WORKER_ID"] == "0":
            session.measure = lambda *given: signal.raise_signal(signal.SIGINT)
        try:
            bpsx.init()
            bpsx.push_pull(np.ones(9, np.float32), "x")
        except KeyboardInterrupt:
            report([t.name for t in threading.enumerate() if t.name.startswith("bpsx")])
        except bpsx.BpsxError as e:
            report(str(e))
        """,
        worker_env=apart,
    ) as job:
        for worker in job.workers:
            worker.wait()
        assert job.workers[0].reports() == [[]]
        (told,) = job.workers[1].reports()
    assert "worker 0 (" in told and "init() ended by KeyboardInterrupt" in told


def test_a_newcomer_measures_nothing():
    with Apart(2, servers=2, env={"BYTEPS_LOG_LEVEL": "debug"}) as job:
        job.lose(1, 10)
        assert "measures the links" in job.workers[0].text()
        new = job.join(1)
        job.workers[new].wait_for_line('["step"')
        job.end_well(1)
        assert "measures the links" not in job.workers[new].text()


def test_a_job_measures_anew_when_it_is_resumed():
    """Its links may be others than before."""
    apart = {i: {"DMLC_NODE_HOST": f"127.0.1.{i}"} for i in range(2)}
    with Job(
        """
        import bpsx, numpy as np

        bpsx.init()
        report(float(bpsx.push_pull(np.ones(70_000, np.float32), "x", average=False)[0]))
        bpsx.suspend()
        sys.stdin.readline()
        bpsx.resume(2, 1)
        report(float(bpsx.push_pull(np.ones(70_000, np.float32), "x", average=False)[0]))
        """,
        env={"BYTEPS_LOG_LEVEL": "debug"},
        worker_env=apart,
    ) as job:
        assert [p.wait() for p in (job.scheduler, *job.servers)] == [0, 0]
        for p in (job.scheduler, *job.servers):
            p.end()
        assert "workers exchange" in job.scheduler.text()
        job.servers = []
        job.start_scheduler(int(job.port))
        job.start_server(0)
        for worker in job.workers:
            worker.say("resume")
        assert job.results() == [[2.0, 2.0]] * 2
        assert "workers exchange" in job.scheduler.text()
        assert all(w.text().count("measures the links") == 2 for w in job.workers)
