"""DistributedGradientTape. ``job_*`` functions run in the workers."""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest
from tensorflow_models import data, joined, loss_of, mlp, whole

from bpsx.api.verbs import session
from bpsx.errors import ConfigError
from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import tensorflow as tf

    import bpsx.tensorflow as bps

WORKERS = 2
#: Steps during which memory use must not grow.
MANY = 10_000


# ---- run in the workers


def _train(
    traced: bool, steps: int = 4, compiled: bool = False, compressed: bool = False, **options: Any
) -> list[np.ndarray]:
    import keras

    model, optimizer = mlp(), keras.optimizers.SGD(0.1, momentum=0.9)
    if compressed:
        options["compression_params"] = whole(model.trainable_variables, ef="vanilla")
    if bps.rank() == 1:
        model.set_weights([w + 1 for w in model.get_weights()])
    bps.broadcast_variables(model.variables, 0)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = bps.DistributedGradientTape(tape, **options)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    run = tf.function(step, jit_compile=compiled or None) if traced else step
    inputs, labels = data(steps)
    for x, y in zip(inputs, labels, strict=True):
        run(tf.constant(x[bps.rank()]), tf.constant(y[bps.rank()]))
    return [np.array(w) for w in model.get_weights()]


def job_training() -> Any:
    return {
        "alone": joined(),
        "eager": _train(False),
        "traced": _train(True),
        "fp16": _train(True, compression=bps.Compression.fp16),
        "summed": _train(False, op=bps.Sum),
        "topk": _train(True, compressed=True),
        "compiled": _train(True, compiled=True),
        "compiled fp16": _train(True, compiled=True, compression=bps.Compression.fp16),
    }


def job_structures() -> Any:
    """Nested sources, a persistent tape, and tapes made distributed before and during recording."""
    a, b = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    factor = bps.rank() + 1.0
    found = []
    with bps.DistributedGradientTape(tf.GradientTape(persistent=True), op=bps.Sum) as tape:
        loss = tf.reduce_sum(a * a) * b * factor
        other = b * b * factor
    found.append(
        [
            tape.gradient(loss, {"x": a, "y": (b,)}),
            tape.gradient(other, [b]),
            tape.gradient(loss, b),
        ]
    )
    assert isinstance(tape, tf.GradientTape)
    with tf.GradientTape() as tape:
        x = tf.constant(2.0)
        tape.watch(x)
        tape = bps.DistributedGradientTape(tape, op="Sum")
        loss = x * x * factor
        with tape.stop_recording():
            loss + 1
    found.append(tape.gradient(loss, [x]))
    with tf.GradientTape() as plain:
        loss = a * factor
    bps.DistributedGradientTape(plain)
    found.append(plain.gradient(loss, a))  # the original tape is unchanged
    return tf.nest.map_structure(lambda t: t.numpy(), found)


def job_none() -> Any:
    """Gradients that only one worker has, or none; also traced in a function."""
    used, ours, unused = (
        tf.Variable([1.0, 2.0], name="used"),
        tf.Variable([3.0, 4.0], name="ours"),
        tf.Variable(5.0, name="unused"),
    )

    def step(mine: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used) + (tf.reduce_sum(ours * 2) if mine else 0.0)
        return bps.DistributedGradientTape(tape).gradient(loss, [used, ours, unused])

    eager, traced = step(bps.rank() == 0), tf.function(step)(True)
    return [[None if g is None else g.numpy() for g in gradients] for gradients in (eager, traced)]


def job_sparse() -> Any:
    """Exchange the gradient of an embedding as rows and as a dense tensor."""
    table, bias = tf.Variable(tf.ones((6, 2)), name="table"), tf.Variable([0.0, 0.0], name="bias")

    def step(as_dense: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [bps.rank(), 4]) + bias)
        return bps.DistributedGradientTape(tape, sparse_as_dense=as_dense).gradient(
            loss, [table, bias]
        )

    found = []
    for run in (step, tf.function(step)):
        rows, dense = run(False), run(True)
        assert isinstance(rows[0], tf.IndexedSlices) and not isinstance(dense[0], tf.IndexedSlices)
        found.append(
            [tf.convert_to_tensor(g).numpy() for g in (rows[0], dense[0], rows[1], dense[1])]
        )
    compiled = tf.function(step, jit_compile=True)
    found.append(
        [
            tf.convert_to_tensor(g).numpy()
            for g in (compiled(False)[0], compiled(True)[0], compiled(False)[1], compiled(True)[1])
        ]
    )
    return found


def job_sparse_join() -> Any:
    """Worker 1 joins after two steps, worker 0 makes four: eagerly and in a function."""
    found = []
    for traced in (False, True):
        table = tf.Variable(tf.zeros((6, 2)), name=f"uneven_{traced}")

        def step(i: Any, table: Any = table) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [i]))
            gradient = bps.DistributedGradientTape(tape).gradient(loss, table)
            assert isinstance(gradient, tf.IndexedSlices)
            table.assign_sub(tf.convert_to_tensor(gradient))

        run = tf.function(step) if traced else step
        for i in range(2 if bps.rank() else 4):
            run(tf.constant(i))
        last = bps.join()
        found.append((last, table.numpy()[:, 0].tolist()))
    return found


def job_same_names() -> Any:
    """Variables of one name get their own gradients, from both of two tapes in one function."""
    variables = [tf.Variable([float(i)], name="same") for i in range(3)]

    @tf.function
    def step() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            one = sum(tf.reduce_sum(v * v) for v in variables)
            two = sum(tf.reduce_sum(v) * i for i, v in enumerate(variables))
        tape = bps.DistributedGradientTape(tape)
        return tape.gradient(one, variables), tape.gradient(two, variables)

    first = [[float(g[0]) for g in part] for part in step()]
    names = {n for n in session().order if n.startswith("Gradient.same")}
    return first, names


def job_error_feedback() -> Any:
    """Residuals of one step are sent in the next, although that uses another tape."""
    v = tf.Variable(tf.zeros(8), name="fed back")

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * tf.constant([5.0, 4.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0]))
        return bps.DistributedGradientTape(
            tape, compression_params={"compressor": "topk", "k": 1, "ef": "vanilla"}
        ).gradient(loss, v)

    return [run().numpy().tolist() for run in (step, step, step, tf.function(step))]


def job_refused() -> Any:
    told = []
    for options in (
        {"op": bps.Adasum},
        {"compression": int},
        {"compression": bps.Compression.fp16, "compression_params": {"compressor": "onebit"}},
    ):
        try:
            bps.DistributedGradientTape(tf.GradientTape(), **options)
        except ConfigError as e:
            told.append(str(e))
    v = tf.Variable([1.0], name="v")
    for params in ({"compressor": "zip"}, {"nobody": {"compressor": "onebit"}}):
        with tf.GradientTape() as tape:
            loss = v * 2
        try:
            bps.DistributedGradientTape(tape, compression_params=params).gradient(loss, [v])
        except ConfigError as e:
            told.append(str(e))
    return told


def job_memory() -> Any:
    """Return the growth of the process over many steps, traced and eager, in KiB."""
    variables = [tf.Variable(tf.ones(2000), name=f"memory {i}") for i in range(4)]

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * x) for v in variables)
        return bps.DistributedGradientTape(tape).gradient(loss, variables)

    traced, found = tf.function(step), []
    for run, steps in ((traced, MANY), (step, MANY // 10)):
        before = 0
        for i in range(steps + 300):
            if i == 300:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            run(tf.constant(float(i)))
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return found


JOBS = [name for name in dir() if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(__file__, JOBS, tmp_path_factory, WORKERS, BYTEPS_MIN_COMPRESS_BYTES="0")
    assert done.status == 0, done.output
    return done


# ---- expected results


@pytest.mark.parametrize(
    ("way", "tolerance"),
    [
        ("eager", 1e-5),
        ("traced", 1e-5),
        ("fp16", 3e-3),
        ("topk", 1e-3),
        ("compiled", 1e-5),
        ("compiled fp16", 3e-3),
    ],
)
def test_two_workers_train_as_one_does_on_the_joined_batch(job, way, tolerance):
    first, second = (found[way] for found in each(job, "job_training"))
    for a, b, alone in zip(first, second, job.results[0]["job_training"]["alone"], strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, alone, rtol=tolerance, atol=tolerance)


def test_sums_are_not_averages(job):
    found = job.results[0]["job_training"]
    assert (
        max(np.abs(a - b).max() for a, b in zip(found["summed"], found["eager"], strict=True))
        > 1e-2
    )


def test_structures_and_tapes(job):
    for rank, ((first, other, last), watched, plain) in enumerate(each(job, "job_structures")):
        assert first["x"].tolist() == [18, 36] and first["y"][0] == 15 and last == 15
        assert other[0] == 18 and watched[0] == 12
        assert plain.tolist() == [rank + 1.0] * 2


def test_missing_gradients_are_zeros_or_none(job):
    for eager, traced in each(job, "job_none"):
        assert [None if g is None else g.tolist() for g in eager] == [[1, 1], [1, 1], None]
        assert [None if g is None else g.tolist() for g in traced] == [[1, 1], [2, 2], None]


def test_an_embeddings_gradient_is_right_as_rows_and_dense(job):
    wanted = np.zeros((6, 2))
    wanted[[0, 1, 4]] = [[0.5], [0.5], [1]]
    for found in each(job, "job_sparse"):
        for rows, dense, bias, bias_again in found:
            np.testing.assert_array_equal(rows, wanted)
            np.testing.assert_array_equal(dense, wanted)
            assert bias.tolist() == bias_again.tolist() == [2, 2]


def test_a_worker_that_has_joined_has_no_rows(job):
    first, second = each(job, "job_sparse_join")
    assert first == [(0, [-1, -1, -0.5, -0.5, 0, 0])] * 2
    assert second == [(0, [-1, -1, 0, 0, 0, 0])] * 2


def test_variables_of_one_name_get_separate_gradients(job):
    for (one, two), names in each(job, "job_same_names"):
        assert one == [0, 2, 4] and two == [0, 1, 2]
        assert names == {"Gradient.same:0", "Gradient.same:0#2", "Gradient.same:0#3"}


def test_residuals_carry_over_from_tape_to_tape(job):
    # Gradient plus residual, then its largest element, which is sent: 5 4 3 2 -> 5; 5 8 6 4 -> 8;
    # 10 4 9 6 -> 10; 5 8 12 8 -> 12.
    for found in each(job, "job_error_feedback"):
        assert found == [[5] + [0] * 7, [0, 8] + [0] * 6, [10] + [0] * 7, [0, 0, 12] + [0] * 5]


def test_refused(job):
    for told in each(job, "job_refused"):
        assert len(told) == 5
        for text, part in zip(
            told,
            ("Adasum", "compression=", "give only one of them", "'zip'", "nobody"),
            strict=True,
        ):
            assert part in text


def test_memory_stays_flat(job):
    for traced, eager in each(job, "job_memory"):
        assert traced < 8 * 1024 and eager < 8 * 1024, (traced, eager)
