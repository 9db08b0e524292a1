"""suspend() and resume() with PyTorch: a distributed optimizer continues with the new number of
workers.
"""

from __future__ import annotations

import pytest

from support.jobs import Job

RESUMED = """
    import torch
    import bpsx.torch as bps

    bps.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2).double()
    # new workers do not know yet that the gradient is sparse
    model.table = torch.nn.Embedding(4, 1, sparse=True).double()
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )


    def step():
        optimizer.zero_grad()
        # d loss / d bias = rank + 1, whatever the weights are
        (model(torch.zeros(1, 3).double()).sum() * (bps.rank() + 1)).backward()
        if bps.rank() == 0:
            model.table(torch.tensor([2])).sum().backward()
        before = model.bias.detach().clone()
        optimizer.step()
        assert model.table.weight.grad.is_sparse and model.table.weight.grad._values().tolist() == [
            [1 / bps.size()]
        ]
        return float((before - model.bias.detach())[0])


    if ELASTIC:
        report([step(), step()])
        bps.suspend()
        report("suspended")
        sys.stdin.readline()
        bps.resume(NEW, 1, global_rank=RANK)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    report([step(), step(), bps.size()])
"""


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (2, 1)])
def test_an_optimizer_continues_in_a_job_of_another_size(before: int, after: int):
    def source(rank: int, elastic: bool) -> str:
        return (
            RESUMED.replace("ELASTIC", str(elastic))
            .replace("NEW", str(after))
            .replace("RANK", str(rank))
        )

    with Job(
        "",
        workers=0,
        servers=int(before > 1),
        env={"DMLC_NUM_WORKER": str(before), "DMLC_NUM_SERVER": "1"},
    ) as job:
        for rank in range(before):
            job.start_worker(rank, source(rank, True))
        for worker in job.workers:
            worker.wait_for_line("suspended")
        job.servers_anew(after, left=before > 1)  # a single worker has not contacted the servers
        for rank in range(before, after):
            job.start_worker(rank, source(rank, False))
        for worker in job.workers[: min(before, after)]:
            worker.say("go")
        for worker in job.workers[after:]:  # they are not in the new job
            worker.signal(9)
        assert [w.wait() for w in job.workers[:after]] == [0] * after, "\n".join(
            w.text() for w in job.workers
        )
        found = [w.reports() for w in job.workers[:after]]
    mean = {1: 1.0, 2: 1.5, 3: 2.0}
    assert all(f[0] == [mean[before]] * 2 for f in found[:before])
    assert all(f[-1] == [mean[after], mean[after], after] for f in found)
