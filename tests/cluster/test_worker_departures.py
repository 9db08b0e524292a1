"""Workers that get SIGTERM leave at a boundary, with status 0; the others go on without them."""

from __future__ import annotations

import signal

import pytest

from support.jobs import TRANSPORTS, Job

#: Each step adds 1 to each weight if all that count divide by the same number. A worker reports how
#: often each of its steps was summed, from a sum that nothing divides.
TRAINING = """
    import bpsx, time, zlib, numpy as np

    bpsx.init()

    @bpsx.elastic.run
    def train(state):
        report(["train", bpsx.rank(), bpsx.size(), state.step])
        while state.step < {steps}:
            state.weights += bpsx.push_pull(np.ones(1000), name="g", average=True)
            state.counted += float(bpsx.push_pull(np.ones(1), name="n", average=False)[0])
            state.step += 1
            report(["step", state.step, bpsx.size()])
            time.sleep(0.005)
            state.commit()

    state = bpsx.State(step=0, weights=np.zeros(1000), counted=0.0)
    state.register_departure_callbacks([
        lambda: report(["left", bpsx.rank(), bpsx.size(), state.step, state.counted])
    ])
    train(state)
    report(["end", bpsx.rank(), bpsx.size(), state.step, float(state.weights.sum()), state.counted])
    bpsx.shutdown()
"""
SHRINK = {"BPSX_ELASTIC": "shrink"}


class Departing(Job):
    """A job that runs :data:`TRAINING`."""

    def __init__(self, workers: int = 3, steps: int = 150, env=None, **more) -> None:
        self.steps = steps
        env = {**SHRINK, **(env or {})}
        super().__init__(TRAINING.format(steps=steps), workers=workers, env=env, **more)

    def ask(self, worker: int, step: int = 10) -> None:
        """Send SIGTERM to a worker after a step."""
        self.workers[worker].wait_for_line(f'["step", {step},')
        self.workers[worker].signal(signal.SIGTERM)

    def left(self, worker: int) -> list:
        """Await the good end of a worker that leaves; returns what its callback has reported."""
        assert self.workers[worker].wait() == 0, self.everything()
        return self.workers[worker].reports()[-1]

    def end_well(self, *left: int) -> None:
        """Await the end. No step is lost, and each worker's steps count until it has left."""
        stayed = [w for i, w in enumerate(self.workers) if i not in left]
        assert [w.wait() for w in stayed] == [0] * len(stayed), self.everything()
        last = [self.left(i) for i in left]
        assert {r[0] for r in last} <= {"left"}, last
        counted = len(stayed) * self.steps + sum(r[3] for r in last)
        expected = [len(stayed), self.steps, 1000.0 * self.steps, float(counted)]
        assert [w.reports()[-1][2:] for w in stayed] == [expected] * len(stayed)
        assert sorted(w.reports()[-1][1] for w in stayed) == list(range(len(stayed)))
        assert self.scheduler.wait() == 0, self.everything()
        assert [s.wait() for s in self.servers] == [0] * len(self.servers), self.everything()

    def everything(self) -> str:
        return "\n".join(p.text()[-3000:] for p in self.processes)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_worker_leaves(transport, servers, leaver):
    env = {**TRANSPORTS[transport], "PS_HEARTBEAT_TIMEOUT": "1000"}
    with Departing(env=env, servers=servers) as job:
        job.ask(leaver)
        assert job.left(leaver)[:3] == ["left", leaver, 3]
        job.end_well(leaver)
        log = job.scheduler.text()
        assert f"worker {leaver} (127.0.0.1, pid" in log and "leaves the job: SIGTERM" in log
        (line,) = [x for x in job.scheduler.errors if "which has left in good order" in x]
        assert "push 0 bytes again" in line
        assert float(line.split("again, ")[1].split(" s ")[0]) < 1.0
