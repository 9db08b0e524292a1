"""bpsx.tensorflow.keras: optimizers under compile and fit, callbacks, saved models.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow_models import BATCH, data, joined, mlp, whole

from bpsx.api.verbs import session
from bpsx.errors import ConfigError
from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.keras
    import bpsx.tensorflow as bps
    import bpsx.tensorflow.keras as bpk

    LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        """Record the learning rate and the metrics."""

        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []
            self.logs: list[dict[str, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.rates.append(float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.logs.append(dict(logs))


WORKERS = 2
STEPS = 4


# ---- run in the workers


def weights(model: Any) -> list[np.ndarray]:
    return [np.array(w) for w in model.get_weights()]


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def fit(
    optimizer: Any,
    model: Any = None,
    callbacks: list[Any] | None = None,
    steps: int = STEPS,
    epochs: int = 1,
    **options: Any,
) -> Any:
    """Train ``epochs`` epochs on this worker's batches, in order."""
    model = model or mlp()
    model.compile(optimizer, LOSS, **options)
    inputs, labels = data(steps)
    x, y = inputs[:, bps.rank()].reshape(-1, 6), labels[:, bps.rank()].reshape(-1)
    model.fit(
        x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks or []
    )
    return model


def job_training() -> Any:
    """Train with fit from different weights: in a function, eagerly, several steps per execution,
    compiled.

    Compare with training alone on the joined batch.
    """
    found = {"alone": joined(STEPS)}
    ways = {
        "fit": {},
        "eagerly": {"run_eagerly": True},
        "steps": {"steps_per_execution": 2},
        "compiled": {"jit_compile": True},
    }
    for name, options in ways.items():
        model = mlp()
        if bps.rank() == 1:
            model.set_weights([w + 1 for w in model.get_weights()])
        model = fit(
            bpk.DistributedOptimizer(sgd()),
            model,
            [bpk.callbacks.BroadcastGlobalVariablesCallback(0)],
            **options,
        )
        found[name] = weights(model)
    found["fp16"] = weights(fit(bpk.DistributedOptimizer(sgd(), compression=bpk.Compression.fp16)))
    for name, more in (("topk", {}), ("corrected", {"ef": "corrected"})):
        model = mlp()
        found[name] = weights(
            fit(
                bps.DistributedOptimizer(
                    sgd(), compression_params=whole(model.trainable_variables, **more)
                ),
                model,
            )
        )
    return found


def alone_with(optimizer: Any, steps: int = STEPS) -> list[np.ndarray]:
    model = mlp()
    model.compile(optimizer, LOSS)
    inputs, labels = data(steps)
    model.fit(
        inputs.reshape(-1, 6),
        labels.reshape(-1),
        batch_size=BATCH * WORKERS,
        shuffle=False,
        verbose=0,
    )
    return weights(model)


def job_accumulation() -> Any:
    """Accumulate gradients of two steps with Keras' own option and with BytePS' option.

    Compare with one process, and count the gradients that were exchanged.
    """
    found = {"alone": alone_with(sgd(gradient_accumulation_steps=2, clipnorm=0.5))}
    for name, make in (
        (
            "native",
            lambda: bpk.DistributedOptimizer(sgd(gradient_accumulation_steps=2, clipnorm=0.5)),
        ),
        ("passes", lambda: bpk.DistributedOptimizer(sgd(clipnorm=0.5), backward_passes_per_step=2)),
    ):
        for way, options in (
            ("traced", {}),
            ("eager", {"run_eagerly": True}),
            ("compiled", {"jit_compile": True}),
        ):
            before = session().counters()["push_pulls"]
            found[f"{name} {way}"] = weights(fit(make(), **options))
            found[f"{name} {way} count"] = session().counters()["push_pulls"] - before
    return found


def job_overflow() -> Any:
    """With a loss scale, worker 1's gradients overflow in one step, which all workers then skip.

    The scale wraps the distributed optimizer, is wrapped by it, or comes from compile().
    """
    found = {}
    for name in ("outer", "inner", "compile"):
        model = mlp()
        if name == "compile":
            model.dtype_policy = keras.DTypePolicy("mixed_float16")
        inner = keras.optimizers.SGD(0.1)
        scaled = {
            "outer": lambda inner=inner: bpk.DistributedOptimizer(
                keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
            ),
            "inner": lambda inner=inner: keras.optimizers.LossScaleOptimizer(
                bpk.DistributedOptimizer(inner), initial_scale=4.0
            ),
            "compile": lambda inner=inner: bpk.DistributedOptimizer(inner),
        }[name]()
        model.compile(scaled, LOSS)
        inputs, labels = data(3)
        steps = []
        for i in range(3):
            x = inputs[i, bps.rank()] * (np.float32(1e38) if i == 1 and bps.rank() == 1 else 1)
            model.train_on_batch(
                x * (np.float32(1e5) if i == 1 and bps.rank() == 1 else 1), labels[i, bps.rank()]
            )
            steps.append(
                (weights(model), float(tf.convert_to_tensor(model.optimizer.dynamic_scale)))
            )
        found[name] = steps
    return found


def job_embedding() -> Any:
    """Sparse gradients in fit."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )

    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 50, (4, WORKERS, BATCH, 2)), rng.integers(0, 2, (4, WORKERS, BATCH))
    found = []
    for as_dense in (None, False, True):
        model = make()
        own = as_dense is not None
        model.compile(
            bpk.DistributedOptimizer(sgd(), sparse_as_dense=bool(as_dense)) if own else sgd(), LOSS
        )
        mine = (
            (x[:, bps.rank()].reshape(-1, 2), y[:, bps.rank()].reshape(-1))
            if own
            else (x.reshape(-1, 2), y.reshape(-1))
        )
        model.fit(*mine, batch_size=BATCH if own else BATCH * WORKERS, shuffle=False, verbose=0)
        found.append(weights(model))
    return found


def job_saved() -> Any:
    """Train, save, load on both workers and continue: the result equals training without a break.

    The file is a normal Keras file.
    """
    model = fit(bpk.DistributedOptimizer(keras.optimizers.Adam(0.01)), epochs=2)
    straight = weights(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        fit(bpk.DistributedOptimizer(keras.optimizers.Adam(0.01))).save(path)
        plain, loaded = keras.models.load_model(path), bpk.load_model(path)
        inputs, labels = data(STEPS)
        kinds = (
            type(plain.optimizer) is keras.optimizers.Adam,
            type(loaded.optimizer) is keras.optimizers.Adam,
            int(loaded.optimizer.iterations),
        )
        loaded.fit(
            inputs[:, bps.rank()].reshape(-1, 6),
            labels[:, bps.rank()].reshape(-1),
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
        )
    return straight, kinds, weights(loaded)


def job_callbacks() -> Any:
    named, found = bpk.callbacks, {}
    watch = Watch()
    fit(
        bpk.DistributedOptimizer(keras.optimizers.SGD(0.4)),
        epochs=3,
        callbacks=[named.LearningRateWarmupCallback(2, verbose=1), watch],
    )
    found["warmup"] = watch.rates
    watch = Watch()
    schedules = [
        named.LearningRateScheduleCallback(0.5, start_epoch=1, end_epoch=2),
        named.LearningRateScheduleCallback(lambda epoch: 0.1 * epoch, start_epoch=2),
    ]
    fit(
        bpk.DistributedOptimizer(keras.optimizers.SGD(0.4)), epochs=3, callbacks=[*schedules, watch]
    )
    found["schedule"] = watch.rates
    own, averaged = Watch(), Watch()
    fit(
        bpk.DistributedOptimizer(sgd()),
        callbacks=[own, named.MetricAverageCallback(), averaged],
        metrics=["accuracy"],
    )
    found["metrics"] = own.logs, averaged.logs
    momenta = []
    for corrected in (True, False):
        optimizer = bpk.DistributedOptimizer(sgd())
        model = fit(optimizer)
        before = [np.array(m) for m in optimizer.momentums]
        callback = named.LearningRateScheduleCallback(0.5, momentum_correction=corrected)
        callback.set_model(model)
        callback.set_params({"steps": 1})
        callback.on_train_begin()
        callback.on_epoch_begin(0)
        callback.on_train_batch_begin(0)
        momenta.append([np.array(m) / b for m, b in zip(optimizer.momentums, before, strict=True)])
    found["momenta"] = momenta
    return found


def job_auto() -> Any:
    """The meaning of jit_compile="auto" on a machine with a GPU, for a distributed and another
    optimizer.
    """
    real = tf.config.list_physical_devices
    tf.config.list_physical_devices = lambda kind=None: [
        *real(kind),
        tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU"),
    ]
    try:
        found = []
        for optimizer in (bpk.DistributedOptimizer(sgd()), sgd()):
            model = mlp()
            model.compile(optimizer, LOSS, jit_compile="auto")
            found.append(model.jit_compile)
        return found
    finally:
        tf.config.list_physical_devices = real


def job_refused() -> Any:
    calls: list[Any] = [
        lambda: bpk.DistributedOptimizer("sgd"),
        lambda: bpk.DistributedOptimizer(bpk.DistributedOptimizer(sgd())),
        lambda: bpk.DistributedOptimizer(sgd(), backward_passes_per_step=0),
        lambda: bpk.DistributedOptimizer(sgd(), op=bps.Adasum),
        lambda: bpk.DistributedOptimizer(
            sgd(gradient_accumulation_steps=3), backward_passes_per_step=2
        ),
        lambda: fit(
            bpk.DistributedOptimizer(sgd()),
            callbacks=[bpk.callbacks.BroadcastGlobalVariablesCallback(5)],
        ),
        lambda: bpk.DistributedOptimizer(sgd(), backward_passes_per_step=True),
        lambda: bpk.load_model("x.keras", custom_optimizers=["a"]),
        lambda: bpk.callbacks.BroadcastGlobalVariablesCallback("a"),
        lambda: bpk.callbacks.LearningRateScheduleCallback("0.1"),
        lambda: bpk.callbacks.LearningRateScheduleCallback(0.1, 3, 2),
        lambda: bpk.callbacks.LearningRateScheduleCallback(0.1, steps_per_epoch=-3),
        lambda: bpk.callbacks.LearningRateWarmupCallback("5"),
        lambda: bpk.callbacks.LearningRateWarmupCallback(initial_lr=-1.0),
        lambda: fit(
            keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
            callbacks=[bpk.callbacks.LearningRateScheduleCallback(0.5)],
        ),
    ]
    told = []
    for call in calls:
        try:
            call()
            told.append("")
        except ConfigError as e:
            told.append(str(e))
    return (
        told,
        bpk.push_pull(np.float32(bps.rank()), name="a number").tolist(),
        bpk.broadcast([1, bps.rank()], 1).tolist(),
    )


NAMES = [
    "Compression",
    "init",
    "shutdown",
    "suspend",
    "resume",
    "get_pushpull_speed",
    "size",
    "local_size",
    "rank",
    "local_rank",
    "Average",
    "Sum",
    "Adasum",
    "handle_average_backwards_compatibility",
]


def job_both_names() -> list[str]:
    """Return the names whose objects differ between bpsx.keras and bpsx.tensorflow.keras."""
    differ = [name for name in bpk.__all__ if getattr(bpsx.keras, name) is not getattr(bpk, name)]
    same_callback = (
        bpsx.keras.callbacks.MetricAverageCallback is bpk.callbacks.MetricAverageCallback
    )
    return differ if same_callback else [*differ, "MetricAverageCallback"]


def job_upstreams_arguments() -> dict[str, tuple[str, list[str]]]:
    """Compare the signatures of functions and classes with BytePS' (byteps/tensorflow,
    byteps/keras).
    """
    upstream = {
        bps.push_pull: (
            "tensor scope average device_dense device_sparse compression op enable_async"
        ),
        bps.broadcast: "tensor root_rank scope name is_variable",
        bps.broadcast_variables: "variables root_rank scope",
        bps.broadcast_global_variables: "root_rank",
        bps.BroadcastGlobalVariablesHook: "root_rank device",
        bps.DistributedOptimizer: (
            "optimizer name use_locking device_dense device_sparse compression sparse_as_dense"
            " backward_passes_per_step op"
        ),
        bps.DistributedGradientTape: (
            "gradtape device_dense device_sparse compression sparse_as_dense op"
        ),
        bpk.DistributedOptimizer: (
            "optimizer name device_dense device_sparse compression sparse_as_dense"
        ),
        bpk.push_pull: "value name average",
        bpk.broadcast: "value root_rank name",
        bpk.broadcast_global_variables: "root_rank",
        bpk.load_model: "filepath custom_optimizers custom_objects compression",
        bpk.callbacks.BroadcastGlobalVariablesCallback: "root_rank device",
        bpk.callbacks.MetricAverageCallback: "device",
        bpk.callbacks.LearningRateScheduleCallback: (
            "multiplier start_epoch end_epoch staircase momentum_correction steps_per_epoch"
            " initial_lr"
        ),
        bpk.callbacks.LearningRateWarmupCallback: (
            "warmup_epochs momentum_correction steps_per_epoch verbose initial_lr"
        ),
    }
    return {
        f"{f.__module__}.{f.__name__}": (wanted, list(inspect.signature(f).parameters))
        for f, wanted in upstream.items()
    }


def job_upstreams_other_names() -> tuple[list[str], list[str], bool, str]:
    """Return BytePS names that are missing, and the identity of some others."""
    missing = [name for name in NAMES if not hasattr(bps, name)]
    return (
        missing,
        list(bpk.__all__),
        bps.Compression.none is bpk.Compression.none,
        str(bps.ReduceOps.Sum),
    )


JOBS = [name for name in dir() if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(__file__, JOBS, tmp_path_factory, WORKERS, BYTEPS_MIN_COMPRESS_BYTES="0")
    assert done.status == 0, done.output
    return done


# ---- expected results


def same(a: list[np.ndarray], b: list[np.ndarray], tolerance: float = 1e-5) -> bool:
    return all(np.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True))


WAYS = {
    "fit": 1e-5,
    "eagerly": 1e-5,
    "steps": 1e-5,
    "compiled": 1e-5,
    "fp16": 3e-3,
    "topk": 1e-3,
    "corrected": 1e-3,
}


@pytest.mark.parametrize(("way", "tolerance"), WAYS.items())
def test_two_workers_train_as_one_does_on_the_joined_batch(job, way, tolerance):
    first, second = each(job, "job_training")
    assert all(np.array_equal(a, b) for a, b in zip(first[way], second[way], strict=True))
    assert same(first[way], first["alone"], tolerance)


def test_accumulated_gradients_travel_once(job):
    for found in each(job, "job_accumulation"):
        for name in ("native", "passes"):
            assert all(
                same(found[f"{name} {way}"], found["alone"])
                for way in ("traced", "eager", "compiled")
            )
            # The comparison of names happens once.
            assert (
                found[f"{name} traced count"]
                == found[f"{name} compiled count"]
                == 4 * STEPS // 2 + 1
            )
            # Each exchange also sends a vector that says which gradients exist; once, workers
            # exchange which are sparse.
            assert found[f"{name} eager count"] == 5 * STEPS // 2 + 2


@pytest.mark.parametrize("way", ["outer", "inner", "compile"])
def test_an_overflow_on_one_worker_skips_the_step_on_all(job, way):
    (first, a), (second, b), (third, c) = job.results[0]["job_overflow"][way]
    for (mine, scale), (theirs, other) in zip(
        job.results[0]["job_overflow"][way], job.results[1]["job_overflow"][way], strict=True
    ):
        assert scale == other and all(
            np.array_equal(x, y) for x, y in zip(mine, theirs, strict=True)
        )
    assert b == c == a / 2 and all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))
    assert not same(second, third, 1e-6)


def test_embeddings(job):
    for alone, sparse, dense in each(job, "job_embedding"):
        assert same(sparse, alone) and same(dense, alone)


def test_saved_and_loaded(job):
    for straight, kinds, loaded in each(job, "job_saved"):
        assert kinds == (True, False, STEPS) and same(loaded, straight)


def test_learning_rates(job):
    for found in each(job, "job_callbacks"):
        wanted = [0.4 / 2 * ((i + 1) / STEPS / 2 + 1) for i in range(2 * STEPS)]
        np.testing.assert_allclose(found["warmup"], [*wanted, *[0.4] * STEPS], rtol=1e-6)
        np.testing.assert_allclose(
            found["schedule"], [0.4] * STEPS + [0.2] * STEPS + [0.08] * STEPS, rtol=1e-6
        )
        corrected, left = found["momenta"]
        assert all(np.allclose(m, 0.5) for m in corrected) and all(np.allclose(m, 1) for m in left)
    assert "finished gradual learning rate warmup to 0.4" in job.output


def test_metrics_are_averaged(job):
    (own, averaged), (other, also) = (found["metrics"] for found in each(job, "job_callbacks"))
    assert averaged == also and own != other
    for name in ("loss", "accuracy"):
        assert averaged[0][name] == pytest.approx((own[0][name] + other[0][name]) / 2)


def test_jit_compile_auto_does_not_compile_exchanges_for_a_gpu(job):
    assert each(job, "job_auto") == [[False, True]] * 2


def test_refused(job):
    for told, number, values in each(job, "job_refused"):
        for text, part in zip(
            told,
            (
                "not str",
                "distributed already",
                "backward_passes_per_step=0",
                "Adasum",
                "that is 3",
                "expected 0 to 1",
                "backward_passes_per_step=True",
                "custom_optimizers contains 'a'",
                "root_rank='a'",
                "multiplier='0.1'",
                "end_epoch=2: expected a number from start_epoch=3",
                "steps_per_epoch=-3",
                "warmup_epochs='5'",
                "initial_lr=-1.0",
                "ExponentialDecay",
            ),
            strict=True,
        ):
            assert part in text
        assert number == 0.5 and values == [1, 1]


def test_bpsx_keras_and_bpsx_tensorflow_keras_have_the_same_names(job):
    assert each(job, "job_both_names") == [[]] * 2


def test_upstreams_arguments_are_in_the_same_order(job):
    for found in each(job, "job_upstreams_arguments"):
        for function, (wanted, arguments) in found.items():
            assert arguments[: len(wanted.split())] == wanted.split(), function


def test_upstreams_other_names(job):
    for missing, exported, compression, total in each(job, "job_upstreams_other_names"):
        assert missing == [] and compression and total == "Sum"
        assert {
            "Compression",
            "init",
            "shutdown",
            "size",
            "local_size",
            "rank",
            "local_rank",
            "callbacks",
        } <= set(exported)
