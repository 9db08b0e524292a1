"""The hook for DistributedDataParallel and the torch.distributed backend when processes die.

Deaths of servers and of the scheduler do not change the weights. A worker's death is an error that
names the worker.
"""

from __future__ import annotations

import functools
import signal
import tempfile
import time

import pytest

from support.jobs import PROMISED, Job

_SCRIPT = """
    import hashlib, torch
    import torch.distributed as dist
    import bpsx.torch as bps

    HOOK = {hook}
    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo" if HOOK else "bpsx",
        init_method="file://" + os.environ["STORE"],
        rank=bps.rank(),
        world_size=bps.size(),
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300), torch.nn.Tanh(),
        torch.nn.Linear(300, 5),
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if HOOK:
        ddp.register_comm_hook(None, bps.ddp_comm_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    def step(i):
        optimizer.zero_grad()
        batch = torch.Generator().manual_seed(100 * i + bps.rank())
        ddp(torch.randn(8, 20, generator=batch)).pow(2).sum().backward()
        optimizer.step()
        if not HOOK:
            total = torch.full((3,), float(bps.rank() + i))
            dist.all_reduce(total)
            assert torch.equal(total, torch.full((3,), 2.0 * i + 1)), total

    try:
        for i in range(12):
            if i in (4, 8):
                report("at %d" % i)
                hear()
            step(i)
    except RuntimeError as e:
        report(["failed", str(e)])
        sys.stderr.flush()
        os._exit(9)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    report(["weights", hashlib.sha256(weights).hexdigest()])
    if not HOOK:
        dist.destroy_process_group()
    bps.shutdown()
"""
WAYS = ("hook", "backend")


class Training(Job):
    """Two workers that train with DistributedDataParallel, and two servers."""

    def __init__(self, way: str, store: str, elastic: str = "servers") -> None:
        env = {"BPSX_ELASTIC": elastic, "STORE": f"{store}/store", "CUDA_VISIBLE_DEVICES": ""}
        super().__init__(_SCRIPT.format(hook=way == "hook"), servers=2, env=env)

    def everything(self) -> str:
        return "\n".join(p.text() for p in self.processes)

    def await_step(self, step: int) -> None:
        """Wait until all workers stand before ``step``, where they wait for :meth:`go_on`."""
        for worker in self.workers:
            worker.wait_for_line(f'"at {step}"')

    def go_on(self) -> None:
        for worker in self.workers:
            worker.say("go")

    def weights(self, *lost: int) -> str:
        """Await the end; return the hash of the weights, which are the same on both workers."""
        servers = [server for i, server in enumerate(self.servers) if i not in lost]
        for process in (*self.workers, *servers, self.scheduler):
            assert process is not None and process.wait() == 0, self.everything()
        (one,) = {worker.reports()[-1][1] for worker in self.workers}
        return one


@functools.cache
def undisturbed(way: str) -> str:
    with tempfile.TemporaryDirectory() as store, Training(way, store) as job:
        for step in (4, 8):
            job.await_step(step)
            job.go_on()
        return job.weights()


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_server_does_not_change_the_weights(way, tmp_path):
    with Training(way, str(tmp_path)) as job:
        job.await_step(4)
        for server in job.servers:  # so the step cannot end before
            server.signal(signal.SIGSTOP)
        job.go_on()
        job.servers[1].signal(signal.SIGKILL)
        job.servers[0].signal(signal.SIGCONT)
        job.await_step(8)
        job.go_on()
        assert job.weights(1) == undisturbed(way)
        assert "term 1: 2 workers have moved" in job.scheduler.text()


@pytest.mark.parametrize("way", WAYS)
def test_steps_go_on_without_a_scheduler_and_another_one_takes_over(way, tmp_path):
    with Training(way, str(tmp_path)) as job:
        job.await_step(4)
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.go_on()
        job.await_step(8)  # four steps without a scheduler
        job.start_scheduler(int(job.port))
        for worker in job.workers:
            worker.wait_for_line("is back, after")
        job.go_on()
        assert job.weights() == undisturbed(way)


@pytest.mark.parametrize("elastic", ["servers", "shrink"])
@pytest.mark.parametrize("way", WAYS)
def test_a_workers_death_is_an_error_that_names_it(way, elastic, tmp_path):
    with Training(way, str(tmp_path), elastic) as job:
        job.await_step(4)
        survivor, lost = job.workers
        lost.signal(signal.SIGKILL)
        struck = time.monotonic()
        survivor.say("go")
        assert survivor.wait() == 9, job.everything()
        assert time.monotonic() - struck < PROMISED
        what, text = survivor.reports()[-1]
        assert what == "failed" and f"worker 1 (127.0.0.1, pid {lost.popen.pid}) is gone" in text
        assert "PeerLostError" in text, text
        needs = "ddp_comm_hook" if way == "hook" else 'the backend "bpsx" of torch.distributed'
        assert (f"{needs} needs all workers" in text) == (elastic == "shrink"), text
