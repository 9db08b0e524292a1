"""DistributedOptimizer for ``tf.compat.v1.train``, and asynchronous training.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorflow_models import data, mlp

from bpsx.errors import ConfigError
from support.jobs import Job
from support.tensorflow_job import QUIET, WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.tensorflow as bps

    v1 = tf.compat.v1

WORKERS = 2


# ---- run in the workers


def data_of(worker: int | None, steps: int = 6) -> np.ndarray:
    """Return inputs of shape (steps, rows, 6), of one worker or of all."""
    inputs, _ = data(steps)
    return inputs.reshape(steps, -1, 6) if worker is None else inputs[:, worker]


def in_graph(make: Any, worker: int | None, steps: int = 6, loss_of: Any = None) -> Any:
    """Minimize in a v1 graph; return the weights and the number of steps counted."""
    with tf.Graph().as_default(), v1.Session() as sess:
        x = v1.placeholder(tf.float32, (None, 6))
        w = v1.get_variable("w", initializer=np.linspace(-1, 1, 6, dtype=np.float32))
        b = v1.get_variable("b", initializer=np.float32(0.5))
        unused = v1.get_variable("unused", initializer=np.float32(0.5))
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) + b - 1))
        step = v1.train.get_or_create_global_step()
        optimizer = make()
        train = optimizer.minimize(loss, global_step=step, var_list=[w, b, unused])
        sess.run(v1.global_variables_initializer())
        for batch in data_of(worker, steps):
            sess.run(train, {x: batch})
        return *sess.run([w, b]), int(sess.run(step)), len(optimizer.variables())


def in_function(make: Any, worker: int | None, traced: bool, steps: int = 6) -> Any:
    w, b = (
        tf.Variable(np.linspace(-1, 1, 6, dtype=np.float32), name="w"),
        tf.Variable(np.float32(0.5), name="b"),
    )
    optimizer = make()

    def step(x: tf.Tensor) -> None:
        def loss() -> tf.Tensor:
            return tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) + b - 1))

        optimizer.minimize(loss, var_list=[w, b])

    run = tf.function(step) if traced else step
    for batch in data_of(worker, steps):
        run(tf.constant(batch))
    return w.numpy(), b.numpy()


def momentum() -> Any:
    return v1.train.MomentumOptimizer(0.1, 0.9)


def job_v1() -> Any:
    rank = bps.rank()
    return {
        "alone": in_graph(momentum, None),
        "graph": in_graph(lambda: bps.DistributedOptimizer(momentum()), rank),
        "eager": in_function(lambda: bps.DistributedOptimizer(momentum()), rank, False),
        "traced": in_function(lambda: bps.DistributedOptimizer(momentum()), rank, True),
        "sum": in_graph(lambda: bps.DistributedOptimizer(momentum(), op=bps.Sum), rank),
        "half alone": in_graph(lambda: v1.train.MomentumOptimizer(0.2, 0.9), None),
        "corrected": in_graph(
            lambda: bps.DistributedOptimizer(
                momentum(),
                compression_params={
                    f"{name}:0": {"compressor": "topk", "k": k, "ef": "corrected"}
                    for name, k in (("w", 6), ("b", 1))
                },
            ),
            rank,
        ),
    }


def job_passes() -> Any:
    """Two passes per step: the gradients of two batches are summed and applied in every second
    call.
    """

    def twice(worker: int | None) -> np.ndarray:
        whole = data_of(worker)
        return whole.reshape(3, 2 * whole.shape[1], 6)

    rank = bps.rank()
    w, b = tf.Variable(np.linspace(-1, 1, 6, dtype=np.float32)), tf.Variable(np.float32(0.5))
    # the mean over the joined rows is half of the sum of two passes
    optimizer = v1.train.MomentumOptimizer(0.2, 0.9)
    for batch in twice(None):
        optimizer.minimize(
            lambda batch=batch: tf.reduce_mean(
                tf.square(tf.linalg.matvec(tf.constant(batch), w) + b - 1)
            ),
            var_list=[w, b],
        )
    made = lambda: bps.DistributedOptimizer(momentum(), backward_passes_per_step=2)  # noqa: E731
    return {
        "alone": (w.numpy(), b.numpy()),
        "graph": in_graph(made, rank),
        "eager": in_function(made, rank, False),
        "traced": in_function(made, rank, True),
    }


def job_refused() -> Any:
    told = []
    for call in (
        lambda: bps.DistributedOptimizer(momentum(), backward_passes_per_step=0),
        lambda: bps.DistributedOptimizer(bps.DistributedOptimizer(momentum())),
        lambda: bps.DistributedOptimizer(momentum(), op=bps.Adasum),
    ):
        try:
            call()
        except ConfigError as e:
            told.append(str(e))
    return told


def job_async() -> Any:
    """Each worker's steps reach the servers' weights exactly once, with every API.

    All workers start from worker 0's weights.
    """
    found = {}
    for way in ("keras", "keras eager", "v1", "v1 eager"):
        if way.startswith("keras"):
            model = mlp()
            model.set_weights([w * 0 + bps.rank() for w in model.get_weights()])
            optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0))

            def step(optimizer: Any = optimizer, model: Any = model) -> None:
                optimizer.apply(
                    [tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables
                )

            run = step if "eager" in way else tf.function(step)
            for _ in range(5):
                run()
            bps.barrier()
            optimizer.apply(
                [tf.zeros_like(v) for v in model.trainable_variables], model.trainable_variables
            )
            found[way] = [np.array(w).ravel()[0] for w in model.get_weights()]
        elif way == "v1":
            with tf.Graph().as_default(), v1.Session() as sess:
                w = v1.get_variable("async_w", initializer=np.float32(bps.rank()))
                scale = v1.placeholder(tf.float32, ())
                train = bps.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(
                    w * scale
                )
                sess.run(v1.global_variables_initializer())
                for _ in range(5):
                    sess.run(train, {scale: 1.0})
                bps.barrier()
                sess.run(train, {scale: 0.0})
                found[way] = [float(sess.run(w))]
        else:
            w = tf.Variable(np.float32(bps.rank()), name="eager w")
            optimizer = bps.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
            for _ in range(5):
                optimizer.minimize(lambda w=w: w * 1.0, var_list=[w])
            bps.barrier()
            optimizer.minimize(lambda w=w: w * 0.0, var_list=[w])
            found[way] = [float(w)]
    with tf.GradientTape() as tape:
        y = w * 2.0
    half = bps.Compression.fp16
    calls = [
        lambda: bps.DistributedGradientTape(tape).gradient(y, [w]),
        lambda: bps.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=half).apply(
            [tf.ones_like(w)], [w]
        ),
        lambda: bps.DistributedOptimizer(
            momentum(), compression_params={"compressor": "onebit"}
        ).apply_gradients([(tf.ones_like(w), w)]),
    ]
    found["refused"] = []
    for call in calls:
        try:
            call()
        except ConfigError as e:
            found["refused"].append(str(e))
    return found


JOBS = ["job_v1", "job_passes", "job_refused"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(__file__, JOBS, tmp_path_factory, WORKERS, BYTEPS_MIN_COMPRESS_BYTES="0")
    assert done.status == 0, done.output
    return done


# ---- expected results


def same(a: Any, b: Any, tolerance: float = 1e-5) -> bool:
    return all(
        np.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a[:2], b[:2], strict=True)
    )


LIKE = {
    "graph": "alone",
    "eager": "alone",
    "traced": "alone",
    "corrected": "alone",
    "sum": "half alone",
}


@pytest.mark.parametrize(("way", "like"), LIKE.items())
def test_v1_optimizers_train_as_one_worker_does_on_the_joined_batch(job, way, like):
    first, second = each(job, "job_v1")
    assert all(np.array_equal(a, b) for a, b in zip(first[way][:2], second[way][:2], strict=True))
    assert same(first[way], first[like], 1e-3 if way == "corrected" else 1e-5)
    if way != "eager" and way != "traced":
        assert first[way][2:] == first["alone"][2:]


@pytest.mark.parametrize("way", ["graph", "eager", "traced"])
def test_passes_are_added_up(job, way):
    for found in each(job, "job_passes"):
        assert same(found[way], found["alone"])
        if way == "graph":
            assert found[way][2] == 3  # global steps


def test_refused(job):
    for told in each(job, "job_refused"):
        assert [
            "backward_passes_per_step=0" in told[0],
            "distributed already" in told[1],
            "Adasum" in told[2],
        ] == [True] * 3


def test_asynchronous_training(tmp_path):
    done = run_job(__file__, ["job_async"], tmp_path, WORKERS, BYTEPS_ENABLE_ASYNC="1")
    assert done.status == 0, done.output
    for found in each(done, "job_async"):
        assert found["keras"] == found["keras eager"] == [-10.0] * 4
        assert found["v1"] == found["v1 eager"] == [-10.0]
        tape, *compressed = found["refused"]
        assert (
            "use DistributedOptimizer" in tape
            and len(compressed) == 2
            and all("compression_params cannot be used" in text for text in compressed)
        )


_WITHOUT_EAGER = """
    import numpy as np
    import tensorflow as tf
    import bpsx.tensorflow as bps

    v1 = tf.compat.v1
    # for the whole process, as in scripts of TensorFlow 1, which name no graph
    v1.disable_eager_execution()
    bps.init()
    batches = np.random.default_rng(0).normal(size=(6, 2, 4, 10)).astype(np.float32)


    def train(optimizer, fed):
        v1.reset_default_graph()
        x = v1.placeholder(tf.float32, (None, 10))
        w = v1.get_variable("w", initializer=np.ones((10, 1), np.float32))
        step = optimizer().minimize(tf.reduce_mean((x @ w - 1) ** 2))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for batch in fed:
                session.run(step, {x: batch.reshape(-1, 10)})
            return session.run(w)


    kinds = {
        "momentum": lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
        "adam": v1.train.AdamOptimizer,
    }
    for name, kind in kinds.items():
        # a factor cancels in Adam
        alone = train(
            lambda: kind(0.02 if name == "momentum" else 0.01), batches.reshape(3, -1, 10)
        )
        ours = train(
            lambda: bps.DistributedOptimizer(kind(0.01), backward_passes_per_step=2),
            batches[:, bps.rank()],
        )
        report(
            [
                name,
                bool(np.allclose(alone, ours, rtol=1e-5, atol=1e-6)),
                float(np.abs(ours - 1).max()) > 0.001,
            ]
        )
"""


def test_passes_of_optimizers_with_slots_where_eager_execution_is_off_for_good():
    with Job(_WITHOUT_EAGER, 2, 1, env=QUIET) as job:
        assert job.results() == [[["momentum", True, True], ["adam", True, True]]] * 2
