"""Workers, servers and schedulers are killed at random; others come in their place."""

from __future__ import annotations

import random
import signal
import time

import pytest

from support.jobs import TRANSPORTS, Job, Process

STEPS = 350
TRAINING = f"""
    import bpsx, time, zlib, numpy as np

    SIZES = [3, 2_000, 30_000, 400_000]
    bpsx.init()

    @bpsx.elastic.run
    def train(state):
        while state.step < {STEPS}:
            begun = [
                bpsx.push_pull_async(
                    np.full(n, 1.0 + state.step % 7, np.float32), name=f"g{{i}}", average=i % 2 == 0
                )
                for i, n in enumerate(SIZES)
            ]
            for i, handle in enumerate(begun):
                state.weights[i] = state.weights[i] + bpsx.synchronize(handle)
            state.step += 1
            report(["step", state.step, zlib.crc32(state.weights[3].tobytes())])
            time.sleep(0.004)
            state.check_host_updates()

    state = bpsx.State(step=0, weights=[np.zeros(n, np.float32) for n in SIZES])
    train(state)
    report(["end", [zlib.crc32(w.tobytes()) for w in state.weights]])
    bpsx.barrier()
    bpsx.shutdown()
"""
ENV = {"BPSX_ELASTIC": "shrink", "BPSX_ELASTIC_WAIT": "60", "BPSX_FIXED_ORDER": "1"}
#: Seconds between two deaths, and for which there is no scheduler at most.
EVERY, AWAY = (0.2, 0.8), 0.7


class Chaos:
    """The processes of a job, some of which die. Each place of a worker has one at a time."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        self._job, self._rng = job, rng
        self._places = dict(enumerate(job.workers))
        self._next, self._scheduler_at = time.monotonic() + 0.5, 0.0
        self.killed: list[str] = []

    @property
    def living(self) -> list[Process]:
        """The workers that nobody has killed."""
        return list(self._places.values())

    def step(self) -> None:
        """Kill a process, or start a scheduler, if it is time."""
        now, port = time.monotonic(), int(self._job.port)
        if self._scheduler_at and now >= self._scheduler_at:
            self._scheduler_at = 0.0
            self._job.start_scheduler(port)
        if now < self._next:
            return
        self._next = now + self._rng.uniform(*EVERY)
        kind = self._rng.choice(["worker", "worker", "server", "scheduler"])
        if kind == "server":
            self._kill(self._rng.choice([s for s in self._job.servers if s.popen.poll() is None]))
            self._job.start_server(len(self._job.servers))
        elif self._scheduler_at or not all(w.reports() for w in self.living):
            return  # a job whose last worker with the model is lost ends
        elif kind == "worker":
            number = self._rng.choice(list(self._places))
            self._kill(self._places[number])
            self._job.start_worker(number)
            self._places[number] = self._job.workers[-1]
        else:
            assert self._job.scheduler is not None
            self._kill(self._job.scheduler)
            self._job.scheduler.wait()
            self._scheduler_at = now + self._rng.uniform(0, AWAY)

    def _kill(self, victim: Process) -> None:
        victim.signal(signal.SIGKILL)
        self.killed.append(victim.name)

    def has_ended(self) -> bool:
        """Whether a worker has made all steps, or has failed."""
        ended = any(w.popen.poll() is not None for w in self.living)
        return ended or any(w.reports()[-1:] and w.reports()[-1][0] == "end" for w in self.living)

    def came_too_late(self, worker: Process) -> bool:
        """Wait until a worker that is not in the job has ended, or waits for a scheduler in vain.

        The job, and its scheduler with it, has ended.
        """
        while worker.popen.poll() is None:
            if "waiting for the scheduler" in worker.text():
                worker.signal(signal.SIGKILL)
                return True
            time.sleep(0.02)
        return "accepts no more nodes" in worker.text()

    def finish(self) -> None:
        """Let there be a scheduler."""
        if self._scheduler_at:
            self._job.start_scheduler(int(self._job.port))


@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_all_that_live_have_the_same_weights_in_each_step(transport):
    seed = random.randrange(10**6)
    with Job(TRAINING, workers=4, servers=3, env={**TRANSPORTS[transport], **ENV}) as job:
        chaos = Chaos(job, random.Random(seed))
        while not chaos.has_ended():
            chaos.step()
            time.sleep(0.02)
        chaos.finish()
        story = f"seed {seed}, killed {chaos.killed}\n" + "\n".join(
            p.text()[-1500:] for p in job.processes
        )
        ends = [w for w in chaos.living if w.reports() and w.wait() == 0]
        assert job.scheduler is not None and job.scheduler.wait() == 0, story
        # The scheduler refuses a worker that starts after the end, unless it has ended, too.
        late = [w for w in chaos.living if w not in ends and chaos.came_too_late(w)]
        ends += [w for w in chaos.living if w not in ends + late and w.wait() == 0]
        assert len(ends + late) == len(chaos.living), story
        assert len({str(w.reports()[-1]) for w in ends}) == 1 and len(ends) >= 3, story
        found: dict[int, dict[int, list[str]]] = {}
        for worker in job.workers:
            steps = [rest for kind, *rest in worker.reports() if kind == "step"]
            # A step that only this worker had when it was killed is made again without it.
            for step, digest in steps if worker in chaos.living else steps[:-1]:
                who = f"{worker.name} (pid {worker.popen.pid})"
                found.setdefault(step, {}).setdefault(digest, []).append(who)
        assert sorted(found) == list(range(1, STEPS + 1))
        unlike = {step: digests for step, digests in found.items() if len(digests) > 1}
        assert not unlike, f"{unlike}\n{story}"
