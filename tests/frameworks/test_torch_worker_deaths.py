"""PyTorch jobs that lose a worker: in each step it counts in all gradients or in none."""

from __future__ import annotations

import random
import signal

import pytest

from support.jobs import Job
from support.worker_deaths import SHRINK, survivors_agree

#: Elements of the parameters. Gradients of worker ``r`` are 10 ** r everywhere.
SIZES = [10, 3_000, 300_000, 700_000, 5, 40_000, 1_000, 90_000]
TRAINING = """
    import time, torch
    import bpsx.torch as bps
    from bpsx.api.lifecycle import session

    torch.set_num_threads(1)
    bps.init()
    number, size = bps.rank(), bps.size()
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in {sizes}]
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0),
        named_parameters=[(f"w{{i}}", w) for i, w in enumerate(weights)],
        compression_params={compression},
    )

    def stop_in_step(step):
        # After half of the gradients have been pushed, and the servers have replied to them.
        if number != 1 or step != {fatal}:
            return
        def hook(_):
            report("half")
            before = session().counters()["messages_received"]
            while session().counters()["messages_received"] < before + 2:
                time.sleep(0.01)
            report("summed")
            hear()
        weights[4].register_hook(hook)

    for step in range({steps}):
        before = [w.detach().clone() for w in weights]
        stop_in_step(step)
        optimizer.zero_grad()
        loss = 0.0
        for w in weights:
            loss = loss + (w * 10.0**number).sum()
        loss.backward()
        report(["step", step])
        optimizer.step()
        moved = [(a - w.detach()).unique().tolist() for a, w in zip(before, weights)]
        assert all(len(m) == 1 for m in moved), moved
        report(sorted({{round(m[0], 2) for m in moved}}))
    report([bps.rank(), bps.size()])
    bps.shutdown()
"""


#: Exact for gradients whose elements are all equal.
ONEBIT = {"compressor": "onebit", "scaling": True, "ef": "vanilla"}


@pytest.mark.parametrize("compression", [None, ONEBIT], ids=["", "onebit"])
