"""TensorFlow jobs that lose a worker: in each step it counts in all gradients or in none."""

from __future__ import annotations

import random
import signal
import textwrap
import time

import numpy as np
import pytest

from support.jobs import Job
from support.tensorflow_job import QUIET
from support.worker_deaths import DYING, SHRINK, survivors_agree, waits_for_death

ENV = {**SHRINK, **QUIET}
#: Elements of the parameters. Gradients of worker ``r`` are 10 ** r everywhere.
SIZES = [10, 3_000, 300_000, 700_000, 5, 40_000, 1_000, 2_000_000]
HEAD = (
    DYING
    + """
import numpy as np, tensorflow as tf
import bpsx, bpsx.tensorflow as bps

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
bps.init()
number = bps.rank()
"""
)
TRAINING = """
weights = [tf.Variable(tf.zeros(n), name=f"w{{i}}") for i, n in enumerate({sizes})]

def step():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in weights])
    gradients = bps.DistributedGradientTape(tape).gradient(loss, weights)
    for w, g in zip(weights, gradients):
        w.assign_sub(g)

run = {run}
for i in range({steps}):
    before = [w.numpy() for w in weights]
    if number == 1 and i == {fatal}:
        die_in_step()
    report(["step", i])
    run()
    moved = [np.unique(a - w.numpy()).tolist() for a, w in zip(before, weights)]
    assert all(len(m) == 1 for m in moved), moved
    report(sorted({{round(m[0], 2) for m in moved}}))
report([bps.rank(), bps.size()])
bps.shutdown()
"""
RUNS = {
    "eager": "step",
    "graph": "tf.function(step)",
    "compiled": "tf.function(step, jit_compile=True)",
}


def job_of(source: str, workers: int = 3, servers: int = 2, **env: str) -> Job:
    return Job(HEAD + textwrap.dedent(source), workers=workers, servers=servers, env={**ENV, **env})


@pytest.mark.parametrize("run", RUNS)
def test_a_worker_that_dies_in_a_step_counts_in_all_gradients_or_none(run):
    source = TRAINING.format(sizes=SIZES, steps=6, fatal=3, run=RUNS[run])
    with job_of(source) as job:
        moves = survivors_agree(job, 1, 3)
        assert moves[:3] == [37.0] * 3 and moves[3] in (37.0, 50.5) and moves[4:] == [50.5] * 2


@pytest.mark.parametrize("run", ["eager", "graph"])
def test_a_worker_that_dies_at_any_moment_counts_in_all_gradients_or_none(run):
    source = TRAINING.format(sizes=SIZES, steps=8, fatal=-1, run=RUNS[run])
    with job_of(waits_for_death(source, 1)) as job:
        job.workers[random.randrange(3)].wait_for_line('["step", 2]')
        job.workers[1].signal(signal.SIGKILL)
        moves = survivors_agree(job, 1, 3)
        assert moves == sorted(moves) and set(moves) <= {37.0, 50.5} and moves[-1] == 50.5


#: Optimizers, each a function ``run`` that makes a step, and ``weights`` that give values.
OPTIMIZERS = {
    "keras": """
import keras
weights = [tf.Variable(tf.zeros(n), name=f"w{i}") for i, n in enumerate(SIZES)]
optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0))
optimizer.build(weights)

@tf.function
def run():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in weights])
    optimizer.apply(tape.gradient(loss, weights), weights)

values = lambda: [w.numpy() for w in weights]
""",
    "clipped": """
# Both exchanges of a step are large; the global norm is that of all workers' gradients.
import keras
weights = [tf.Variable(tf.zeros(n), name=f"w{i}") for i, n in enumerate(SIZES)]
optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1e12))
optimizer.build(weights)

def run():
    with tf.GradientTape(persistent=True) as tape:
        first = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in weights[::2]])
        second = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in weights[1::2]])
    found = [*tape.gradient(first, weights[::2]), *tape.gradient(second, weights[1::2])]
    optimizer.apply(found, [*weights[::2], *weights[1::2]])

values = lambda: [w.numpy() for w in weights]
""",
    "v1": """
v1 = tf.compat.v1
v1.disable_eager_execution()
weights = [v1.get_variable(f"w{i}", initializer=np.zeros(n, "f")) for i, n in enumerate(SIZES)]
loss = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in weights])
optimizer = bps.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
train = optimizer.minimize(loss)
in_v1 = v1.Session()
in_v1.run(v1.global_variables_initializer())
run = lambda: in_v1.run(train)
values = lambda: in_v1.run(weights)
""",
    "mirrored": """
import bpsx.tensorflow.distribute
weights = [tf.Variable(tf.zeros(n), name=f"w{i}") for i, n in enumerate(SIZES)]
strategy = bpsx.tensorflow.distribute.MirroredStrategy(["CPU:0"])
with strategy.scope():
    weights = [tf.Variable(tf.zeros(n), name=f"w{i}") for i, n in enumerate(SIZES)]
    optimizer = tf.keras.optimizers.SGD(1.0)
    optimizer.build(weights)

def replica():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in weights])
    optimizer.apply(tape.gradient(loss, weights), weights)

run = tf.function(lambda: strategy.run(replica))
values = lambda: [w.numpy() for w in weights]
""",
    # Only the worker that dies has a gradient for the first variable.
    "none": """
weights = [tf.Variable(tf.zeros(n), name=f"w{i}") for i, n in enumerate(SIZES)]

def run():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in weights[number != 1:]])
    gradients = bps.DistributedGradientTape(tape).gradient(loss, weights)
    first, counted = gradients[0], bool(gradients[1][0] == 37)
    assert (first is not None) == counted and (not counted or abs(first[0] - 10 / 3) < 1e-5), first
    for w, g in zip(weights[1:], gradients[1:]):
        w.assign_sub(g)

values = lambda: [w.numpy() for w in weights[1:]]
""",
}
STEPS = """
for i in range(6):
    before = values()
    if number == 1 and i == 3:
        die_in_step()
    report(["step", i])
    run()
    moved = [np.unique(a - b).tolist() for a, b in zip(before, values())]
    assert all(len(m) == 1 for m in moved), moved
    report(sorted({round(m[0], 2) for m in moved}))
report([bps.rank(), bps.size()])
bps.shutdown()
"""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_counts_a_dead_worker_in_all_gradients_or_none(optimizer):
    with job_of(f"SIZES = {SIZES}\n" + OPTIMIZERS[optimizer] + STEPS) as job:
        moves = survivors_agree(job, 1, 3)
        assert moves[:3] == [37.0] * 3 and moves[3] in (37.0, 50.5) and moves[4:] == [50.5] * 2


def test_steps_of_a_loop_within_a_graph_are_decided_one_by_one():
    loop = """
def body(i):
    step()
    return [i + 1]

run = tf.function(lambda: tf.while_loop(lambda i: i < 2, body, [0]))
"""
    source = TRAINING.format(sizes=SIZES, steps=6, fatal=3, run="None")
    with job_of(source.replace("run = None\n", loop)) as job:
        moves = survivors_agree(job, 1, 3)
        assert moves[:3] == [74.0] * 3 and moves[3] in (74.0, 87.5, 101.0), moves
        assert moves[4:] == [101.0] * 2, moves


#: Keras' fit of two layers; the rate rises from batch to batch, with the size of the job.
FIT = """
import zlib, keras
from bpsx.tensorflow.keras import callbacks

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Dense(n, use_bias=False) for n in {layers}[1:]])
model.build((None, {layers}[0]))
optimizer = bps.DistributedOptimizer(
    keras.optimizers.SGD(0.03), backward_passes_per_step={passes}
)
model.compile(optimizer, "mse", run_eagerly={eager})
first = [w.numpy().astype(float) for w in model.trainable_variables]

class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        report(["batch", batch])
        if number == 1 and batch == {fatal}:
            die_in_step()
        if number == 1 and batch == {fatal} + 1:
            hear()  # until it dies

data = np.load("{out}/data.npz")
x, y = [np.concatenate(data[name][:, number]) for name in ("x", "y")]
history = model.fit(
    x, y, batch_size=len(x) // len(data["x"]), epochs=2, shuffle=False, verbose=0, callbacks=[
        callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback(),
        callbacks.LearningRateWarmupCallback(2, initial_lr=0.03), Dies(),
    ],
)
weights = [w.numpy() for w in model.trainable_variables]
report(["losses", history.history["loss"]])
report(["bits", [zlib.crc32(w.tobytes()) for w in weights]])
np.savez("{out}/" + str(number), *first, *weights)
bps.shutdown()
"""
LAYERS, BATCHES, FATAL = (32, 1200, 500, 2), 6, 3


def _trained(
    first: list[np.ndarray], data: dict[str, np.ndarray], passes: int, last: int
) -> list[np.ndarray]:
    """Weights in float64 if worker 1 counts up to exchange number ``last``."""
    weights, kept = [w.copy() for w in first], {r: [0.0] * len(first) for r in range(3)}
    for step in range(2 * BATCHES):
        rate = 0.03 / 3 * (min((step + 1) / BATCHES / 2, 1.0) * 2 + 1)
        x, y = (data[name][step % BATCHES].astype(float) for name in ("x", "y"))
        for r in range(3):
            seen = [x[r]]
            for w in weights:
                seen.append(seen[-1] @ w)
            back = 2 * (seen[-1] - y[r]) / y[r].size
            for i in reversed(range(len(weights))):
                kept[r][i] = kept[r][i] + seen[i].T @ back / passes
                back = back @ weights[i].T
        if (step + 1) % passes == 0:
            living = range(3) if step // passes <= last else [0, 2]
            for i, w in enumerate(weights):
                w -= rate * sum(kept[r][i] for r in living) / len(living)
            kept = {r: [0.0] * len(first) for r in range(3)}
    return weights


@pytest.mark.parametrize(("eager", "passes"), [(False, 1), (True, 1), (False, 2)])
def test_weights_of_fit_are_those_of_float64(tmp_path, eager, passes):
    source = FIT.format(layers=LAYERS, eager=eager, passes=passes, fatal=FATAL, out=tmp_path)
    rng = np.random.default_rng()
    data = {
        name: rng.standard_normal((BATCHES, 3, 4, n)).astype(np.float32)
        for name, n in (("x", LAYERS[0]), ("y", LAYERS[-1]))
    }
    np.savez(tmp_path / "data.npz", **data)
    with job_of(source) as job:
        said = []
        for of in (0, 2):
            assert job.workers[of].wait() == 0, job.workers[of].text()
            said.append(job.workers[of].reports()[-2:])
        assert said[0] == said[1]
        assert job.scheduler.wait() == 0
    saved = np.load(tmp_path / "0.npz")
    found = [saved[f"arr_{i}"] for i in range(2 * (len(LAYERS) - 1))]
    first, weights = found[: len(found) // 2], found[len(found) // 2 :]
    exchange = FATAL // passes
    fits = []
    for last in range(exchange - 2, exchange + 2):
        exact = _trained(first, data, passes, last)
        fits.append(all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(weights, exact)))
    assert fits in ([False, True, False, False], [False, False, True, False])


def test_a_worker_that_dies_in_its_backward_pass_counts_in_no_gradient():
    """Servers have replied to some of its gradients, and it has not computed the others."""
    source = f"""
from bpsx.api.lifecycle import session

weights = [tf.Variable(tf.zeros(n), name=f"w{{i}}") for i, n in enumerate({SIZES})]
stops = False

def stop(g):
    if stops:
        before = session().counters()["messages_received"]
        report("half")
        while session().counters()["messages_received"] < before + 2:
            time.sleep(0.01)
        report("summed")
        hear()
    return g

@tf.custom_gradient
def stopping(w):
    def gradient(g):
        return tf.ensure_shape(tf.numpy_function(stop, [g], tf.float32), w.shape)
    return tf.identity(w), gradient

@tf.function
def run():
    with tf.GradientTape() as tape:
        both = [*weights[:4], stopping(weights[4]), *weights[5:]]
        loss = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in both])
    gradients = bps.DistributedGradientTape(tape).gradient(loss, weights)
    for w, g in zip(weights, gradients):
        w.assign_sub(g)

for i in range(6):
    before = [w.numpy() for w in weights]
    stops = number == 1 and i == 3
    report(["step", i])
    run()
    moved = [np.unique(a - w.numpy()).tolist() for a, w in zip(before, weights)]
    assert all(len(m) == 1 for m in moved), moved
    report(sorted({{round(m[0], 2) for m in moved}}))
report([bps.rank(), bps.size()])
bps.shutdown()
"""
    with job_of(source) as job:
        job.workers[1].wait_for_line("summed")
        job.workers[1].signal(signal.SIGKILL)
        assert survivors_agree(job, 1, 3) == [37.0] * 3 + [50.5] * 3


def test_a_step_that_fails_in_its_middle_keeps_nobody_waiting():
    """One gradient of worker 1 is never computed. It raises, and the others go on without it."""
    source = f"""
weights = [tf.Variable(tf.zeros(n), name=f"w{{i}}") for i, n in enumerate({SIZES})]
fails = tf.Variable(False)

@tf.custom_gradient
def checked(w):
    def gradient(g):
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails), ["broken"])]):
            return tf.identity(g)
    return w, gradient

@tf.function
def run():
    with tf.GradientTape() as tape:
        both = [weights[0], weights[1], checked(weights[2]), *weights[3:]]
        loss = tf.add_n([tf.reduce_sum(w * 10.0**number) for w in both])
    gradients = bps.DistributedGradientTape(tape).gradient(loss, weights)
    for w, g in zip(weights, gradients):
        w.assign_sub(g)

for i in range(4):
    report(["step", i])
    fails.assign(number == 1 and i == 2)
    run()
    report([-round(float(weights[5][0]), 2)])
report([bps.rank(), bps.size()])
bps.shutdown()
"""
    with job_of(source) as job:
        assert job.workers[1].wait() == 1
        assert "broken" in job.workers[1].text()
        assert survivors_agree(job, 1, 3) == [37.0, 74.0, 124.5, 175.0]


SPARSE = """
table = tf.Variable(tf.ones((5, 2)), name="table")

def step(**options):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [number]) * 10.0**number)
    return bps.DistributedGradientTape(tape, op=bps.Sum, **options).gradient(loss, [table])[0]

for run in (step, tf.function(step)):
    report(run(sparse_as_dense=True).numpy()[:, 0].tolist())
    try:
        run()
    except bpsx.errors.ConfigError as e:
        report("BPSX_ELASTIC=shrink" in str(e) and "sparse_as_dense=True" in str(e))
bps.shutdown()
"""


def test_sparse_gradients_are_refused_unless_they_travel_dense():
    with job_of(SPARSE, workers=2) as job:
        for worker in job.workers:
            assert worker.wait() == 0, worker.text()
            assert worker.reports() == [[1.0, 10.0, 0.0, 0.0, 0.0], True] * 2


#: Calls whose results depend on ranks -> how the error names them.
NEED_ALL = {
    "hvd.allgather(x)": "allgather, alltoall and push_pull of tf.IndexedSlices",
    "hvd.alltoall(x)": "allgather, alltoall and push_pull of tf.IndexedSlices",
    "hvd.reducescatter(x)": "reducescatter",
    "hvd.allreduce(x, op=hvd.Max)": "allreduce with op=hvd.Max",
    "hvd.allreduce(tf.cast(x, tf.int32))": "an average of integers",
    "hvd.allgather_object(1)": "gathering objects",
    "bps.push_pull(tf.IndexedSlices(x, tf.range(3)))": "push_pull of tf.IndexedSlices",
}


@pytest.mark.parametrize("call", NEED_ALL)
def test_what_needs_all_workers_ends_the_job(call):
    source = f"""
import bpsx.tensorflow.horovod as hvd
x = tf.ones(3)
{call}
report("ready")
hear()
try:
    while True:
        bps.push_pull(x, name="x")
except (bpsx.BpsxError, tf.errors.AbortedError) as e:
    report(str(e))
"""
    with job_of(source, servers=1) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.workers[0].signal(signal.SIGKILL)
        for worker in job.workers[1:]:
            worker.say("go")
            worker.wait()
            assert NEED_ALL[call] in worker.reports()[-1], worker.text()


def test_metrics_are_averages_of_the_survivors():
    source = """
import time
from bpsx.tensorflow.keras.callbacks import MetricAverageCallback

logs = {"loss": float(10**number)}
MetricAverageCallback().on_epoch_end(0, logs)
report([logs["loss"]])
if number == 1:
    hear()
while bps.size() == 3:
    time.sleep(0.001)
logs = {"loss": float(10**number)}
MetricAverageCallback().on_epoch_end(0, logs)
report([logs["loss"]])
report([bps.rank(), bps.size()])
bps.shutdown()
"""
    with job_of(source) as job:
        job.workers[1].wait_for_line("37.0")
        job.workers[1].signal(signal.SIGKILL)
        assert survivors_agree(job, 1, 3) == [37.0, 50.5]


@pytest.mark.parametrize("run", ["eager", "graph"])
def test_the_end_of_the_job_is_raised(run):
    training = TRAINING.format(sizes=SIZES, steps=10_000, fatal=-1, run=RUNS[run])
    body, _ = training.split("report([bps.rank(), bps.size()])")
    source = f"""
try:
{textwrap.indent(body, "    ")}
except tf.errors.AbortedError as e:
    report("server 0" in str(e))
"""
    with job_of(source, servers=1) as job:
        job.workers[1].wait_for_line('["step", 2]')
        job.servers[0].signal(signal.SIGKILL)
        for worker in job.workers:
            worker.wait()
            assert worker.reports()[-1] is True, worker.text()


def test_a_worker_that_dies_before_its_first_step():
    """One survivor begins the step before the death, and the other one after it."""
    source = """
w = tf.Variable(tf.zeros(3), name="w")
if number == 1:
    hear()
while number == 0 and bps.size() == 3:
    time.sleep(0.01)
report("begins")
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(w * 10.0**number)
gradient = bps.DistributedGradientTape(tape).gradient(loss, [w])[0]
report([float(gradient[0])])
report([bps.rank(), bps.size()])
bps.shutdown()
"""
    with job_of(source) as job:
        job.workers[2].wait_for_line("begins")
        time.sleep(1)  # it compares the first step's names with those of the others
        job.workers[1].signal(signal.SIGKILL)
        for worker in (job.workers[0], job.workers[2]):
            assert worker.wait() == 0, worker.text()
            assert worker.reports()[1:2] == [[50.5]]
