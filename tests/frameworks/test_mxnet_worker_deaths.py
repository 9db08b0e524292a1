"""MXNet jobs that lose a worker: in each step it counts in all gradients or in none."""

from __future__ import annotations

import random
import signal
import textwrap

import pytest

from frameworks.mxnet_scripts import HEAD
from support.jobs import Job
from support.worker_deaths import DYING, SHRINK, survivors_agree, waits_for_death

pytestmark = pytest.mark.timeout(180)
#: Elements of the parameters. Gradients of worker ``r`` are 10 ** r everywhere.
SIZES = [10, 3_000, 300_000, 700_000, 5, 40_000, 1_000, 2_000_000]
PARAMETERS = """
bps.init()
number = bps.rank()
params = [
    gluon.Parameter(f"w{{i}}", shape=(n,), init=mx.init.Zero()) for i, n in enumerate({sizes})
]
for p in params:
    p.initialize()
trainer = bps.DistributedTrainer(params, "sgd", {{"learning_rate": 1.0}})

def backward():
    with autograd.record():
        loss = mx.nd.add_n(*[(p.data() * 10.0**number).sum() for p in params])
    loss.backward()
"""
TRAINING = """
for i in range({steps}):
    before = [p.data().asnumpy() for p in params]
    if number == 1 and i == {fatal}:
        die_in_step()
    report(["step", i])
    backward()
    {update}
    moved = [np.unique(a - p.data().asnumpy()).tolist() for a, p in zip(before, params)]
    assert all(len(m) == 1 for m in moved), moved
    report(sorted({{round(m[0], 2) for m in moved}}))
report([bps.rank(), bps.size()])
bps.shutdown()
"""
UPDATES = {
    "step": "trainer.step(1)",
    "stale": "trainer.step(1, ignore_stale_grad=True)",
    "sums": "trainer.allreduce_grads(); trainer.update(1)",
}


def job_of(source: str, workers: int = 3, servers: int = 2, **more: object) -> Job:
    head = DYING + HEAD + PARAMETERS.format(sizes=SIZES)
    source = head + textwrap.dedent(source.format(**more))
    return Job(source, workers=workers, servers=servers, env=SHRINK)


@pytest.mark.parametrize("update", UPDATES)
def test_a_worker_that_dies_in_a_step_counts_in_all_gradients_or_none(update):
    with job_of(TRAINING, steps=6, fatal=3, update=UPDATES[update]) as job:
        moves = survivors_agree(job, 1, 3)
        assert moves[:3] == [37.0] * 3 and moves[3] in (37.0, 50.5) and moves[4:] == [50.5] * 2


def test_a_worker_that_dies_at_any_moment_counts_in_all_gradients_or_none():
    for update in random.sample(sorted(UPDATES), 2):
        source = waits_for_death(TRAINING, 1)
        with job_of(source, steps=8, fatal=-1, update=UPDATES[update]) as job:
            job.workers[random.randrange(3)].wait_for_line('["step", 2]')
            job.workers[1].signal(signal.SIGKILL)
            moves = survivors_agree(job, 1, 3)
            assert moves == sorted(moves) and set(moves) <= {37.0, 50.5} and moves[-1] == 50.5


def test_an_exchange_that_the_engine_skips_keeps_no_other_one_waiting():
    """Otherwise this worker would wait for its own gradients for ever."""
    source = """
import threading
queued = threading.Event()

class Breaks(mx.operator.CustomOp):
    def forward(self, **_):
        queued.wait(60)  # if it had failed before, trainer.step() would raise
        raise ValueError("broken")

@mx.operator.register("bpsx_breaks")
class Prop(mx.operator.CustomOpProp):
    def create_operator(self, *_):
        return Breaks()

for i in range(3):
    report(["step", i])
    backward()
    if number == 1 and i == 1:
        gradient = params[3].grad()
        gradient += mx.nd.Custom(gradient, op_type="bpsx_breaks")
    trainer.step(1)
    if number == 1 and i == 1:
        queued.set()
        found = []
        for p in params:
            try:
                found.append(float(p.data().asnumpy()[0]))
            except mx.MXNetError:  # the engine tells the first one that waits
                found.append(None)
        report(["others", *found[4:]])  # SGD updates four at a time
        raise RuntimeError("enough")
    report(sorted({{float(p.data().asnumpy()[0]) for p in params}}))
report([bps.rank(), bps.size()])
bps.shutdown()
"""
    with job_of(source) as job:
        assert job.workers[1].wait() == 1, job.workers[1].text()
        assert f'["others", {", ".join(["-74.0"] * 4)}]' in job.workers[1].lines
        assert survivors_agree(job, 1, 3) == [-37.0, -37.0 - 50.5, -37.0 - 101.0]


def test_a_distributed_optimizer_needs_all_workers():
    source = """
optimizer = bps.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
weight, i = mx.nd.zeros((3,)), 0
try:
    while True:
        optimizer.update(0, weight, mx.nd.ones((3,)), None)
        weight.asnumpy()
        i += 1
        if i == 3:
            report("going")
except Exception as e:
    report(str(e))
    sys.exit(3)
"""
    with job_of(source) as job:
        for worker in job.workers:
            worker.wait_for_line("going")
        job.workers[1].signal(signal.SIGKILL)
        for of in (0, 2):
            assert job.workers[of].wait() == 3, job.workers[of].text()
            assert "DistributedOptimizer of bpsx.mxnet" in job.workers[of].reports()[-1]


def test_the_naive_engine_is_refused():
    source = """
bps.init()
try:
    bps.DistributedTrainer(gluon.nn.Dense(1, in_units=1).collect_params(), "sgd")
except bpsx.ConfigError as e:
    report("NaiveEngine" in str(e))
bps.shutdown()
"""
    env = {**SHRINK, "MXNET_ENGINE_TYPE": "NaiveEngine"}
    with Job(HEAD + source, workers=2, servers=1, env=env) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()
            assert worker.reports() == [True]
