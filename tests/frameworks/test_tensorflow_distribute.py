"""MirroredStrategy with two devices in each of two workers. ``job_*`` functions run there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorflow_models import BATCH, data, joined, mlp

from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.tensorflow as bps
    from bpsx.tensorflow.distribute import CrossDeviceOps, MirroredStrategy
    from bpsx.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback


WORKERS = 2
STEPS = 4


def two_devices() -> list[str]:
    (cpu,) = tf.config.list_physical_devices("CPU")
    if not tf.config.get_logical_device_configuration(cpu):
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
    return ["CPU:0", "CPU:1"]


def job_fit() -> Any:
    """Keras' fit on four devices, each with a quarter of the batch."""
    found = {}
    two_devices()
    ways = {
        "plain": None,
        "fp16": CrossDeviceOps(compression=bps.Compression.fp16),
        "wrapped": tf.distribute.HierarchicalCopyAllReduce(),
    }
    for name, ops in ways.items():
        strategy = MirroredStrategy(two_devices(), ops)
        with strategy.scope():
            model = mlp()
            if bps.rank() == 1:
                model.set_weights([w + 1 for w in model.get_weights()])
            model.compile(
                keras.optimizers.SGD(0.1, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        inputs, labels = data(STEPS)
        x, y = inputs[:, bps.rank()].reshape(-1, 6), labels[:, bps.rank()].reshape(-1)
        model.fit(
            x,
            y,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            callbacks=[BroadcastGlobalVariablesCallback(0)],
        )
        found[name] = [np.array(w) for w in model.get_weights()]
    found["alone"] = joined(STEPS)
    return found


def job_loop() -> Any:
    """A training loop of the script; a reduction within one worker does not involve the other."""
    strategy = MirroredStrategy(two_devices())
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])

    @tf.function
    def step() -> Any:
        def replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            gradient = tf.ones(2) * tf.cast(
                context.replica_id_in_sync_group + 1 + 10 * bps.rank(), tf.float32
            )
            (total,) = context.all_reduce("MEAN", [gradient])
            v.assign_sub(total)
            return total

        return strategy.run(replica)

    results = [r.numpy().tolist() for r in strategy.experimental_local_results(step())]
    alone = (
        float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None))
        if bps.rank() == 1
        else 2.0
    )
    return results, v.numpy().tolist(), alone


def job_compressed() -> Any:
    """Two networks, of gradients 1 and 0, each with a strategy that keeps a momentum."""
    params = {"compressor": "onebit", "momentum": "nesterov", "mu": 0.5}
    found = []

    def stepper(gradient: float) -> Any:
        ops = CrossDeviceOps(compression_params=params)
        strategy = MirroredStrategy(two_devices(), ops)

        def replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            (mean,) = context.all_reduce("MEAN", [tf.fill([2], gradient)])
            return mean

        @tf.function
        def step() -> Any:
            return strategy.experimental_local_results(strategy.run(replica))[0]

        return step

    steps = [stepper(1.0), stepper(0.0)]
    for step in steps * 3:
        found.append(step().numpy().tolist())
    return found


def job_overflow() -> Any:
    """mixed_float16: in the third of six steps a gradient overflows, only on worker 1's second
    device.
    """
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with MirroredStrategy(two_devices()).scope():
            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")]
            )
            model.compile(
                keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(0.01), initial_scale=4.0, dynamic_growth_steps=100
                ),
                "mse",
            )
    finally:
        keras.mixed_precision.set_global_policy("float32")
    x = np.random.default_rng(3 + bps.rank()).normal(size=(6 * BATCH, 6)).astype(np.float32)
    if bps.rank() == 1:
        x[3 * BATCH - 1] = 1e30
    scales = []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(
            float(model.optimizer.dynamic_scale.numpy())
        )
    )
    model.fit(
        x,
        x[:, :1] * 0,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[BroadcastGlobalVariablesCallback(0), noted],
    )
    return (
        scales,
        int(model.optimizer.iterations.numpy()),
        [np.array(w) for w in model.get_weights()],
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    jobs = ["job_fit", "job_loop", "job_compressed", "job_overflow"]
    done = run_job(__file__, jobs, tmp_path_factory, WORKERS)
    assert done.status == 0, done.output
    return done


@pytest.mark.parametrize(("way", "tolerance"), [("plain", 1e-5), ("wrapped", 1e-5), ("fp16", 3e-3)])
def test_fit_trains_as_one_device_does_on_the_joined_batch(job, way, tolerance):
    first, second = each(job, "job_fit")
    for a, b, alone in zip(first[way], second[way], first["alone"], strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, alone, rtol=tolerance, atol=tolerance)


def test_a_training_loop_of_the_script(job):
    # The mean of 1 and 2 on worker 0, and of 11 and 12 on worker 1.
    for results, variable, alone in each(job, "job_loop"):
        assert results == [[6.5, 6.5]] * 2 and variable == [-5.5, -4.5] and alone == 2


def test_an_overflow_on_one_device_is_one_everywhere(job):
    first, second = each(job, "job_overflow")
    for scales, steps, _ in (first, second):
        assert scales == [4, 4, 2, 2, 2, 2] and steps == 5
    for a, b in zip(first[2], second[2], strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()


def test_each_strategy_has_compression_state_of_its_own(job):
    """m = m / 2 + g, and g + m / 2 is applied: 1.5, 1.75, 1.875; and 0 for the other network."""
    for found in each(job, "job_compressed"):
        assert found[0::2] == [[1.5] * 2, [1.75] * 2, [1.875] * 2]
        assert found[1::2] == [[0.0] * 2] * 3
