"""Errors found in the first step: workers use a name for different things, or start with different
weights.
"""

from __future__ import annotations

import pytest

from frameworks.mxnet_scripts import HEAD
from support.jobs import Job, run

pytestmark = pytest.mark.timeout(180)
_START = (
    HEAD
    + """
import warnings
import bpsx
bps.init()
rank = bps.rank()

def net(prefix, weights):
    made = gluon.nn.Dense(2, in_units=3, use_bias=False, prefix=prefix)
    made.initialize(mx.init.Constant(weights))
    return made

def step(made, trainer, scale):
    with autograd.record():
        loss = made(mx.nd.ones((1, 3)) * scale * (rank + 1)).sum()
    loss.backward()
    trainer.step(1)
    return made.weight.data().asnumpy().tolist()

def tried(call, *args):
    try:
        return call(*args)
    except (bpsx.BpsxError, mx.MXNetError) as e:
        return str(e)
"""
)


@pytest.mark.parametrize("mode", ["0", "1"])
def test_two_trainers_of_one_name_made_in_another_order_are_an_error(mode: str) -> None:
    """Two networks of the same shape, made in different orders on the workers.

    Both are made before the first step, or the second one after the first network's first step;
    also in asynchronous training.
    """
    source = (
        _START
        + """
for late in False, True:
    nets = [net(f"late{late}_", 1.0) for _ in range(2)]
    found, trainers = [], []
    for one in nets if rank == 0 else nets[::-1]:
        trainers.append(
            (one, bps.DistributedTrainer(one.collect_params(), "sgd", {"learning_rate": 0.1}))
        )
        if late:
            found.append(tried(step, *trainers[-1], 1.0))
    report(found or [tried(step, *trainer, 1.0) for trainer in trainers * 2])
bps.shutdown()
"""
    )
    for at_once, late in run(source, env={"BYTEPS_ENABLE_ASYNC": mode}):
        assert len(at_once) == 4 and isinstance(late[0], list) and len(late) == 2
        for text in (*at_once, late[1]):
            assert (
                "worker 1 has other names of Parameters than worker 0, or the same names in"
                " another order" in text
            )
            assert (
                "the order in which Parameters of one name are made and given to trainers must be"
                " the same on all workers"
            ) in text


_MODULE = (
    _START
    + """
def module(seed, devices=1):
    mx.random.seed(seed)
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="one")
    made = mx.mod.Module(
        mx.sym.SoftmaxOutput(x, name="softmax"), context=[mx.cpu(i) for i in range(devices)]
    )
    batches = mx.io.NDArrayIter(
        np.ones((24, 6), "f4"), np.ones(24, "f4"), 8, label_name="softmax_label"
    )
    made.bind(batches.provide_data, batches.provide_label)
    made.init_params(mx.init.Uniform(0.1))
    return made, batches


def fit(how, devices):
    made, batches = module(1 + (rank if how != "equal seeds" else 0), devices)
    if how == "broadcast":
        for values in made.get_params():
            bps.broadcast_parameters(values)
        made.set_params(*made.get_params())
    optimizer = bps.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    made.fit(batches, optimizer=optimizer, kvstore="local" if devices > 1 else None, num_epoch=2)


for devices in 1, 2:
    for how in "broadcast", "equal seeds", "forgotten":
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            error = tried(fit, how, devices)
        report([how, error, [str(w.message) for w in heard if "other weights" in str(w.message)]])
"""
)


@pytest.mark.parametrize("option", ["warn", "error", "off"])
def test_weights_that_differ_before_the_first_step(option: str) -> None:
    """Also with an updater that MXNet's C library calls."""
    with Job(_MODULE, workers=2, servers=1, env={"BPSX_CHECK_WEIGHTS": option}) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()
            assert len(worker.reports()) == 6
            for how, error, heard in worker.reports():
                if how != "forgotten" or option == "off":
                    assert (error, heard) == (None, []), how
                    continue
                (text,) = [error] if option == "error" else heard
                assert "worker 1 has other weights than worker 0 before the first step" in text
                assert "broadcast_parameters() of what module.get_params() gives" in text


_LOOP = (
    _MODULE.partition("for devices in")[0]
    + """
from bpsx.mxnet import _pushes

def steps(read):
    made, batches = module(1 + rank, devices=2)
    optimizer = bps.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    made.init_optimizer(kvstore="local", optimizer=optimizer)
    batch = batches.next()
    for _ in range(4):
        made.forward_backward(batch)
        made.update()
        _pushes.wait(60)        # until bpsx knows all skipped exchanges
    return made.get_outputs()[0].asnumpy().tolist() if read else None
"""
)


def test_an_error_in_an_updater_is_raised_in_any_later_step() -> None:
    """MXNet's C library calls the updater and drops its exception.

    No engine call of bpsx may take the error away from the script, which reads an output only in
    the fourth step.
    """
    for said in run(_LOOP + "report(tried(steps, True))", env={"BPSX_CHECK_WEIGHTS": "error"}):
        assert isinstance(said[0], str) and "other weights than worker 0" in said[0]


def test_an_error_in_an_updater_without_a_wait_fails_the_process() -> None:
    with Job(
        _LOOP + "steps(False)", workers=2, servers=1, env={"BPSX_CHECK_WEIGHTS": "error"}
    ) as job:
        for worker in job.workers:
            assert worker.wait() == 1, worker.text()
            assert "exit status 1, because an exchange has failed" in worker.text()
