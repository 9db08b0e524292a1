"""Training with bpsx.tensorflow.elastic: workers are lost and join, and all have equal weights."""

from __future__ import annotations

import json
import signal

import pytest

from support.jobs import Job
from support.tensorflow_job import QUIET
from support.worker_deaths import (
    FULL,
    REPLACE,
    SHRINK,
    assert_commits_agree,
    begun_anew,
    ends,
    lose_sender,
    replace_one,
)

pytestmark = pytest.mark.timeout(300)
HEAD = """
import os, time, zlib
import tensorflow as tf
import bpsx, bpsx.tensorflow as bps

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
bps.init()
tf.random.set_seed(bps.rank())  # so that only the sync makes weights equal

def crc(variables):
    return zlib.crc32(b"".join(tf.convert_to_tensor(v).numpy().tobytes() for v in variables))
"""
#: Weights and slots are variables of the script.
PLAIN = """
weights = [tf.Variable(tf.random.normal(s), name=f"w{i}") for i, s in enumerate([(4, 300), (1,)])]
slots = [tf.Variable(tf.zeros_like(w)) for w in weights]
parts = lambda: [weights, slots]
state = bps.elastic.TensorFlowState(weights + slots, step=0, rate=tf.Variable(0.5), note=["a", 1])

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.reduce_sum(x @ weights[0], 1) + weights[1]) ** 2)
    gradients = bps.DistributedGradientTape(tape).gradient(loss, weights)
    for w, s, g in zip(weights, slots, gradients):
        s.assign(0.9 * s + g)
        w.assign_sub(0.0001 * state.rate * s)
"""
#: A Keras model that is built in the first step, with an optimizer that is built then, too.
KERAS = """
import keras

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.norm = keras.layers.Dense(8), keras.layers.BatchNormalization()
        self.second = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.second(self.norm(self.first(x), training=training))

model = Net()
optimizer = bps.DistributedOptimizer(keras.optimizers.Adam(0.01))
parts = lambda: [model.variables, optimizer.variables]
state = bps.elastic.TensorFlowKerasState(model, optimizer, step=0, rate=None, note=["a", 1])

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""
TRAINING = """
run = {run}

@bps.elastic.run
def train(state):
    report(["train", bps.rank(), bps.size(), state.step, state.note])
    while state.step < 60:
        while state.step == 50 and bps.size() < int(os.environ.get("TEST_FULL_SIZE", 0)):
            state.commit()  # the newcomer may take its time
        run(tf.random.stateless_normal((3, 4), (state.step, bps.rank())))
        state.step += 1
        if state.rate is not None:
            state.rate.assign(1 / (1 + state.step))
        report(["step", state.step])
        time.sleep(0.02)
        before = state.step
        try:
            state.commit()
        finally:
            # BatchNormalization's averages are each worker's own until all get rank 0's
            report(["commit", before, *[crc([v for v in p if not moving(v)]) for p in parts()]])

def moving(v):
    return "moving" in str(getattr(v, "path", ""))

state.register_reset_callbacks([lambda: report(["reset", bps.rank(), bps.size()])])
train(state)
report(["end", bps.rank(), bps.size(), state.step, *[crc(p) for p in parts()][:1]])
bps.shutdown()
"""
RUNS = {"eager": "step", "graph": "tf.function(step)"}


def training(parts: str, run: str, env: dict[str, str], **more) -> Job:
    # Keras builds the model of these tests in the first step, so the weights differ there.
    checks = {"BPSX_CHECK_WEIGHTS": "warn" if parts == KERAS else "error"}
    env = {**QUIET, **env, **checks}
    return Job(HEAD + parts + TRAINING.format(run=RUNS[run]), env=env, **more)


@pytest.mark.parametrize(
    ("parts", "run", "end"),
    [(PLAIN, "eager", signal.SIGKILL), (KERAS, "graph", signal.SIGTERM)],
    ids=["plain-eager", "keras-graph"],
)
def test_a_worker_is_lost_or_leaves_and_another_joins(parts, run, end):
    with training(parts, run, {**SHRINK, FULL: "3"}, workers=3, servers=2) as job:
        job.workers[0].wait_for_line('["step", 5]')
        first, *others = replace_one(job, end)
        assert sorted(r[1] for r in (first, *others)) == [0, 1, 2] and first[2:4] == [3, 60]
        assert [r[3] for r in others] == [60, 60]
        begun = assert_commits_agree(job, 0, 2, 3)
        survivor, new = begun_anew(job)
        # The newcomer continues at the step at which the others have begun anew.
        assert begun[:2] == [1, 1] and begun[2] == survivor[3] + 1 > 5
        assert new[2:] == survivor[2:] == [3, begun[2] - 1, ["a", 1]]


@pytest.mark.parametrize(
    ("parts", "run"), [(PLAIN, "graph"), (KERAS, "eager")], ids=["plain-graph", "keras-eager"]
)
def test_with_replace_no_step_is_made_with_fewer(parts, run):
    with training(parts, run, REPLACE, workers=2) as job:
        job.workers[0].wait_for_line('["step", 5]')
        job.workers[0].signal(signal.SIGKILL)
        job.start_worker(0)
        ends(job, 1, 2)
        begun = assert_commits_agree(job, 1, 2)
        assert begun[0] == 1 < begun[1]
        trains = [r for r in job.workers[1].reports() if r[0] == "train"]
        assert [r[2] for r in trains] == [2, 2] and trains[1][1] == 0


def test_rank_0_is_lost_while_it_sends_the_model():
    """Whoever has the model then goes on, and sends it to the newcomer, which has built it."""
    source = HEAD + KERAS + TRAINING.format(run=RUNS["graph"])
    source = source.replace(
        "train(state)\nreport",
        """
if bps.rank() == 0:
    copies = bps.elastic.copies
    def send(*args):
        if state.step > 4:  # not at the beginning
            report(["sends"])
            time.sleep(60)
        return copies(*args)
    bps.elastic.copies = send
train(state)
report""",
    )
    with Job(source, workers=3, servers=2, env={**QUIET, **SHRINK}) as job:
        first, second = lose_sender(job, 5)
        assert first[2:4] == second[2:4] == [2, 60]
        assert_commits_agree(job, 1, 3)


BUILT = """
import keras
from keras import layers

def sequential():
    inner = keras.Sequential([layers.Dense(2)])
    return keras.Sequential([layers.Dense(3), layers.Dropout(0.5), inner])

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), name="scale")
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x) * self.scale

class Several(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(5, 3), layers.Dense(2)

    def call(self, ids, more=None):
        return self.dense(self.embedding(ids)) + self.dense(more)

class Named(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x["a"]) + self.dense(x["b"])

class Hidden(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.steps = layers.Dense(2), 0

    def call(self, x, scale):
        return self.dense(x * scale["by"])

x = tf.ones((3, 4))
cases = [
    (sequential, x, {}),
    (Own, x, {}),
    (Several, tf.ones((3, 4), tf.int32), {"more": tf.ones((3, 4, 3))}),
    (Named, {"a": x, "b": x}, {}),
    (Hidden, x, {"scale": {"by": 2.0}}),
]
for make, given, more in cases:
    model, optimizer = make(), bps.DistributedOptimizer(keras.optimizers.Adam(0.1))
    state = bps.elastic.TensorFlowKerasState(model, optimizer)
    if bps.rank() == 0:
        model(given, **more)
        optimizer.build(model.trainable_variables)
    try:
        state.sync()
    except bpsx.ConfigError as e:
        report(str(e))
        break
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(given, **more))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    report([make.__name__, optimizer.built, crc(model.trainable_variables)])
hear()
"""


def test_a_model_is_built_with_rank_0s_shapes_and_names():
    with Job(HEAD + BUILT, workers=2, env={**QUIET, "BPSX_CHECK_WEIGHTS": "error"}) as job:
        job.workers[1].wait_for_line("TensorFlowKerasState: model 'hidden' has been built on rank")
        first, (*second, _) = (worker.reports() for worker in job.workers)
        assert first[:4] == second and len(second) == 4


LOST_SENDER = """
import bpsx.tensorflow.horovod as hvd

share = {run}(lambda x: bps.broadcast(x, 0, name="shared"))
meet = {run}(lambda: bps.push_pull(tf.ones(1), name="met"))
workers = {run}(lambda: hvd.size_op())

@bps.elastic.run
def train(state):
    report(["train", bps.rank(), int(workers()), state.step, float(weights[0][0, 0])])
    while state.step < 12:
        if state.step == 6 and bps.size() == 3:
            state.step += 100
            weights[0].assign(tf.zeros((4, 300)))
            meet()
            if bps.rank() == 0:
                report(["sends"])
                time.sleep(60)
            share(tf.ones(3))
        state.step += 1
        state.commit()

train(state)
report(["end", bps.rank(), bps.size(), state.step, crc(weights)])
bps.shutdown()
"""


@pytest.mark.parametrize("run", ["", "tf.function"])
def test_all_go_back_to_the_last_commit_if_a_sender_is_lost(run):
    source = HEAD + PLAIN + LOST_SENDER.format(run=run)
    with Job(source, workers=3, env={**QUIET, **SHRINK}) as job:
        job.workers[0].wait_for_line('["sends"]')
        job.workers[0].signal(signal.SIGKILL)
        first, second = ends(job, 1, 2)
        assert [r[1:4] for r in (first, second)] == [[0, 2, 12], [1, 2, 12]]
        assert first[4] == second[4]
        for worker in job.workers[1:]:
            before, after = worker.reports()[:2]
            assert before[2:4] == [3, 0] and after[2:4] == [2, 6] and after[4] == before[4] != 0.0


WRONG = """
import keras
import bpsx.tensorflow.horovod as hvd
import bpsx.keras as bps_k

v, model = tf.Variable(1.0), keras.Sequential([keras.layers.Dense(1)])
state = bps_k.elastic.KerasState(model, batch=0)
inner = keras.optimizers.SGD(0.1)
other = keras.Sequential([keras.layers.Dense(1)])
other.compile(keras.optimizers.LossScaleOptimizer(inner))
whole = bps_k.elastic.KerasState(other, inner)
report([
    hvd.elastic is bps.elastic,
    hvd.keras.elastic is bps_k.elastic is bps.keras.elastic,
    hvd.keras.callbacks.CommitStateCallback is bps_k.elastic.CommitStateCallback,
    whole.optimizer is other.optimizer,
    state.optimizer is None,
])
calls = [
    lambda: bps.elastic.TensorFlowState(),
    lambda: bps.elastic.TensorFlowState(v),
    lambda: bps.elastic.TensorFlowState([v, 3]),
    lambda: bps.elastic.TensorFlowState([v], session=3),
    lambda: bps.elastic.TensorFlowState([v], commit=3),
    lambda: tf.function(lambda: bps.elastic.TensorFlowState([v]), autograph=False)(),
    lambda: bps.elastic.TensorFlowKerasState(3),
    lambda: bps.elastic.TensorFlowKerasState(model, "sgd"),
    lambda: bps_k.elastic.KerasState(model, _parts=1),
    lambda: bps_k.elastic.CommitStateCallback(model),
    lambda: bps_k.elastic.CommitStateCallback(state, 0),
    lambda: bps_k.elastic.UpdateEpochStateCallback(state),
    lambda: bps.elastic.TensorFlowKerasState(model, critic=model),
    lambda: bps.elastic.State(v=v),
    lambda: bps.elastic.steps(3, 4),
    lambda: bps.elastic.steps(3, model, step=tf.Variable(0)),
]
for call in calls:
    try:
        call()
    except bpsx.ConfigError as e:
        report(str(e))
bps.shutdown()
"""
SAID = [
    "TensorFlowState: variables is NoneType; expected a list of variables",
    "TensorFlowState: variables is ResourceVariable; expected a list of variables",
    "TensorFlowState: element 1 of variables is int; expected a variable",
    "TensorFlowState: session is int; expected None",
    "TensorFlowState: 'commit' cannot be the name of a value, as TensorFlowState itself has it",
    "TensorFlowState: it must be made in eager code",
    "TensorFlowKerasState: model is int; expected a keras.Model",
    "TensorFlowKerasState: optimizer is str; expected an optimizer of Keras 3",
    "KerasState: '_parts' cannot be the name of a value",
    "CommitStateCallback: state is Sequential; expected a KerasState",
    "CommitStateCallback: batches_per_commit=0: expected an integer from 1",
    "UpdateEpochStateCallback: the state has no value 'epoch'; give it epoch=0",
    "TensorFlowKerasState: critic is Sequential, which your script uses where it is; other workers"
    " would get a copy. Give variables, also those of models, to a TensorFlowState",
    "State: v is ResourceVariable, which your script uses where it is",
    "TensorFlowKerasState: model is int; expected a keras.Model",
    "elastic.steps: TensorFlowKerasState.step is ResourceVariable; expected an int",
]


def test_wrong_arguments_and_horovods_names():
    with Job(HEAD + WRONG, workers=1, alone=True, env=QUIET) as job:
        assert job.workers[0].wait() == 0, job.workers[0].text()
        names, *errors = [json.loads(line) for line in job.workers[0].lines]
        assert names == [True] * 5
        assert [said for said, e in zip(SAID, errors, strict=True) if not e.startswith(said)] == []


DIFFERENT = """
import keras

rank = bps.rank()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="d", use_bias=rank == 0)])
states = [
    bps.elastic.TensorFlowKerasState(model),
    bps.elastic.TensorFlowState([tf.Variable(tf.zeros(3 + rank), name="v")]),
]
for state in states:
    try:
        state.sync()
        report("equal")
    except bpsx.ConfigError as e:
        report(str(e))
        break
bps.shutdown()
"""


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            "states",
            "TensorFlowKerasState: model has 1 variables here and 2 on rank 0. All workers must"
            " make the same",
        ),
        (
            "states[1:]",
            "TensorFlowState: variables has 1 variables here and 1 on rank 0: number 0 is v:0"
            " float32 of shape (4,) here and v:0 float32 of shape (3,) there. All workers must"
            " make the same",
        ),
    ],
)
def test_a_worker_with_other_variables_is_told(states, said):
    source = HEAD + DIFFERENT.replace("in states:", f"in {states}:")
    with Job(source, workers=2, env=QUIET) as job:
        job.workers[1].wait_for_line(said)
