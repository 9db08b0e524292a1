"""Horovod's tapes, optimizers and callbacks on TensorFlow and Keras, compared with one process.

Functions named ``job_*`` run in two workers.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow_models import BATCH, data, joined, loss_of, mlp

from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.keras.horovod as hvd_k
    import bpsx.tensorflow.horovod as hvd
    import bpsx.tensorflow.keras.horovod as second_name

    LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

pytestmark = pytest.mark.timeout(300)
WORKERS = 2
STEPS = 4


def weights(model: Any) -> list[np.ndarray]:
    return [np.array(w) for w in model.get_weights()]


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


# ---- tapes


def trained(run_in_function: bool, **options: Any) -> list[np.ndarray]:
    """Train for STEPS steps with the loop of Horovod's examples and return the weights."""
    model, optimizer = mlp(), sgd()
    if hvd.rank() == 1:
        model.set_weights([w + 1 for w in model.get_weights()])
    hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(
            loss, model.trainable_variables, use_generic_names=not run_in_function
        )
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if run_in_function else step
    inputs, labels = data(STEPS)
    for x, y in zip(inputs, labels, strict=True):
        run(tf.constant(x[hvd.rank()]), tf.constant(y[hvd.rank()]))
    return weights(model)


def job_tape() -> Any:
    found = {"alone": joined(), "function": trained(True), "eager": trained(False)}
    found["predivided"] = trained(True, gradient_predivide_factor=2.0, num_groups=2)
    found["fp16"] = trained(True, compression=hvd.Compression.fp16)
    found["sum"] = trained(True, op=hvd.Sum, groups=3)
    return found


def job_local_sources() -> Any:
    """Gradients of local sources stay on the worker; scale_local_gradients divides them by two or
    not.
    """
    shared, own, factor = tf.Variable([1.0]), tf.Variable([2.0]), hvd.rank() + 1.0
    found = []
    for scale in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared * own) * factor
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, scale_local_gradients=scale)
        tape.register_local_source(own)
        local, others = tape.get_local_and_global_gradients(loss, [shared, own])
        assert local[0][0] is own and others[0][0] is shared
        found.append([float(local[0][1][0]), float(others[0][1][0])])
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 2]) * factor)) + tf.reduce_sum(shared * factor)
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    gradients = tape.gradient(loss, [*layer.trainable_variables, shared])
    found.append([float(gradients[0][0, 0]), float(gradients[1][0])])
    return found


def job_failing_tape() -> Any:
    """The workers' variables differ: hvd.HorovodInternalError catches the error."""
    variable = tf.Variable(tf.ones([hvd.rank() + 1]), name="differs")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * variable)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.DistributedGradientTape(tape).gradient(loss, [variable])
    return type(caught.value).__name__, str(caught.value)


# ---- Keras


def fit(
    optimizer: Any, model: Any = None, callbacks: Any = (), epochs: int = 1, **options: Any
) -> Any:
    model = model or mlp()
    model.compile(optimizer, LOSS, **options)
    inputs, labels = data(STEPS)
    x, y = inputs[:, hvd.rank()].reshape(-1, 6), labels[:, hvd.rank()].reshape(-1)
    model.fit(
        x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


def alone(optimizer: Any, model: Any = None) -> list[np.ndarray]:
    """Train one epoch on the joined batches of both workers and return the weights."""
    model = model or mlp()
    model.compile(optimizer, LOSS)
    inputs, labels = data(STEPS)
    x, y = inputs.reshape(-1, 6), labels.reshape(-1)
    model.fit(x, y, batch_size=BATCH * WORKERS, shuffle=False, verbose=0)
    return weights(model)


def job_fit() -> Any:
    found = {"alone": joined()}
    model = mlp()
    if hvd.rank() == 1:
        model.set_weights([w + 1 for w in model.get_weights()])
    start = [hvd_k.callbacks.BroadcastGlobalVariablesCallback(0)]
    found["fit"] = weights(fit(hvd_k.DistributedOptimizer(sgd()), model, start))
    found["through hvd"] = weights(
        fit(hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=2.0))
    )
    found["sum"] = weights(
        fit(hvd_k.DistributedOptimizer(keras.optimizers.SGD(0.05, 0.9), op=hvd.Sum))
    )
    twice = hvd_k.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    mean = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    found["passes"], found["mean of passes"] = weights(fit(twice)), weights(fit(mean))
    found["alone, mean"] = alone(sgd(gradient_accumulation_steps=2))
    found["alone, sum"] = alone(keras.optimizers.SGD(0.2, 0.9, gradient_accumulation_steps=2))
    return found


def job_partial() -> Any:
    """The last layer is local to each worker, also in a shallow copy; deep copies are rejected."""
    model = mlp()
    local = model.layers[-1]
    optimizer = hvd_k.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[local])
    model = fit(optimizer, model)
    shallow = copy.copy(optimizer)
    assert shallow._bpsx_exchange.is_local(local.kernel)
    said = pytest.raises(ValueError, lambda: copy.deepcopy(optimizer))
    everything = fit(hvd_k.PartialDistributedOptimizer(sgd()))
    return weights(model), weights(everything), joined(), str(said.value)


class Watch:
    """Record the learning rate of each batch and Keras' logs."""

    def __new__(cls) -> Any:
        class Watching(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_begin(self, logs: Any = None) -> None:
                self.rates, self.logs = [], []

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.rates.append(round(float(self.model.optimizer.learning_rate), 6))

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.logs.append(dict(logs))

        return Watching()


def job_callbacks() -> Any:
    rates, own = Watch(), tf.Variable([float(hvd.rank())])
    decay = hvd_k.callbacks.LearningRateScheduleCallback(
        0.1, 0.5, start_epoch=1, momentum_correction=False
    )
    means = hvd_k.callbacks.MetricAverageCallback()
    fit(hvd_k.DistributedOptimizer(sgd()), None, [decay, means, rates], epochs=3)
    warm, said = Watch(), io.StringIO()
    warmup = hvd_k.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1)
    with contextlib.redirect_stdout(said):
        fit(hvd_k.DistributedOptimizer(sgd()), None, [warmup, warm], epochs=3)
    model = mlp()
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    model.trainable = False
    kept = model.layers[0].kernel
    start = hvd_k.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kept, own])
    before = weights(model)
    model.compile(hvd_k.DistributedOptimizer(sgd()), LOSS)
    start.set_model(model)
    start.on_train_begin()
    best = hvd_k.callbacks.BestModelCheckpoint(monitor="loss")
    with tempfile.TemporaryDirectory() as folder:
        missing = pytest.raises(
            ValueError, lambda: fit(hvd_k.DistributedOptimizer(sgd()), None, [best])
        )
        best.filepath = str(Path(folder, "best.keras"))
        fit(hvd_k.DistributedOptimizer(sgd()), None, [best])
        loaded = hvd_k.load_model(best.filepath, compression=hvd_k.Compression.fp16)
    assert hasattr(loaded.optimizer, "register_local_var")
    changed = [np.array_equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    logs = [(log["lr"], log["loss"]) for log in rates.logs]
    return rates.rates, logs, warm.rates, said.getvalue(), changed, str(missing.value)


def job_verbs() -> Any:
    rank = hvd.rank()
    assert [getattr(hvd_k, name) is getattr(second_name, name) for name in hvd_k.__all__]
    assert hvd.keras is second_name
    found = [
        hvd_k.allreduce([1.0, rank]),
        hvd_k.allreduce(rank + 1, op=hvd.Sum, name="n"),
        hvd_k.allgather([rank]),
        hvd_k.broadcast([rank], 1),
        hvd_k.reducescatter([rank, 4.0]),
    ]
    return [tensor.numpy().tolist() for tensor in found]


def job_batch_norm() -> Any:
    """Statistics, outputs and gradients equal those of the joined batch; also saved and loaded."""
    x = np.random.default_rng(3).normal(size=(WORKERS, 5, 3)).astype(np.float32)
    results = []
    for layer, given in (
        (hvd.SyncBatchNormalization(), x[hvd.rank()]),
        (keras.layers.BatchNormalization(), x.reshape(-1, 3)),
    ):
        value = tf.constant(given)
        with tf.GradientTape() as tape:
            tape.watch(value)
            out = layer(value, training=True)
            loss = tf.reduce_sum(out * out * tf.cast(tf.range(3), tf.float32) + value * out)
        results.append(
            [
                out.numpy(),
                tape.gradient(loss, value).numpy(),
                np.array(layer.moving_mean),
                np.array(layer.moving_variance),
            ]
        )
    copied = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    again = keras.saving.serialize_keras_object(hvd.SyncBatchNormalization(name="n"))
    synced = keras.saving.deserialize_keras_object(again)
    assert type(copied) is keras.layers.BatchNormalization
    assert type(synced) is hvd.SyncBatchNormalization and synced.name == "n"
    return results


# ---- TensorFlow 1 optimizers


def job_v1() -> Any:
    """Sums and means of two passes, with one local variable."""
    v1, found = tf.compat.v1, {}
    for name, options in (("sum", {}), ("mean", {"average_aggregated_gradients": True})):
        with tf.Graph().as_default(), v1.Session() as session:
            shared, own = (
                v1.get_variable("shared", initializer=0.0),
                v1.get_variable("own", initializer=0.0),
            )
            loss = (shared + own) * (hvd.rank() + 1.0)
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, **options
            )
            optimizer.register_local_var(own)
            step = optimizer.minimize(loss)
            session.run(v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))
            for _ in range(2):
                session.run(step)
            found[name] = session.run([shared, own])
    return {name: [float(v) for v in values] for name, values in found.items()}


JOBS = [name for name in dir() if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(__file__, JOBS, tmp_path_factory, WORKERS)
    assert done.status == 0, done.output[-5000:]
    return done


def near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_tapes_train_as_one_process(job: Finished) -> None:
    for found in each(job, "job_tape"):
        for way in ("function", "eager", "predivided"):
            near(found[way], found["alone"])
        near(found["fp16"], found["alone"], 2e-3)
        assert not np.allclose(found["sum"][0], found["alone"][0])
    first, second = each(job, "job_tape")
    near(first["sum"], second["sum"], 0)


def test_local_sources(job: Finished) -> None:
    for rank, found in enumerate(each(job, "job_local_sources")):
        # The gradient of the worker's own variable is rank + 1; that of the shared one is 2 (1 +
        # 2).
        own = rank + 1.0
        assert found == [[own / 2, 6.0], [own, 6.0], [own / 2, 1.5]]


def test_failing_gradients(job: Finished) -> None:
    for name, text in each(job, "job_failing_tape"):
        assert name == "MismatchError" and "differs" in text


def test_fit_trains_as_one_process(job: Finished) -> None:
    for found in each(job, "job_fit"):
        for way in ("fit", "through hvd", "sum"):
            near(found[way], found["alone"])
        near(found["mean of passes"], found["alone, mean"])
        near(found["passes"], found["alone, sum"])


def test_partial_optimizer(job: Finished) -> None:
    (first, everything, whole, said), (second, *_) = each(job, "job_partial")
    near(first[:2], second[:2], 0)
    near(everything, whole)
    assert not np.allclose(first[2], second[2]) and "neither pickled nor deeply copied" in said


def test_callbacks(job: Finished) -> None:
    told = each(job, "job_callbacks")
    for rank, (rates, logs, warm, said, changed, missing) in enumerate(told):
        assert rates == [0.1] * 8 + [0.05] * 4
        assert [rate for rate, _ in logs] == pytest.approx([0.1, 0.1, 0.05])
        assert logs == told[0][1], "metrics are averages"
        assert warm == pytest.approx(
            [0.1125, 0.125, 0.1375, 0.15, 0.1625, 0.175, 0.1875] + [0.2] * 5
        )
        assert ("finished gradual learning rate warmup to 0.2" in said) == (rank == 0)
        assert changed == [True] + [rank == 0] * 3 and "Set its filepath" in missing


def test_verbs_on_values(job: Finished) -> None:
    for rank, found in enumerate(each(job, "job_verbs")):
        assert found == [[1.0, 0.5], 3, [0, 1], [1], [[0.5], [4.0]][rank]]


def test_batch_normalization_is_of_all_workers(job: Finished) -> None:
    for rank, (synced, whole) in enumerate(each(job, "job_batch_norm")):
        mine = slice(5 * rank, 5 * rank + 5)
        near(synced, [whole[0][mine], whole[1][mine], whole[2], whole[3]])


def test_optimizers_of_tensorflow_1(job: Finished) -> None:
    for rank, found in enumerate(each(job, "job_v1")):
        assert found == {"sum": [-3.0, -(rank + 1.0)], "mean": [-1.5, -(rank + 1.0) / 2]}
