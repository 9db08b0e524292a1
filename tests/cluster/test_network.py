"""Networks that are cut silently, or slow.

Only its silence shows that a cut peer is gone.
"""

from __future__ import annotations

import time

import pytest
from network import STEPPING, NetJob, Network, needed, net_job

from support.traces import about, load

pytestmark = needed

_SHORT = {"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "2", "BPSX_SCHEDULER_WAIT": "2"}


@pytest.mark.parametrize("who", ["worker 1", "server 0", "scheduler"])
def test_a_cut_is_detected_by_silence_named_and_ends_the_job(who):
    with net_job(STEPPING, _SHORT) as (network, job):
        for worker in job.workers:
            worker.wait_for_line("running")
        began = time.time()
        network.cut(who)
        statuses = {p.name: p.wait(40) for p in job.processes}  # including those that are cut off
        assert all(statuses.values()), "\n".join(p.text() for p in job.processes)
        for worker in job.workers:
            kind, text, when = worker.reports()[-1]
            assert kind == "PeerLostError"
            if worker.name != who:  # the process that is cut off loses all others
                assert who in text and network.address[who] in text, text
            # heartbeat time-out, promised time, and slack for a busy machine
            assert when - began < 2.5 + 5 + 10


def test_a_cut_that_ends_in_time_is_survived_with_right_sums():
    with net_job(
        """
        import bpsx, numpy as np
        bpsx.init()
        a = np.ones(200_000, np.float32)
        bpsx.barrier()
        report("running")
        for step in range(100):
            assert (bpsx.push_pull(a * step, name="x", average=False) == 2 * step).all()
            if step == 20:
                report("some")
                sys.stdin.readline()
        report("done")
    """,
        {"PS_HEARTBEAT_INTERVAL": "0.3", "PS_HEARTBEAT_TIMEOUT": "60"},
    ) as (network, job):
        for name in ("worker 1", "server 0"):
            network.cut(name)
            # Tested here: several heartbeats and retransmissions are lost.
            time.sleep(1)
            network.mend(name)
        for worker in job.workers:
            worker.wait_for_line("some")
        network.cut("worker 1")
        for worker in job.workers:
            worker.say("go")  # its pushes are lost in the cut network
        time.sleep(1)
        network.mend("worker 1")
        assert [r[-1] for r in job.results()] == ["done", "done"]


def test_over_a_slow_link_urgent_partitions_overtake():
    def slow(network):
        for name in ("worker 0", "worker 1"):
            network.slow(name, "50mbit")

    with net_job(
        """
        import bpsx, numpy as np, time
        from bpsx.api.verbs import session
        bpsx.init()
        large, small = np.ones(2_000_000, np.float32), np.ones(1000, np.float32)
        bpsx.push_pull(small, name="small")
        bpsx.push_pull(large, name="large")
        bpsx.barrier()
        before = session().counters()["messages_sent"]
        first = bpsx.push_pull_async(large, name="large", average=False)        # 8 MB take 1.3 s
        while session().counters()["messages_sent"] < before + 3:  # the exchange has begun
            time.sleep(0.001)
        second = bpsx.push_pull_async(small, name="small", average=False, priority=10)
        assert (bpsx.synchronize(second) == 2).all()
        early = not bpsx.poll(first)
        assert (bpsx.synchronize(first) == 2).all()
        report(early)
    """,
        {"BYTEPS_PARTITION_BYTES": "65536", "BPSX_SEND_BUFFER_KB": "128"},
        before=slow,
    ) as (_, job):
        assert job.results() == [[True], [True]]


def test_pushes_within_the_machine_wait_for_more_urgent_ones(tmp_path):
    env = {
        "BYTEPS_PARTITION_BYTES": "131072",
        "BYTEPS_FORCE_DISTRIBUTED": "1",
        "BYTEPS_ENABLE_MIXED_MODE": "0",  # the far server would have nothing to sum
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_START_STEP": "2",
        "BYTEPS_TRACE_END_STEP": "4",
        "BYTEPS_TRACE_DIR": str(tmp_path),
    }
    with (
        Network(
            ["scheduler", "worker 0", "server 1"], "50mbit", beside={"server 0": "worker 0"}
        ) as network,
        NetJob(
            """
        import numpy as np, bpsx
        bpsx.init()
        a = np.ones(32 << 15, np.float32)           # 32 partitions
        for i in range(3):
            report(int(bpsx.push_pull(a, average=False, name="a").sum()))
        bpsx.shutdown()
    """,
            network,
            env=env,
            workers=1,
            servers=2,
        ) as job,
    ):
        assert job.results() == [[32 << 15] * 3]
        here = network.address["worker 0"]
    servers = {
        about(tmp_path / f"server-{i}/comm.json")["host"]: load(tmp_path / f"server-{i}/comm.json")
        for i in range(2)
    }
    beside = {e["tid"] for e in servers[here] if e["name"].endswith(".ROUND")}
    pushed = [
        {
            e["tid"]: e["ts"] + e["dur"]
            for e in load(tmp_path / "0/comm.json")
            if e["name"].endswith(".PUSH") and e["args"]["step"] == step
        }
        for step in (2, 3)
    ]
    assert len(beside) == 16 and all(len(of) == 32 for of in pushed)
    # In the tensor's order, which is the order of urgency. A local exchange must not overtake one
    # that leaves the machine.
    for of in pushed:
        assert all(
            of[far] <= of[near]
            for near in beside
            for far in of.keys() - beside
            if int(far) < int(near)
        )
