"""Two features of Keras or TensorFlow at once, with a distributed optimizer or tape.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.tensorflow_job import WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.tensorflow as bps

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
    jobs = ["job_accumulated", "job_tapes", "job_losses"]
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


def test_asynchronous_steps_with_a_loss_scale_count_once(tmp_path: Any) -> None:
    done = run_job(__file__, ["job_async"], tmp_path, WORKERS, BYTEPS_ENABLE_ASYNC="1")
    assert done.status == 0, done.output
    for found in each(done, "job_async"):
        assert found == {"around": -10.0, "inside": -10.0}
