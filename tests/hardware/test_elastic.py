"""Workers that die and join while their gradients are on GPUs, which several may share."""

from __future__ import annotations

import signal

import pytest
import torch

from support.jobs import TRANSPORTS, Job
from support.worker_deaths import ends

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="a GPU is needed")]

TRAINING = """
    import os, torch, time, zlib
    import bpsx.torch as bps

    bps.init()
    torch.cuda.set_device({gpu})
    torch.manual_seed(bps.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 500), torch.nn.ReLU(), torch.nn.Linear(500, 500), torch.nn.ReLU(),
        torch.nn.Linear(500, 1),
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    optimizer = bps.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), {options}
    )

    @bps.elastic.run
    def train(state):
        while state.step < 300:
            # until others have joined
            while state.step == 290 and old and sizes[-1:] != [{workers}]:
                state.check_host_updates()
            draw = torch.Generator().manual_seed(1000 * state.step + bps.rank())
            x = torch.randn(16, 64, generator=draw).cuda()
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
            state.step += 1
            weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
            report(["step", state.step, zlib.crc32(weights)])
            time.sleep(0.005)
            state.check_host_updates()

    state, sizes = bps.elastic.TorchState(model, optimizer, step=0), []
    old = not {newcomer}
    state.register_reset_callbacks([lambda: sizes.append(bps.size())])
    train(state)
    report(["end", bps.rank(), bps.size()])
    bps.shutdown()
"""
COMPRESSION = 'compression_params={"compressor": "topk", "k": 0.05, "ef": "vanilla"}'


@pytest.mark.parametrize("options", ["", COMPRESSION], ids=["plain", "topk"])
@pytest.mark.parametrize("transport", ["zmq", "tcp", "shm"])
def test_a_worker_is_lost_and_another_joins(transport, options):
    source, new = (
        TRAINING.format(gpu=f"bps.rank() % {GPUS}", workers=3, options=options, newcomer=newcomer)
        for newcomer in (False, True)
    )
    env = {**TRANSPORTS[transport], "BPSX_ELASTIC": "shrink", "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    with Job(source, workers=3, servers=2, env=env) as job:
        job.workers[0].wait_for_line('["step", 40')
        job.workers[1].signal(signal.SIGKILL)
        job.start_worker(1, new)
        job.workers[3].wait_for_line('["step"')
        job.servers[0].signal(signal.SIGKILL)
        assert sorted(r[1:] for r in ends(job, 0, 2, 3)) == [[i, 3] for i in range(3)]
        steps = [[r for r in job.workers[i].reports() if r[0] == "step"] for i in (0, 2, 3)]
        assert steps[0] == steps[1], "weights differ in some step"
        assert steps[2] == steps[0][-len(steps[2]) :]
        assert [s[1] for s in steps[0]] == list(range(1, 301)), "a step is lost"


@pytest.mark.skipif(GPUS < 2, reason="two GPUs are needed, for the two processes of a machine")
@pytest.mark.parametrize("killed", [2, 3], ids=["other", "root"])
@pytest.mark.parametrize("options", ["", COMPRESSION], ids=["plain", "topk"])
@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_machine_of_two_gpus_is_lost_and_another_joins(transport, options, killed):
    """NCCL sums on each machine. Machines share GPUs if there are fewer than six."""
    gpu = f"(2 * int(os.environ['DMLC_WORKER_ID']) + bps.local_rank()) % {GPUS // 2 * 2}"
    source, new = (
        TRAINING.format(gpu=gpu, workers=6, options=options, newcomer=newcomer)
        for newcomer in (False, True)
    )
    env = {**TRANSPORTS[transport], "BPSX_ELASTIC": "shrink", "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    with Job(source, workers=6, processes=2, servers=2, env=env) as job:
        job.workers[0].wait_for_line('["step", 40')
        job.workers[killed].signal(signal.SIGKILL)
        assert job.workers[5 - killed].wait() != 0
        for worker in (2, 3):
            job.start_worker(worker, new)
        for worker in (6, 7):
            job.workers[worker].wait_for_line('["step"')
        job.servers[0].signal(signal.SIGKILL)
        living = (0, 1, 4, 5, 6, 7)
        assert sorted(r[1:] for r in ends(job, *living)) == [[i, 6] for i in range(6)]
        steps = [[r for r in job.workers[i].reports() if r[0] == "step"] for i in living]
        assert all(of == steps[0] for of in steps[:4]), "weights differ in some step"
        assert all(of == steps[0][-len(of) :] for of in steps[4:])
        assert [s[1] for s in steps[0]] == list(range(1, 301)), "a step is lost"
