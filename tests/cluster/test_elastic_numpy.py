"""Training with ``bpsx.elastic`` and NumPy."""

from __future__ import annotations

import signal

from support.jobs import Job

TRAINING = """
    import bpsx, time, numpy as np

    bpsx.init()

    @bpsx.elastic.run
    def train(state):
        report(["train", bpsx.rank(), bpsx.size(), state.step, state.note])
        while state.step < 120:
            state.weights += bpsx.push_pull(np.ones(1000), name="g", average=True)
            state.step += 1
            report(["step", state.step])
            time.sleep(0.005)
            state.commit()

    state = bpsx.State(step=0, weights=np.zeros(1000), note=["a", 1])
    train(state)
    report(["end", bpsx.rank(), bpsx.size(), state.step, float(state.weights.sum())])
    bpsx.shutdown()
"""


def test_each_worker_is_replaced_in_turn():
    with Job(TRAINING, workers=2, servers=2, env={"BPSX_ELASTIC": "shrink"}) as job:
        newest = 0
        for lost, step in ((0, 10), (1, 20)):
            job.workers[lost].wait_for_line(f'["step", {step}]')
            job.workers[lost].signal(signal.SIGKILL)
            job.start_worker(lost)
            newest = len(job.workers) - 1
            job.workers[newest].wait_for_line('["step"')
        living = job.workers[2:]
        assert [w.wait() for w in living] == [0, 0], living[0].text()
        reports = [w.reports()[-1] for w in living]
        assert sorted(r[1] for r in reports) == [0, 1]
        # An average of ones: each of the 120 steps has counted, once.
        assert {tuple(r[2:]) for r in reports} == {(2, 120, 120_000.0)}
        first = living[0].reports()[0]
        assert first[0] == "train" and first[3] >= 10 and first[4] == ["a", 1]
