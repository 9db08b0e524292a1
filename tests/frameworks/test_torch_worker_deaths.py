"""PyTorch jobs that lose a worker: in each step it counts in all gradients or in none."""

from __future__ import annotations

import random
import signal

import pytest

from support.jobs import Job
from support.worker_deaths import SHRINK, survivors_agree, waits_for_death

#: Elements of the parameters. Gradients of worker ``r`` are 10 ** r everywhere.
SIZES = [10, 3_000, 300_000, 700_000, 5, 40_000, 1_000, 90_000]
TRAINING = """
    import time, torch
    import bpsx.torch as bps
    from bpsx.api.lifecycle import session

    torch.set_num_threads(1)
    bps.init()
    number, size = bps.rank(), bps.size()
    shapes = [(-1, 10) if n % 10 == 0 else (n,) for n in {sizes}]
    weights = [torch.nn.Parameter(torch.zeros(n).view(s)) for n, s in zip({sizes}, shapes)]
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0),
        named_parameters=[(f"w{{i}}", w) for i, w in enumerate(weights)],
        compression_params={compression},
    )

    def stop_in_step(step):
        # After half of the gradients have been pushed, and the servers have replied to them.
        if number != 1 or step != {fatal}:
            return
        before = session().counters()["messages_received"]
        def hook(_):
            report("half")
            while session().counters()["messages_received"] == before:
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
        moved = [((a - w.detach()) * 100).round().unique() for a, w in zip(before, weights)]
        assert all(len(m) == 1 for m in moved), moved
        report(sorted({{m.item() / 100 for m in moved}}))
    report([bps.rank(), bps.size()])
    bps.shutdown()
"""


#: Exact for gradients whose elements are all equal.
ONEBIT = {"compressor": "onebit", "scaling": True, "ef": "vanilla"}
#: Of rank 1, they are as good as exact. Some of their first factors have been summed, and none of
#: the second ones, when the worker dies.
POWERSGD = {"compressor": "powersgd", "rank": 1, "ef": "vanilla"}


@pytest.mark.parametrize("compression", [None, ONEBIT, POWERSGD], ids=["", "onebit", "powersgd"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_dies_in_a_step_counts_in_none_of_its_gradients(servers, compression):
    source = TRAINING.format(sizes=SIZES, steps=6, fatal=3, compression=compression)
    env = {**SHRINK, "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    with Job(source, workers=3, servers=servers, env=env) as job:
        job.workers[1].wait_for_line("summed")
        for of in (0, 2):
            job.workers[of].wait_for_line('["step", 3]')
        job.workers[1].signal(signal.SIGKILL)
        moves = survivors_agree(job, 1, 3)
        assert moves == [37.0] * 3 + [50.5] * 3


def test_a_worker_that_dies_at_any_moment_counts_in_all_gradients_or_none():
    for compression in (None, None, ONEBIT, ONEBIT, POWERSGD, POWERSGD):
        source = TRAINING.format(sizes=SIZES, steps=8, fatal=-1, compression=compression)
        with Job(waits_for_death(source, 1), workers=3, servers=2, env=SHRINK) as job:
            job.workers[random.randrange(3)].wait_for_line('["step", 2]')
            job.workers[1].signal(signal.SIGKILL)
            moves = survivors_agree(job, 1, 3)
            assert moves == sorted(moves) and set(moves) == {37.0, 50.5}


def test_sparse_gradients_are_refused():
    source = """
        import torch, bpsx, bpsx.torch as bps

        bps.init()
        model = torch.nn.Embedding(4, 3, sparse=True)
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
        )
        model(torch.tensor([1])).sum().backward()
        try:
            optimizer.step()
        except bpsx.errors.ConfigError as e:
            report("BPSX_ELASTIC=shrink" in str(e))
        bps.shutdown()
    """
    with Job(source, workers=2, env=SHRINK) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()
            assert worker.reports() == [True]


#: No worker dies; each step begins as usual.
_BEGINNING = """
    import bpsx, torch
    import bpsx.torch as bps

    torch.set_num_threads(1)
    bps.init()
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 1))
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )

    def backward():
        optimizer.zero_grad()
        model(torch.ones(2, 9)).sum().backward()

    def step():
        backward()
        optimizer.step()

    step()
"""


@pytest.mark.parametrize("end", ["", "last = bps.join(); report(last in (0, 1))"])
def test_a_step_that_is_not_completed_keeps_nobody_waiting(end):
    """The last backward pass has no step: its push_pulls end when the script leaves or joins."""
    source = _BEGINNING + f"\n    backward()\n    {end}\n    bps.shutdown()\n"
    with Job(source, workers=2, env=SHRINK) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text() + job.scheduler.text()
            assert worker.reports() == [True] * bool(end)
        assert job.scheduler.wait() == 0, job.scheduler.text()


def test_a_second_optimizer_does_not_wait_for_what_the_first_has_begun():
    source = """
    backward()
    del optimizer
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    step()
    bps.shutdown()
"""
    with Job(_BEGINNING + source, workers=2, env=SHRINK) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()


def test_a_parameter_that_some_have_frozen_is_an_error_for_all():
    source = """
    if bps.rank():
        model[1].bias.requires_grad_(False)
    try:
        for _ in range(3):
            step()
    except bpsx.BpsxError as e:
        report("frozen" in str(e))
    bps.shutdown()
"""
    with Job(_BEGINNING + source, workers=2, env=SHRINK) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()
            assert worker.reports() == [True], worker.text()


def test_what_needs_all_workers_ends_the_job():
    """Rows of workers are cut by rank, which changes when a worker is lost."""
    source = """
    import bpsx.torch.horovod as hvd
    hvd.alltoall(torch.ones(3), splits=[1, 1, 1], name="x")
    report("ready")
    hear()
    try:
        hvd.alltoall(torch.ones(3), splits=[1, 1, 1], name="x")
    except bpsx.BpsxError as e:
        report("all_gather needs all workers" in str(e))
"""
    with Job(_BEGINNING + source, workers=3, env=SHRINK) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.workers[0].signal(signal.SIGKILL)
        for worker in job.workers[1:]:
            worker.say("go")
            worker.wait()
            assert worker.reports()[-1] is True, worker.text()


def test_a_loss_before_the_first_step_leaves_its_comparison_alone():
    """One worker has asked for the comparison before the loss, the other asks after it."""
    source = """
        import time, torch
        import bpsx.torch as bps
        from bpsx.torch import startup

        bps.init()
        number, submit = bps.rank(), startup.submit

        def asks(*given, **more):
            handle = submit(*given, **more)
            report("asked")
            return handle

        startup.submit = asks
        w = torch.nn.Parameter(torch.zeros(3))
        optimizer = bps.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)])
        if number == 0:
            hear()
        while number == 2 and bps.size() == 3:
            time.sleep(0.01)
        w.sum().backward()
        optimizer.step()
        report(w.tolist())
        bps.shutdown()
    """
    with Job(source, workers=3, servers=1, env=SHRINK) as job:
        job.workers[1].wait_for_line("asked")
        job.workers[0].signal(signal.SIGKILL)
        for of in (1, 2):
            job.workers[of].wait_for_line("[-1.0, -1.0, -1.0]")


def test_a_loss_in_the_first_sync_leaves_no_mixed_state():
    """Rank 0 dies between two parts; the others' next root is known to them before that."""
    source = """
        import time, torch
        import bpsx.torch as bps
        from bpsx.api.lifecycle import session

        bps.init()
        number = bps.rank()

        class Slow(bps.elastic.TorchState):
            def _send(self, name, part):
                if name == "elastic.second" and len(session()._company._living) == 3:
                    report("between")
                    if number == 0:
                        hear()
                    while len(session()._company._living) == 3:
                        time.sleep(0.01)
                    report(["size", bps.size()])
                super()._send(name, part)

        def layer():
            made = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(made.weight, number)
            return made

        @bps.elastic.run
        def train(state):
            return [state.model.weight.item(), state.second.weight.item(), state.value, bps.size()]

        report(train(Slow(layer(), second=layer(), value=number)))
        bps.shutdown()
    """
    with Job(source, workers=3, servers=1, env=SHRINK) as job:
        for worker in job.workers:
            worker.wait_for_line("between")
        job.workers[0].signal(signal.SIGKILL)
        for of in (1, 2):
            job.workers[of].wait_for_line('["size", 3]')
            job.workers[of].wait_for_line("[1.0, 1.0, 1, 2]")
