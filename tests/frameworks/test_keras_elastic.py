"""Training with bpsx.keras.elastic and ``fit``: workers are lost and join, and no batch is lost."""

from __future__ import annotations

import signal

import pytest

from support.jobs import Job
from support.tensorflow_job import QUIET
from support.worker_deaths import (
    REPLACE,
    SHRINK,
    assert_commits_agree,
    begun_anew,
    ends,
    replace_one,
)

pytestmark = pytest.mark.timeout(300)
TRAINING = """
import contextlib, time, zlib
import numpy as np, keras, tensorflow as tf
import bpsx, bpsx.keras as bps

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
bps.init()
tf.random.set_seed(bps.rank())  # so that only the sync makes weights equal
{head}
with {scope}:
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile({optimizer}, "mse")
x = np.random.default_rng(bps.rank()).normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat().batch(8)

def crc(variables):
    parts = [v for v in variables if not v.path.endswith("seed_generator_state")]
    return zlib.crc32(b"".join(tf.convert_to_tensor(v).numpy().tobytes() for v in parts))

class Said(bps.elastic.KerasState):
    def commit(self):
        try:
            super().commit()
        finally:
            weights, moments = crc(model.variables), crc(model.optimizer.variables)
            report(["commit", 15 * self.epoch + self.batch, weights, moments])
            time.sleep(0.02)

state = Said(model, epoch=0, batch=0)
state.register_reset_callbacks([lambda: report(["reset", bps.rank(), bps.size()])])
callbacks = [
    bps.callbacks.BroadcastGlobalVariablesCallback(0),  # the state does it, also for newcomers
    bps.elastic.UpdateEpochStateCallback(state),
    bps.elastic.UpdateBatchStateCallback(state),
    bps.elastic.CommitStateCallback(state),
]

@bps.elastic.run
def train(state):
    report(["train", bps.rank(), bps.size(), state.epoch, state.batch])
    while state.epoch < 4:
        rest = {{"initial_epoch": state.epoch, "epochs": state.epoch + 1}}
        model.fit(data, steps_per_epoch=15 - state.batch, callbacks={order}, verbose=0, **rest)

train(state)
made = int(tf.convert_to_tensor(model.optimizer.iterations))
report(["end", bps.size(), state.epoch, state.batch, made])
bps.shutdown()
"""
SGD = {
    "head": "",
    "scope": "contextlib.nullcontext()",
    "optimizer": "bps.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))",
}
#: The strategy exchanges the gradients.
MIRRORED = {
    "head": 'import bpsx.tensorflow as bps_t\nhere = ["CPU:0"]',
    "scope": "bps_t.distribute.MirroredStrategy(here).scope()",
    "optimizer": "keras.optimizers.SGD(0.01, momentum=0.9)",
}
#: compile() puts a LossScaleOptimizer around the optimizer.
HALF = {
    **SGD,
    "head": 'keras.config.set_dtype_policy("mixed_float16")',
    "optimizer": "bps.DistributedOptimizer(keras.optimizers.Adam(0.01))",
}


@pytest.mark.parametrize(
    ("how", "end"),
    [(SGD, signal.SIGTERM), (MIRRORED, signal.SIGKILL)],
    ids=["optimizer", "strategy"],
)
def test_a_worker_is_lost_or_leaves_and_another_joins(how, end):
    source = TRAINING.format(**how, order="callbacks")
    with Job(source, workers=3, servers=2, env={**QUIET, **SHRINK}) as job:
        job.workers[0].wait_for_line('["commit", 20,')
        # 60 batches in 4 epochs of 15: none was made twice or left out.
        assert replace_one(job, end) == [["end", 3, 4, 0, 60]] * 3
        begun = assert_commits_agree(job, 0, 2, 3)
        assert begun[:2] == [1, 1] and begun[2] > 20
        # fit() goes on at the batch after which the newcomer has entered.
        survivor, new = begun_anew(job)
        assert new[2:] == survivor[2:] and 15 * new[3] + new[4] == begun[2] - 1


def test_commits_come_first_and_scale_the_loss():
    """The callback that commits has the others count before, wherever it is in the list."""
    source = TRAINING.format(**HALF, order="callbacks[::-1]")
    with Job(source, workers=2, env={**QUIET, **REPLACE}) as job:
        job.workers[0].wait_for_line('["commit", 20,')
        job.workers[0].signal(signal.SIGKILL)
        job.start_worker(0)
        ended = ends(job, 1, 2)
        assert ended[0] == ended[1] and ended[0][:4] == ["end", 2, 4, 0]
        assert assert_commits_agree(job, 1, 2)[0] == 1
        commits = [r[1] for r in job.workers[1].reports() if r[0] == "commit"]
        assert commits == list(range(1, 61))


RESTORE = """
model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.1), keras.layers.Dense(2)])
state = bps.elastic.KerasState(model, epoch=1, seen=[1])
assert state.optimizer is None
model.compile(keras.optimizers.Adagrad(0.1), "mse")
state.sync()
x = np.ones((8, 4), "float32")

def all_of():
    found = [*model.variables, *model.optimizer.variables]
    return [crc(found), len(found), float(model.optimizer.learning_rate)]

report(all_of())
model.fit(x, x[:, :2], verbose=0)
model.optimizer.learning_rate = 0.5
state.epoch = 2
state.seen.append(2)
report(all_of())
state.restore()
report(all_of())
report([state.epoch, state.seen])
bps.shutdown()
"""


def test_restore_goes_back_to_what_was_saved():
    """Also to the first values of slots, which are not zeros: the state builds the optimizer."""
    source = TRAINING.format(**SGD, order="callbacks")
    begin, _ = source.split("state = Said(")
    with Job(begin + RESTORE, workers=1, alone=True, env=QUIET) as job:
        assert job.workers[0].wait() == 0, job.workers[0].text()
        before, changed, after, values = job.workers[0].reports()
        assert before == after and before[0] != changed[0] and before[1] == changed[1] == 7
        assert [before[2], changed[2]] == pytest.approx([0.1, 0.5]) and values == [1, [1]]
