"""Asynchronous training of each framework when a server dies: each step counts once."""

from __future__ import annotations

import signal

import pytest

from frameworks import mxnet_scripts
from support.jobs import Job
from support.tensorflow_job import QUIET

#: Framework -> source of ``step(gradient)``, which steps with learning rate 1, and ``weights()``.
SCRIPTS = {
    "torch": """
import torch
import bpsx.torch as bps
bps.init()
sizes = [7, 3_000, 90_000]
named = [(f"p{i}", torch.nn.Parameter(torch.zeros(n))) for i, n in enumerate(sizes)]
optimizer = bps.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named)
def step(gradient):
    for _, p in named:
        p.grad = torch.full_like(p, gradient)
    optimizer.step()
def weights():
    return [p.detach().numpy() for _, p in named]
""",
    "keras": """
import keras, tensorflow as tf
import bpsx.tensorflow.keras as bps
bps.init()
variables = [tf.Variable(tf.zeros(n), name=f"v{n}") for n in (7, 3_000, 90_000)]
optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0))
def step(gradient):
    optimizer.apply([tf.fill(v.shape, gradient) for v in variables], variables)
def weights():
    return [v.numpy() for v in variables]
""",
    "mxnet": mxnet_scripts.HEAD
    + """
bps.init()
parameters = [
    gluon.Parameter(f"w{n}", shape=(n,), init=mx.init.Zero()) for n in (7, 3_000, 90_000)
]
for parameter in parameters:
    parameter.initialize()
trainer = bps.DistributedTrainer(parameters, "sgd", {"learning_rate": 1.0})
def step(gradient):
    with autograd.record():
        loss = sum((p.data() * gradient).sum() for p in parameters)
    loss.backward()
    trainer.step(1)
    mx.nd.waitall()
def weights():
    return [p.data().asnumpy() for p in parameters]
""",
}
_LOOP = """
import threading

over = threading.Event()

def listen():
    while os.read(0, 1) != b"\\n":
        pass
    over.set()

threading.Thread(target=listen, daemon=True).start()
steps = 0
while not over.is_set():
    step(1.0)
    steps += 1
    if steps == 10:
        report("ready")
report({"steps": steps})
hear()
step(0.0)
report({"weights": [sorted({float(v) for v in w}) for w in weights()]})
hear()
bps.shutdown()
"""


@pytest.mark.parametrize("framework", SCRIPTS)
def test_each_step_counts_once_when_servers_die(framework):
    source = SCRIPTS[framework] + _LOOP
    env = {"BYTEPS_ENABLE_ASYNC": "1", "BPSX_ELASTIC": "servers", **QUIET}
    with Job(source, servers=3, env=env) as job:
        assert job.scheduler is not None
        for worker in job.workers:
            worker.wait_for_line("ready")
        for term, server in enumerate(job.servers[:2], 1):
            server.signal(signal.SIGKILL)
            job.scheduler.wait_for_line("workers have moved", count=term)
        for line in ("steps", "weights"):
            for worker in job.workers:
                worker.say("")
            for worker in job.workers:
                worker.wait_for_line(f'"{line}"')
        for worker in job.workers:
            worker.say("")
        assert [worker.wait() for worker in job.workers] == [0, 0]
        found = [{k: v for r in w.reports()[1:] for k, v in r.items()} for w in job.workers]
    steps = sum(one["steps"] for one in found)
    assert [one["weights"] for one in found] == [[[-steps]] * 3] * 2, found
