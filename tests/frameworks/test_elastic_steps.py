"""``elastic.steps``: a plain loop whose workers die, leave and join, in each framework."""

from __future__ import annotations

import signal

import pytest
import torch

from bpsx.errors import ConfigError, PeerLostError, Status, explain
from bpsx.plugin import arrays_elastic
from bpsx.plugin import elastic as plugin
from bpsx.session.boundaries import Change
from bpsx.torch import elastic as torch_elastic
from frameworks import mxnet_scripts
from support.boundaries import scripted_boundaries
from support.jobs import Job
from support.tensorflow_job import QUIET
from support.worker_deaths import REPLACE, SHRINK, ends

NUMPY = """
import bpsx as bps, numpy as np

def crc(arrays):
    return zlib.crc32(b"".join(np.asarray(a).tobytes() for a in arrays))

bps.init()
state = bps.State(weights=np.full(1000, float(bps.rank())))
given = [state]

def step_of(number):
    state.weights = state.weights + bps.push_pull(np.full(1000, number + 1.0), name="g")

def found():
    return [crc([state.weights])]
"""
TORCH = """
import torch
import bpsx.torch as bps

bps.init()
torch.manual_seed(bps.rank())  # so that only the sync makes weights equal
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
given = [model, optimizer]
more = {"scheduler": scheduler}

def step_of(number):
    made = torch.Generator().manual_seed(number * 10 + bps.rank())
    x = torch.randn(4, 8, generator=made)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    optimizer.step()
    scheduler.step()

def found():
    moments = [s["momentum_buffer"] for s in optimizer.state.values()]
    tensors = [p.detach() for p in model.parameters()] + moments
    crc = zlib.crc32(b"".join(t.numpy().tobytes() for t in tensors))
    return [crc, scheduler.last_epoch, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]]
"""
MXNET = (
    mxnet_scripts.HEAD
    + """
bps.init()
np.random.seed(bps.rank())
weight = gluon.Parameter("w", shape=(8,), init=mx.init.Normal())
weight.initialize()
rates = mx.lr_scheduler.FactorScheduler(step=10, factor=0.5)
options = {"learning_rate": 0.01, "momentum": 0.9, "lr_scheduler": rates}
trainer = bps.DistributedTrainer([weight], "sgd", options)
given = [trainer]

def step_of(number):
    with autograd.record():
        loss = (weight.data() * (number + bps.rank())).sum()
    loss.backward()
    trainer.step(1)

def found():
    arrays = [weight.data(), trainer._updaters[0].states[0]]
    crc = zlib.crc32(b"".join(a.asnumpy().tobytes() for a in arrays))
    return [crc, trainer._optimizer.num_update, trainer.learning_rate]
"""
)
KERAS = """
import keras, tensorflow as tf
import bpsx.tensorflow as bps

bps.init()
tf.random.set_seed(bps.rank())
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
rates = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.5)
optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(rates, momentum=0.9))
given = [model, optimizer]

def step_of(number):
    x = tf.random.stateless_normal((4, 8), (number, bps.rank()))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

def found():
    tensors = [*model.variables, *optimizer.variables]
    crc = zlib.crc32(b"".join(tf.convert_to_tensor(v).numpy().tobytes() for v in tensors))
    return [crc, float(optimizer.learning_rate)]
"""
LOOP = """
for step in bps.elastic.steps(100, *given, **more):
    report(["step", step, bps.rank(), bps.size()])
    step_of(step)
    time.sleep(0.005)
report(["end", bps.rank(), bps.size(), *found()])
bps.shutdown()
"""
SCRIPTS = {"numpy": NUMPY, "torch": TORCH, "mxnet": MXNET, "keras": KERAS}


def job_of(framework: str, env: dict[str, str]) -> Job:
    source = "import time, zlib\nmore = {}\n" + SCRIPTS[framework] + LOOP
    return Job(source, workers=3, servers=2, env={**QUIET, **env, "BPSX_CHECK_WEIGHTS": "warn"})


def steps_of(job: Job, worker: int) -> list[list[int]]:
    return [r[1:] for r in job.workers[worker].reports() if r[0] == "step"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("framework", SCRIPTS)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_is_lost_or_leaves_and_another_joins(framework, end):
    with job_of(framework, REPLACE) as job:
        job.workers[1].wait_for_line('["step", 20')
        job.workers[1].signal(end)
        assert job.workers[1].wait() == (0 if end == signal.SIGTERM else -end)
        job.start_worker(1)
        first, *others = ends(job, 0, 2, 3)
        assert sorted(r[1] for r in (first, *others)) == [0, 1, 2] and first[2] == 3
        assert [r[2:] for r in others] == [first[2:]] * 2
        for survivor in (0, 2):
            assert [s[0] for s in steps_of(job, survivor)] == list(range(100))
        new = [s[0] for s in steps_of(job, 3)]
        assert 20 < new[0] < 100 and new == list(range(new[0], 100))


def test_the_loop_goes_on_with_fewer_workers():
    with job_of("numpy", SHRINK) as job:
        job.workers[1].wait_for_line('["step", 20')
        job.workers[1].signal(signal.SIGKILL)
        first, second = ends(job, 0, 2)
        assert first[1:3] == [0, 2] and second[1:3] == [1, 2] and first[3:] == second[3:]
        for survivor, rank in ((0, 0), (2, 1)):
            found = steps_of(job, survivor)
            assert [s[0] for s in found] == list(range(100)) and found[-1][1:] == [rank, 2]


# ---- without a job


@pytest.fixture
def changes(monkeypatch) -> list[Change]:
    """The list from which each boundary takes the change that it reports."""
    return scripted_boundaries(monkeypatch)


class Local(plugin.State):
    """A state whose rank 0 is this process, or has made ``ahead`` steps; some broadcasts fail."""

    ahead, failures = 0, 0

    def _broadcast(self, values):
        if Local.failures:
            Local.failures -= 1
            raise PeerLostError(explain(Status.PEER_LOST, "elastic", 0, 0, broadcast=True))
        return {name: max(value, Local.ahead) for name, value in values.items()}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(Local, "ahead", 0)
    monkeypatch.setattr(Local, "failures", 0)


def counted(number: int, *given, **more) -> list[int]:
    return list(plugin.steps_of(Local, number, given, more))


def test_each_step_comes_once_whoever_joins_or_is_lost(changes):
    changes += [Change(), Change(entered=(3,)), Change(lost=(1,)), Change(left=False)]
    calls: list[str] = []
    state = Local()
    state.register_reset_callbacks([lambda: calls.append("reset")])
    assert counted(6, state) == [0, 1, 2, 3, 4, 5]
    assert calls == ["reset"] * 2 and state.step == 6


def test_a_worker_that_joins_goes_on_with_the_step_of_rank_0(changes):
    Local.ahead = 4
    assert counted(6) == [4, 5]


def test_no_step_is_lost_if_the_sender_dies(changes):
    Local.failures = 1
    changes += [Change(entered=(3,))]
    steps = plugin.steps_of(Local, 4, [], {})
    assert next(steps) == 0
    Local.failures = 2
    assert list(steps) == [1, 2, 3] and not Local.failures


def test_a_state_may_begin_where_a_checkpoint_ended(changes):
    assert counted(6, step=4) == [4, 5]
    assert counted(3, Local(step=3)) == []


def test_the_end_of_the_job_ends_the_loop(changes, monkeypatch):
    steps = plugin.steps_of(Local, 4, [], {})
    assert next(steps) == 0
    plugin.session().failure = "all servers are gone"
    monkeypatch.setattr(plugin.session(), "pass_boundary", lambda: raises(PeerLostError("gone")))
    with pytest.raises(PeerLostError, match="gone"):
        next(steps)


def raises(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: counted(-1), r"number is -1; expected an int of 0 or more"),
        (lambda: counted(2.5), r"number is 2.5; expected an int"),
        (lambda: counted(3, Local(), step=1), "expected a state, or models and the like"),
        (lambda: counted(3, step="a"), "Local.step is str; expected an int"),
        (lambda: torch_elastic.steps(3, 4), "TorchState: model is int; expected a Module"),
        (lambda: arrays_elastic.steps(3, 4), "state is int; expected a bpsx.State"),
        (
            lambda: torch_elastic.steps(3, step=torch.nn.Linear(1, 1)),
            "TorchState.step is Linear; expected an int",
        ),
    ],
)
def test_what_is_wrong_is_said_before_the_first_step(changes, call, said):
    with pytest.raises(ConfigError, match=said):
        call()
