"""Training with bpsx.mxnet.elastic: workers are lost and join, and all have equal weights."""

from __future__ import annotations

import json
import signal

import pytest

from frameworks.mxnet_scripts import HEAD
from support.jobs import Job
from support.worker_deaths import (
    FULL,
    REPLACE,
    SHRINK,
    assert_commits_agree,
    begun_anew,
    ends,
    replace_one,
)

pytestmark = pytest.mark.timeout(180)
BEGIN = (
    HEAD
    + """
import time, zlib

bps.init()
mx.random.seed(bps.rank())  # so that only the sync makes weights equal
np.random.seed(bps.rank())

def crc(arrays):
    return zlib.crc32(b"".join(a.asnumpy().tobytes() for a in arrays))
"""
)
#: The shape of the first layer's weights is not known before the first batch.
TRAINING = """
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(8), gluon.nn.BatchNorm(), gluon.nn.Dense(1))
net.initialize(mx.init.Xavier())
trainer = bps.DistributedTrainer({params}, {optimizer})
loss_of = gluon.loss.L2Loss()
big = mx.nd.ones((600, 600))

def said():
    # BatchNorm's averages are each worker's own until all get rank 0's
    weights = [p.data() for p in net.collect_params().values() if p.grad_req != "null"]
    found = [trainer._updaters[0].states[i] for i in sorted(trainer._updaters[0].states)]
    moments = [m for s in found for m in (s if isinstance(s, tuple) else (s,)) if m is not None]
    return [crc(weights), crc(moments), len(moments), trainer._optimizer.num_update]

@bps.elastic.run
def train(state):
    kept = state.kept.asnumpy().tolist()
    report(["train", bps.rank(), bps.size(), state.step, state.note, kept, state.step and said()])
    while state.step < 60:
        while state.step == 50 and bps.size() < int(os.environ.get("TEST_FULL_SIZE", 0)):
            state.commit()  # the newcomer may take its time
        late = mx.nd.dot(big, big)  # the engine is still busy when the script commits
        x = mx.nd.random.normal(shape=(4, 5)) + 0 * late[0, 0]
        with autograd.record():
            loss = loss_of(net(x), x.sum(axis=1))
        loss.backward()
        trainer.step(4)
        state.step += 1
        if state.step == 3:
            trainer.set_learning_rate(0.02)
        report(["step", state.step])
        before = state.step
        try:
            state.commit()
        finally:
            report(["commit", before, trainer.learning_rate, *said()])

params = net.collect_params()
state = bps.elastic.TrainerState(trainer, params, step=0, note=["a", 1], kept=mx.nd.ones(2))
state.register_reset_callbacks([lambda: report(["reset", bps.rank(), bps.size()])])
train(state)
report(["end", bps.rank(), bps.size(), state.step, *said()])
bps.shutdown()
"""
SGD = {
    "params": "net.collect_params()",
    "optimizer": '"sgd", {"learning_rate": 0.01, "momentum": 0.9}',
}
#: The trainer does not have all Parameters: the state has the others.
ADAM = {
    "params": 'net.collect_params(".*weight|.*bias|.*gamma|.*beta")',
    "optimizer": '"adam", {"learning_rate": 0.01}',
}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_is_lost_or_leaves_and_another_joins(end):
    source = BEGIN + TRAINING.format(**SGD)
    with Job(source, workers=3, servers=2, env={**SHRINK, FULL: "3"}) as job:
        job.workers[0].wait_for_line('["step", 5]')
        first, *others = replace_one(job, end)
        assert sorted(r[1] for r in (first, *others)) == [0, 1, 2] and first[2:4] == [3, 60]
        assert all(r[2:] == first[2:] for r in others) and first[6:] == [6, 60]
        begun = assert_commits_agree(job, 0, 2, 3)
        survivor, new = begun_anew(job)
        # The newcomer continues at the step at which the others have begun anew.
        assert begun[:2] == [1, 1] and begun[2] == survivor[3] + 1 > 5
        values = [3, begun[2] - 1, ["a", 1], [1.0, 1.0]]
        assert new[2:6] == values and new[2:] == survivor[2:]


def test_with_replace_no_step_is_made_with_fewer():
    with Job(BEGIN + TRAINING.format(**ADAM), workers=2, env=REPLACE) as job:
        job.workers[0].wait_for_line('["step", 5]')
        job.workers[0].signal(signal.SIGKILL)
        job.start_worker(0)
        ends(job, 1, 2)
        begun = assert_commits_agree(job, 1, 2)
        assert begun[0] == 1 < begun[1]
        trains, (new,) = ([r for r in w.reports() if r[0] == "train"] for w in job.workers[1:])
        assert [r[2] for r in trains] == [2, 2] and trains[1][1] == 0
        assert trains[1][2:] == new[2:]


LOST_SENDER = """
weight = gluon.Parameter("w", shape=(8,), init=mx.init.Normal())
weight.initialize()
trainer = bps.DistributedTrainer([weight], "sgd", {"learning_rate": 0.01, "momentum": 0.9})
sent = mx.nd.ones(3)

@bps.elastic.run
def train(state):
    report(["train", bps.rank(), bps.size(), state.step, crc([weight.data()])])
    while state.step < 12:
        if state.step == 6 and bps.size() == 3:
            report(["commit", crc([weight.data(), trainer._updaters[0].states[0]])])
            state.step += 100
            weight.set_data(mx.nd.zeros(8))
            trainer._updaters[0].states[0][:] = 0
            met = mx.nd.ones(1)
            bps.byteps_push_pull(met, name="met")
            met.wait_to_read()
            if bps.rank() == 0:
                report(["sends"])
                time.sleep(60)
            bps.broadcast_parameters({"shared": sent, "weight": weight})
        if state.step == 6:
            report(["again", crc([weight.data(), trainer._updaters[0].states[0]])])
        with autograd.record():
            loss = (weight.data() ** 2).sum()
        loss.backward()
        trainer.step(1)
        state.step += 1
        state.commit()

train(bps.elastic.TrainerState(trainer, step=0))
report(["end", bps.rank(), bps.size(), trainer._optimizer.num_update, crc([weight.data()])])
bps.shutdown()
"""


def test_all_go_back_to_the_last_commit_if_a_sender_is_lost():
    with Job(BEGIN + LOST_SENDER, workers=3, env=SHRINK) as job:
        job.workers[0].wait_for_line('["sends"]')
        job.workers[0].signal(signal.SIGKILL)
        first, second = ends(job, 1, 2)
        assert [r[1:4] for r in (first, second)] == [[0, 2, 12], [1, 2, 12]]
        assert first[4] == second[4]
        for worker in job.workers[1:]:
            reports = worker.reports()
            (committed,) = [r[1] for r in reports if r[0] == "commit"]
            (again,) = [r[1] for r in reports if r[0] == "again"]
            assert committed == again
            assert [r[2:4] for r in reports if r[0] == "train"] == [[3, 0], [2, 6]]


WRONG = """
weight = gluon.Parameter("w", shape=(8,))
weight.initialize()
trainer = bps.DistributedTrainer([weight], "sgd", {"learning_rate": 0.01})
calls = [
    lambda: bps.elastic.TrainerState("sgd"),
    lambda: bps.elastic.TrainerState(trainer, [weight]),
    lambda: bps.elastic.TrainerState(trainer, {"w": 3}),
    lambda: bps.elastic.TrainerState(trainer, sync=3),
    lambda: bps.elastic.TrainerState(trainer, net=gluon.nn.Dense(1)),
    lambda: bps.elastic.steps(3, "sgd"),
]
for call in calls:
    try:
        call()
    except bpsx.ConfigError as e:
        report(str(e))
bps.shutdown()
"""


def test_wrong_arguments():
    with Job(BEGIN + WRONG, workers=1, alone=True) as job:
        assert job.workers[0].wait() == 0, job.workers[0].text()
        assert [json.loads(line) for line in job.workers[0].lines] == [
            "TrainerState: trainer is str; expected a DistributedTrainer",
            "TrainerState: params is list; expected what collect_params() returns",
            "TrainerState: value 0 of params is int; expected a Parameter",
            "TrainerState: 'sync' cannot be the name of a value, as TrainerState itself has it",
            "TrainerState: net is Dense, which your script uses where it is; other workers would"
            " get a copy. Give Parameters to a TrainerState, as params=net.collect_params()",
            "TrainerState: trainer is str; expected a DistributedTrainer",
        ]


DIFFERENT = """
other = bps.rank() == 1
weight = gluon.Parameter("w", shape=({shape},))
weight.initialize()
bias, more = (gluon.Parameter(name, shape=(2,)) for name in "bc")
if {initialized}:
    bias.initialize()
more.initialize()
trainer = bps.DistributedTrainer({trained}, "sgd", {{"learning_rate": 0.01}})
try:
    bps.elastic.TrainerState(trainer, {{"b": bias}}).sync()
except bpsx.ConfigError as e:
    report(str(e))
bps.shutdown()
"""
SAME = {"shape": "8", "initialized": "True", "trained": "[weight]"}


@pytest.mark.parametrize(
    ("what", "how", "said"),
    [
        ("shape", "8 + other", "'w' is float32 of [9] here, and is float32 of [8] on rank 0."),
        ("initialized", "not other", "'b' has not been initialized here, and is float32 of [2] on"),
        ("trained", "[weight, more][:1 + other]", "trainer has 2 Parameters here and 1 on rank 0."),
    ],
)
def test_a_worker_with_other_parameters_is_told(what, how, said):
    source = BEGIN + DIFFERENT.format(**{**SAME, what: how})
    with Job(source, workers=2) as job:
        job.workers[1].wait_for_line(f"TrainerState: {said}")
