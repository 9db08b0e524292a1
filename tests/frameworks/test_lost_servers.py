"""Training goes on when a server is killed in the middle of a step, with the same weights."""

from __future__ import annotations

import signal

import pytest

from support.jobs import Job
from support.optional import why_missing

_COMMON = """
    import hashlib, numpy as np

    STEPS, STRUCK = 10, 4

    def batch(step, rank):
        rng = np.random.default_rng([step, rank])
        return rng.standard_normal((8, 20), np.float32), rng.integers(0, 5, 8)

    def train(rank, step):
        for i in range(STEPS):
            if i == STRUCK:
                report("ready")
                hear()
            step(*batch(i, rank))

    def digest(arrays):
        return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
"""
_SCRIPTS = {
    "torch": """
    import torch
    import bpsx.torch as bps

    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(bps.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300), torch.nn.Tanh(),
        torch.nn.Linear(300, 5),
    )
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(x, y):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y)).backward()
        optimizer.step()

    train(bps.rank(), step)
    report(digest([p.detach().numpy() for p in model.parameters()]))
    bps.shutdown()
    """,
    "tensorflow": """
    import tensorflow as tf
    import bpsx.tensorflow as bps

    bps.init()
    tf.keras.utils.set_random_seed(bps.rank())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    layers = [tf.keras.layers.Dense(300, activation="relu"), tf.keras.layers.Dense(5)]
    model = tf.keras.Sequential([tf.keras.Input((20,)), *layers])
    bps.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x))
            )
        gradients = bps.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients):
            variable.assign_sub(0.1 * gradient)

    train(bps.rank(), step)
    report(digest([v.numpy() for v in model.variables]))
    bps.shutdown()
    """,
    "mxnet": """
    import mxnet as mx
    import bpsx.mxnet as bps
    from mxnet import autograd, gluon

    bps.init()
    mx.random.seed(bps.rank())
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(300, activation="relu", in_units=20), gluon.nn.Dense(5, in_units=300))
    net.initialize()
    params = net.collect_params()
    bps.broadcast_parameters(params, root_rank=0)
    trainer = bps.DistributedTrainer(params, "sgd", {"learning_rate": 0.1})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(x, y):
        with autograd.record():
            loss = loss_of(net(mx.nd.array(x)), mx.nd.array(y))
        loss.backward()
        trainer.step(8)

    train(bps.rank(), step)
    report(digest([p.data().asnumpy() for p in params.values()]))
    bps.shutdown()
    """,
}


def weights(framework: str, killed: bool) -> str:
    """Train on two workers; return the hash of the weights, which are the same on both."""
    env = {
        "BPSX_ELASTIC": "servers",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with Job(_COMMON + _SCRIPTS[framework], servers=2, env=env) as job:
        assert job.scheduler is not None
        for worker in job.workers:
            worker.wait_for_line("ready")
        # The step cannot end before the servers go on.
        for server in job.servers if killed else ():
            server.signal(signal.SIGSTOP)
        for worker in job.workers:
            worker.say("go")
        if killed:
            job.servers[1].signal(signal.SIGKILL)
            job.servers[0].signal(signal.SIGCONT)
        for process in (*job.workers, job.servers[0], job.scheduler):
            assert process.wait() == 0, "\n".join(p.text() for p in job.processes)
        assert ("term 1: 2 workers have moved" in job.scheduler.text()) == killed
        (one,) = {worker.reports()[-1] for worker in job.workers}
        return one


@pytest.mark.parametrize("framework", _SCRIPTS)
def test_weights_are_those_of_a_job_that_loses_no_server(framework):
    if reason := why_missing(framework):
        pytest.skip(reason)
    assert weights(framework, killed=True) == weights(framework, killed=False)
