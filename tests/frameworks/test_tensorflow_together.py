"""Two features of Keras or TensorFlow at once, with a distributed optimizer or tape.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from typing import Any

import numpy as np
import pytest

from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx
    import bpsx.keras.horovod as hvd
    import bpsx.tensorflow as bps
    import bpsx.tensorflow.keras as bpk

WORKERS = 2


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(1.0, **options)


def stepper(optimizer: Any, variables: list[Any], traced: bool) -> Any:
    """Return a function that applies the gradients of the variables."""

    def apply(*gradients: Any) -> None:
        optimizer.apply(list(gradients), variables)

    return tf.function(apply) if traced else apply


def job_accumulated() -> Any:
    """Gradients are added up over two steps, and the loss was scaled; of workers 1 and 2 times."""
    found: dict[str, Any] = {}
    mine = bps.rank() + 1.0
    for name, traced in (("eager", False), ("traced", True)):
        weight = keras.Variable([0.0], name=f"scaled {name}")
        highest = keras.Variable([0.0], name=f"highest {name}")
        highest.overwrite_with_gradient = True
        optimizer = bps.DistributedOptimizer(
            sgd(loss_scale_factor=8.0, gradient_accumulation_steps=2)
        )
        optimizer.build([weight, highest])
        run = stepper(optimizer, [weight, highest], traced)
        for gradient, seen in ((1.0, 7.0), (3.0, 5.0)):
            run(tf.constant([8 * gradient * mine]), tf.constant([seen]))
        found[name] = [float(keras.ops.convert_to_numpy(v)[0]) for v in (weight, highest)]
    return found


def job_tapes() -> Any:
    """Two distributed tapes are made of one."""
    x = tf.Variable([1.0])
    with tf.GradientTape(persistent=True) as tape:
        loss = x * (bps.rank() + 1.0)
    mean = bps.DistributedGradientTape(tape)
    total = bps.DistributedGradientTape(tape, op=bps.Sum)
    return [float(made.gradient(loss, x)[0]) for made in (mean, total, mean)]


def job_losses() -> Any:
    """One optimizer of TensorFlow 1 minimizes two losses in turn, each in two passes."""
    first, second = tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")
    optimizer = bps.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
    )
    for _ in range(4):
        optimizer.minimize(lambda: first * (bps.rank() + 1.0), var_list=[first])
        optimizer.minimize(lambda: second * 2.0, var_list=[second])
    return [float(first), float(second)]


def job_loaded() -> Any:
    """Train, save, load, and train on: the weight moves as far as before."""
    ours = {"op": bps.Sum}
    ways: dict[str, Any] = {
        "sum": (lambda: bpk.DistributedOptimizer(sgd(), **ours), bpk.load_model, ours, 1),
        "passes": (
            lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2),
            hvd.load_model,
            {},
            2,
        ),
        "averaged": (
            lambda: hvd.DistributedOptimizer(
                sgd(), backward_passes_per_step=2, average_aggregated_gradients=True
            ),
            hvd.load_model,
            {"average_aggregated_gradients": True},
            2,
        ),
    }
    found = {}
    for name, (make, load, options, passes) in ways.items():
        layers = [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, name=f"loaded_{name}")]
        model, values = keras.Sequential(layers), []
        model.set_weights([np.zeros((1, 1), np.float32)])
        model.compile(make(), "mae")
        for _ in range(2):
            for _ in range(passes):  # the loss is the weight and a constant, its gradient 1
                model.train_on_batch(np.ones((1, 1)), np.full((1, 1), -1000.0))
            values.append(float(model.get_weights()[0][0, 0]))
            with tempfile.TemporaryDirectory() as folder:
                model.save(f"{folder}/model.keras")
                model = load(f"{folder}/model.keras", **options)
        found[name] = values
    return found


def job_local_overflow() -> Any:
    """In the second of three steps the gradient of a local variable overflows on one worker."""
    found = {}
    for name, traced in (("eager", False), ("traced", True)):
        shared = keras.Variable([0.0], name=f"shared {name}")
        local = keras.Variable([0.0], name=f"local {name}")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)
        )
        optimizer.register_local_var(local)
        optimizer.build([shared, local])
        run = stepper(optimizer, [shared, local], traced)
        for step in range(3):
            own = np.inf if step == 1 and bps.rank() == 0 else 1.0
            run(optimizer.scale_loss(tf.constant([1.0])), optimizer.scale_loss(tf.constant([own])))
        scale = float(tf.convert_to_tensor(optimizer.dynamic_scale))
        found[name] = [float(keras.ops.convert_to_numpy(v)[0]) for v in (shared, local)], scale
    return found


def job_loops() -> Any:
    """Calls without a name in a loop and a branch; one worker has made other tensors before."""
    for _ in range(bps.rank() * 7):
        tf.constant(0.0)

    @tf.function
    def total(n: Any) -> Any:
        found = 0.0
        for i in tf.range(n):
            if i > 0:
                found += bps.push_pull(tf.cast(i, tf.float32), average=False)
            found += bps.push_pull(tf.constant([1.0, 2.0]), average=False)[1]
        for _ in tf.range(2):
            found += bps.push_pull(tf.constant(10.0), average=False)
        return found

    return float(total(tf.constant(3)))


def job_charges() -> Any:
    """Two optimizers of one variable, in turn: A, B, A; then a tape, with one of them alive."""
    params = {"compressor": "onebit", "ef": "vanilla"}
    told, found = [], {}
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bpsx.plugin").addHandler(handler)

    def gradient(variable: Any) -> float:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(3.0 * variable)
        return float(bps.DistributedGradientTape(tape).gradient(loss, [variable])[0][0])

    for name, *given in (("none", None, None), ("one", None, params), ("both", params, params)):
        for traced in (False, True):
            weight = keras.Variable([0.0], name=f"shared of {name}")
            first, second = (
                stepper(bps.DistributedOptimizer(sgd(), compression_params=p), [weight], traced)
                for p in given
            )
            one, texts = tf.constant([1.0]), []
            for run in (first, second, second, first):
                try:
                    run(one)
                except bpsx.ConfigError as e:
                    texts.append(str(e))
            moved = float(keras.ops.convert_to_numpy(weight)[0])
            try:
                seen: Any = gradient(weight)
            except bpsx.ConfigError as e:
                seen = str(e)
            del first, second, run
            gc.collect()
            found[name, traced] = moved, texts, list(told), seen, gradient(weight)
            told.clear()
    return found


def job_async() -> Any:
    """A LossScaleOptimizer around the distributed optimizer, and inside it."""
    found: dict[str, Any] = {}
    scaled = keras.optimizers.LossScaleOptimizer
    ways = {
        "around": lambda: scaled(bps.DistributedOptimizer(sgd()), initial_scale=8.0),
        "inside": lambda: bps.DistributedOptimizer(scaled(sgd(), initial_scale=8.0)),
    }
    for name, make in ways.items():
        weight, optimizer = keras.Variable([0.0], name=f"async {name}"), make()
        for _ in range(5):
            optimizer.apply([tf.constant([8.0])], [weight])
        bps.barrier()
        optimizer.apply([tf.constant([0.0])], [weight])
        found[name] = float(keras.ops.convert_to_numpy(weight)[0])
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    jobs = [name for name in globals() if name.startswith("job_") and name != "job_async"]
    done = run_job(__file__, jobs, tmp_path_factory, WORKERS)
    assert done.status == 0, done.output
    return done


@pytest.mark.parametrize("way", ["eager", "traced"])
def test_accumulated_gradients_of_a_scaled_loss(job: Finished, way: str) -> None:
    """The mean of 1 and 3, times the mean of the workers' factors; and the higher of 7 and 5."""
    for found in each(job, "job_accumulated"):
        assert found[way] == [-3.0, 7.0]


def test_each_tape_keeps_its_options(job: Finished) -> None:
    assert each(job, "job_tapes") == [[1.5, 3.0, 1.5]] * WORKERS


def test_passes_are_counted_for_each_loss(job: Finished) -> None:
    assert each(job, "job_losses") == [[-6.0, -8.0]] * WORKERS


def test_a_loaded_model_trains_on_as_before(job: Finished) -> None:
    """Gradients are 1: summed over workers; over passes; averaged over both."""
    for found in each(job, "job_loaded"):
        assert found == {"sum": [-2.0, -4.0], "passes": [-2.0, -4.0], "averaged": [-1.0, -2.0]}


@pytest.mark.parametrize("way", ["eager", "traced"])
def test_an_overflow_of_a_local_gradient_is_one_on_all_workers(job: Finished, way: str) -> None:
    """Two of three steps count; Horovod divides local gradients by the number of workers."""
    for found in each(job, "job_local_overflow"):
        assert found[way] == ([-2.0, -1.0], 4.0)


def test_calls_without_a_name_in_loops_and_branches_find_each_other(job: Finished) -> None:
    assert each(job, "job_loops") == [2.0 * (1 + 2) + 3 * 4.0 + 2 * 20.0] * WORKERS


@pytest.mark.parametrize("given", ["none", "one", "both"])
@pytest.mark.parametrize("traced", [False, True])
def test_optimizers_do_not_share_the_state_of_compression_in_silence(
    job: Finished, given: str, traced: bool
) -> None:
    """The later one takes over. A function that was traced goes on with the earlier one."""
    for found in each(job, "job_charges"):
        moved, refusals, warnings, of_tape, after = found[given, traced]
        taken_over = given != "none"
        assert len(refusals) == (taken_over and not traced) and len(warnings) == (
            taken_over and traced
        )
        assert moved == -4.0 + len(refusals) and after == 3.0
        texts = [*refusals, *warnings]
        assert all("test_tensorflow_together.py:" in text for text in texts), texts
        if taken_over:
            assert "give it the gradients of a tf.GradientTape" in of_tape, of_tape
        else:
            assert of_tape == 3.0


def test_asynchronous_steps_with_a_loss_scale_count_once(tmp_path: Any) -> None:
    done = run_job(__file__, ["job_async"], tmp_path, WORKERS, BYTEPS_ENABLE_ASYNC="1")
    assert done.status == 0, done.output
    for found in each(done, "job_async"):
        assert found == {"around": -10.0, "inside": -10.0}
