"""One worker saves a checkpoint between backward() and step() while another waits: no stall is
reported, and sums are right.
"""

from __future__ import annotations

import pytest

from support.jobs import Job

_TRAIN = """
    import bpsx, threading, torch, bpsx.torch as bps

    bps.init()
    rank, size = bps.rank(), bps.size()
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        compression_params=COMPRESSED,
    )


    def metric(step):
        return bps.push_pull(torch.full((1,), step + 1.0), average=False, name="metric").item()


    def train():
        for step in range(4):
            optimizer.zero_grad()
            # the other worker pushes its gradient first
            found = metric(step) if rank == 1 else None
            if rank == 0 or not COMPRESSED:
                model(torch.full((1, 2), rank + 1.0)).sum().backward()
            if step == 3 and rank == 0:
                print("saves", flush=True)
                sys.stdin.readline()
            found = metric(step) if rank == 0 else found
            optimizer.step()
            report([found, model.weight.tolist()])


    def go():
        try:
            train()
        except bpsx.StallError as e:
            report(str(e))


    if BESIDE:
        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
    else:
        go()
"""


@pytest.mark.parametrize("beside", [False, True], ids=["main thread", "background thread"])
@pytest.mark.parametrize("compressed", [False, True], ids=["", "compressed"])
def test_others_wait_for_a_worker_that_saves_between_backward_and_step(beside, compressed):
    params = {"compressor": "onebit", "ef": "vanilla", "scaling": True} if compressed else None
    source = _TRAIN.replace("COMPRESSED", repr(params)).replace("BESIDE", repr(beside))
    env = {
        "BPSX_DEADLOCK_SECONDS": "1",
        "BPSX_STALL_WARN_SECONDS": "0.2",
        "BYTEPS_MIN_COMPRESS_BYTES": "0",
    }
    with Job(source, env=env) as job:
        job.workers[0].wait_for_line("saves")
        # Worker 1 warns every two seconds, which is longer than the deadlock limit.
        job.workers[1].wait_for_line("tensor 'metric'", count=2)
        job.workers[0].say("go on")
        found = job.results()
    mean = 0.5 if compressed else 1.5
    expected = [[2.0 * (step + 1), [[-mean * (step + 1)] * 2]] for step in range(4)]
    assert found == [expected] * 2
