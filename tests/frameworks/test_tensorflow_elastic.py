"""Training with bpsx.tensorflow.elastic: workers are lost and join, and all have equal weights."""

from __future__ import annotations

import signal

import pytest

from support.jobs import Job
from support.tensorflow_job import QUIET
from support.worker_deaths import REPLACE, SHRINK, check_commits, ends

pytestmark = pytest.mark.timeout(300)
HEAD = """
import time, zlib
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
    """``check_weights``: all compare their weights in the first step after a worker has joined."""
    env = {**QUIET, **env}
    return Job(HEAD + parts + TRAINING.format(run=RUNS[run]), env=env, **more)


@pytest.mark.parametrize(
    ("parts", "run"), [(PLAIN, "eager"), (KERAS, "graph")], ids=["plain-eager", "keras-graph"]
)
def test_a_worker_is_lost_and_another_joins(parts, run):
    with training(parts, run, SHRINK, workers=3, servers=2) as job:
        job.workers[0].wait_for_line('["step", 5]')
        job.workers[1].signal(signal.SIGKILL)
        for survivor, rank in ((0, 0), (2, 1)):
            job.workers[survivor].wait_for_line(f'["reset", {rank}, 2]')
        job.start_worker(1)
        first, *others = ends(job, 0, 2, 3)
        assert sorted(r[1] for r in (first, *others)) == [0, 1, 2] and first[2:4] == [3, 60]
        assert [r[3] for r in others] == [60, 60]
        begun = check_commits(job, 0, 2, 3)
        trains = [[r for r in job.workers[i].reports() if r[0] == "train"] for i in (0, 2, 3)]
        # The newcomer continues at the step at which the others have begun anew.
        assert begun[:2] == [1, 1] and begun[2] == trains[0][-1][3] + 1 > 5
        assert [t[2:] for t in trains[0]] == [t[2:] for t in trains[1]] and len(trains[0]) == 3
        assert trains[2][0][2:] == trains[0][-1][2:] == [3, begun[2] - 1, ["a", 1]]


@pytest.mark.parametrize(
    ("parts", "run"), [(PLAIN, "graph"), (KERAS, "eager")], ids=["plain-graph", "keras-eager"]
)
def test_with_replace_no_step_is_made_with_fewer(parts, run):
    with training(parts, run, REPLACE, workers=2) as job:
        job.workers[0].wait_for_line('["step", 5]')
        job.workers[0].signal(signal.SIGKILL)
        job.start_worker(0)
        ends(job, 1, 2)
        begun = check_commits(job, 1, 2)
        assert begun[0] == 1 < begun[1]
        trains = [r for r in job.workers[1].reports() if r[0] == "train"]
        assert [r[2] for r in trains] == [2, 2] and trains[1][1] == 0
