"""compression_params of TensorFlow's optimizers and tapes: momentum in place of the optimizer's
own, and checkpoints.

``job_*`` functions run in the workers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow_models import BATCH, data, loss_of, mlp, whole

from bpsx.errors import ConfigError
from support.jobs import Job
from support.tensorflow_job import QUIET, WORKER, Finished, each, run_job

if WORKER:
    import keras
    import tensorflow as tf

    import bpsx.tensorflow as bps
    import bpsx.tensorflow.keras as bpk

    LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    v1 = tf.compat.v1

WORKERS = 2
STEPS = 6
HALF = STEPS // 2
#: Compression with residuals on workers and servers, and with momentum.
LOSSY = {"compressor": "topk", "k": 2, "ef": "vanilla", "momentum": "nesterov", "mu": 0.5}


# ---- run in the workers


def weights(model: Any) -> list[np.ndarray]:
    return [np.array(w) for w in model.get_weights()]


def fit(model: Any, first: int = 0, last: int = STEPS, mine: bool = True) -> list[np.ndarray]:
    """Train on the steps ``first`` to ``last`` with this worker's batches, or with all workers',
    and return the weights.
    """
    inputs, labels = (a[first:last] for a in data(STEPS))
    x, y = (inputs[:, bps.rank()], labels[:, bps.rank()]) if mine else (inputs, labels)
    model.fit(
        x.reshape(-1, 6),
        y.reshape(-1),
        batch_size=BATCH if mine else BATCH * WORKERS,
        shuffle=False,
        verbose=0,
    )
    return weights(model)


def first_mlp() -> Any:
    """Return a model whose layers have the names of the first model in a process."""
    keras.utils.clear_session()
    return mlp()


def compiled(optimizer: Any, params: Any = None, **options: Any) -> Any:
    """Return a compiled model; its optimizer is distributed if there are compression parameters."""
    model = first_mlp()
    if params is not None:
        params = params(model) if callable(params) else params
        optimizer = bpk.DistributedOptimizer(optimizer, compression_params=params)
    model.compile(optimizer, LOSS, **options)
    return model


def with_momentum(model: Any, **more: Any) -> Any:
    return whole(model.trainable_variables, momentum="nesterov", **more)


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, **options)


def job_momentum() -> Any:
    """Use Keras: compression's momentum must equal SGD's Nesterov momentum, with SGD's own momentum
    off.
    """
    nesterov = {"momentum": 0.9, "nesterov": True}
    found = {
        "alone": fit(compiled(sgd(**nesterov)), mine=False),
        "alone, mean of two": fit(
            compiled(sgd(gradient_accumulation_steps=2, **nesterov)), mine=False
        ),
    }
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "fit": (sgd(momentum=0.9), {}),
        "eagerly": (sgd(momentum=0.9), {"run_eagerly": True}),
        "compiled": (sgd(momentum=0.9), {"jit_compile": True}),
        "scaled": (keras.optimizers.LossScaleOptimizer(sgd(momentum=0.9), initial_scale=1.0), {}),
    }
    for name, (optimizer, options) in ways.items():
        found[name] = fit(compiled(optimizer, with_momentum, **options))
    found["mean of two"] = fit(
        compiled(sgd(momentum=0.9, gradient_accumulation_steps=2), with_momentum)
    )
    found["none of its own"] = fit(compiled(sgd(), lambda model: with_momentum(model, mu=0.9)))
    model = compiled(sgd(momentum=0.9), with_momentum)
    fit(model)
    return (
        found,
        model.optimizer.momentum,
        model.optimizer.get_config()["momentum"],
        np.abs(model.optimizer.variables[-1].numpy()).max() > 0,
    )


def train_v1(make: Callable[[], Any], worker: int | None) -> np.ndarray:
    inputs, _ = data(STEPS)
    with tf.Graph().as_default(), v1.Session() as sess:
        x = v1.placeholder(tf.float32, (None, 6))
        w = v1.get_variable("w", initializer=np.linspace(-1, 1, 6, dtype=np.float32))
        train = make().minimize(tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) - 1)))
        sess.run(v1.global_variables_initializer())
        for batch in inputs:
            sess.run(train, {x: batch.reshape(-1, 6) if worker is None else batch[worker]})
        return np.asarray(sess.run(w))


def job_v1() -> Any:
    everything = {"w:0": {"compressor": "topk", "k": 6, "momentum": "nesterov"}}
    return (
        train_v1(lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True), None),
        train_v1(
            lambda: bps.DistributedOptimizer(
                v1.train.MomentumOptimizer(0.1, 0.9), compression_params=everything
            ),
            bps.rank(),
        ),
    )


def job_saved() -> Any:
    """Train half of the steps, save, load and train the rest; compare with training without a
    break.

    Each worker has its own file.
    """

    def model() -> Any:
        return compiled(sgd(momentum=0.5), LOSSY)

    found: dict[str, Any] = {"straight": fit(model())}
    with tempfile.TemporaryDirectory() as folder:
        begun = model()
        fit(begun, 0, HALF)
        begun.save(Path(folder, "all.keras"))
        begun.save_weights(Path(folder, "some.weights.h5"))
        tf.train.Checkpoint(model=begun, optimizer=begun.optimizer).save(
            str(Path(folder, "checkpoint"))
        )
        fit(begun)  # overwrites the state in memory with that of other training
        found["keras"] = fit(
            bpk.load_model(Path(folder, "all.keras"), compression_params=LOSSY), HALF
        )
        other = model()
        other.optimizer.build(other.trainable_variables)
        other.load_weights(Path(folder, "some.weights.h5"))
        found["weights"] = fit(other, HALF)
        other = model()
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(
            tf.train.latest_checkpoint(folder)
        ).assert_existing_objects_matched()
        found["checkpoint"] = fit(other, HALF)
        found["forgotten"] = fit(bpk.load_model(Path(folder, "all.keras")), HALF)
        plain = keras.models.load_model(Path(folder, "all.keras"))
        plain.fit(data()[0].reshape(-1, 6), data()[1].reshape(-1), verbose=0)
        found["plain"] = type(plain.optimizer) is keras.optimizers.SGD
    return found


def job_powersgd() -> Any:
    """Train with factors of rank 1, in three ways; save and load; and train without them."""
    params = {"compressor": "powersgd", "rank": 1, "ef": "vanilla"}
    found = {
        "fit": fit(compiled(sgd(), params)),
        "eagerly": fit(compiled(sgd(), params, run_eagerly=True)),
        "compiled": fit(compiled(sgd(), params, jit_compile=True)),
        "plain": fit(compiled(sgd(), {"fp16": False})),
    }
    model, optimizer = first_mlp(), sgd()
    inputs, labels = data(STEPS)
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs[step, bps.rank()], labels[step, bps.rank()])
        tape = bps.DistributedGradientTape(tape, compression_params=params)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    found["tape"] = weights(model)
    with tempfile.TemporaryDirectory() as folder:
        begun = compiled(sgd(), params)
        fit(begun, 0, HALF)
        begun.save(Path(folder, "all.keras"))
        found["straight"] = fit(begun, HALF)
        again = bpk.load_model(Path(folder, "all.keras"), compression_params=params)
        found["loaded"] = fit(again, HALF)
    return found


def with_tape(model: Any, optimizer: Any, first: int, last: int) -> list[np.ndarray]:
    inputs, labels = data(STEPS)
    params = {k: v for k, v in LOSSY.items() if k not in ("momentum", "mu")}
    for i in range(first, last):
        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs[i, bps.rank()], labels[i, bps.rank()])
        tape = bps.DistributedGradientTape(tape, compression_params=params)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return weights(model)


def job_saved_tape() -> Any:
    """A tape has no state to save; a CompressionState has."""

    def parts() -> Any:
        model = first_mlp()
        return model, sgd(), bps.CompressionState(model.trainable_variables)

    model, optimizer, state = parts()
    begin = state.serialize()
    found = {"straight": with_tape(model, optimizer, 0, STEPS)}
    bps.broadcast_variables(model.variables, 0)
    state.deserialize(begin)  # an empty state
    model.set_weights(first_mlp().get_weights())
    found["anew"] = with_tape(model, optimizer, 0, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, state = parts()
        with_tape(model, optimizer, 0, HALF)
        tf.train.Checkpoint(model=model, optimizer=optimizer, compression=state).save(
            str(Path(folder, "checkpoint"))
        )
        with_tape(model, optimizer, 0, HALF)
        model, optimizer, state = parts()
        tf.train.Checkpoint(model=model, optimizer=optimizer, compression=state).restore(
            tf.train.latest_checkpoint(folder)
        )
        found["checkpoint"] = with_tape(model, optimizer, HALF, STEPS)
    return found


def job_made_again() -> Any:
    """Recreate the optimizer from its configuration, as Keras does to copy a model: it stays
    distributed.
    """
    optimizer = bpk.DistributedOptimizer(sgd(momentum=0.9), compression=bps.Compression.fp16)
    again = type(optimizer).from_config(optimizer.get_config())
    first, second = mlp(), mlp()
    first.compile(optimizer, LOSS)
    second.compile(again, LOSS)
    return fit(first), fit(second)


def job_refused() -> Any:
    momentum = {"compressor": "onebit", "momentum": "nesterov"}
    some = {"dense/kernel": {**momentum, "mu": 0.9}}
    w = tf.Variable([1.0, 2.0], name="w")

    def changed() -> None:
        model = compiled(sgd(momentum=0.9), with_momentum)
        fit(model)
        model.optimizer.momentum = 0.5
        model.make_train_function(force=True)
        fit(model)

    def embedding() -> None:
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
            ]
        )
        model.compile(
            bpk.DistributedOptimizer(sgd(), compression_params={**momentum, "mu": 0.9}), "mse"
        )
        model.fit(np.zeros((4, 2)), np.zeros((4, 8)), verbose=0)

    def one_of_v1(optimizer: Any) -> Any:
        return bps.DistributedOptimizer(
            optimizer, compression_params={**momentum, "mu": 0.9}
        ).compute_gradients(lambda: tf.reduce_sum(w), [w])

    calls: list[Any] = [
        lambda: bpk.DistributedOptimizer(sgd(), compression_params=momentum),
        lambda: bps.DistributedGradientTape(tf.GradientTape(), compression_params=momentum),
        lambda: fit(compiled(keras.optimizers.RMSprop(0.1, momentum=0.9), momentum)),
        lambda: fit(
            compiled(sgd(momentum=0.9), lambda model: {model.trainable_variables[0].path: momentum})
        ),
        changed,
        embedding,
        lambda: one_of_v1(v1.train.MomentumOptimizer(0.1, tf.constant(0.9))),
        lambda: one_of_v1(v1.train.RMSPropOptimizer(0.1, momentum=0.9)),
        lambda: bps.CompressionState([w]).deserialize(b"no archive"),
        lambda: fit(compiled(sgd(), some)),
    ]
    told = []
    for call in calls:
        try:
            call()
            told.append("")
        except ConfigError as e:
            told.append(str(e))
    return told


JOBS = [name for name in dir() if name.startswith("job_")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = run_job(__file__, JOBS, tmp_path_factory, WORKERS, BYTEPS_MIN_COMPRESS_BYTES="0")
    assert done.status == 0, done.output
    return done


# ---- expected results


def close(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_momentum_is_taken_over_from_sgd(job: Finished) -> None:
    for found, momentum, configured, applied in each(job, "job_momentum"):
        for name in ("fit", "eagerly", "compiled", "scaled", "none of its own"):
            assert close(found[name], found["alone"]), name
        assert close(found["mean of two"], found["alone, mean of two"])
        assert momentum == configured == 0.9 and not applied


def test_momentum_is_taken_over_from_v1(job: Finished) -> None:
    for alone, ours in each(job, "job_v1"):
        assert np.allclose(alone, ours, rtol=1e-5, atol=1e-6)


def test_matrices_are_exchanged_as_factors(job: Finished) -> None:
    one, two = each(job, "job_powersgd")
    for way in ("fit", "eagerly", "compiled", "tape", "loaded"):
        assert equal(one[way], two[way]), way
        # The first factor is drawn by the gradient's name, which differs.
        assert not close(one[way], one["plain"]), way
        far = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(one[way], one["plain"])]
        assert max(far) < 0.2, (way, far)
    assert equal(one["loaded"], one["straight"])


@pytest.mark.parametrize("way", ["keras", "weights", "checkpoint"])
def test_compressions_state_is_saved_with_an_optimizer(job: Finished, way: str) -> None:
    for found in each(job, "job_saved"):
        assert equal(found[way], found["straight"])
        assert not equal(found["forgotten"], found["straight"])
        assert found["plain"]


def test_compressions_state_of_a_tape_is_saved_separately(job: Finished) -> None:
    for found in each(job, "job_saved_tape"):
        assert equal(found["checkpoint"], found["straight"])
        assert equal(found["anew"], found["straight"])


def test_an_optimizer_made_from_a_configuration_is_distributed(job: Finished) -> None:
    first, second = each(job, "job_made_again")
    assert equal(first[0], first[1]) and equal(first[0], second[1])


def test_refused(job: Finished) -> None:
    for told in each(job, "job_refused"):
        expected = [
            "give mu, a number",
            "DistributedGradientTape: compression_params: momentum='nesterov' needs mu",
            "the momentum of RMSprop (0.9)",
            "but not for '",
            "the momentum of SGD has changed from 0.9 to 0.5",
            "sparse_as_dense=True",
            "EagerTensor",
            "the momentum of RMSPropOptimizer",
            "10 bytes cannot be read",
            "dense/kernel",
        ]
        for text, part in zip(told, expected, strict=True):
            assert part in text


_RESUMED = """
    import keras
    import tensorflow as tf
    import bpsx.tensorflow as bps

    bps.init()


    def begin(name):
        params = {"compressor": "topk", "k": 1, "ef": "vanilla", "momentum": "nesterov"}
        return tf.Variable([1.0, 2.0, 3.0, 4.0], name=name), bps.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.5), compression_params=params
        )


    def steps(w, optimizer, n):
        for _ in range(n):
            optimizer.apply([tf.square(w) * (bps.rank() + 1)], [w])


    straight, half = begin("straight"), begin("half")
    steps(*straight, 6)
    steps(*half, 3)
    report("suspended")
    bps.suspend()
    hear()
    bps.resume(2, 1)
    steps(*half, 3)
    report([straight[0].numpy().tolist(), half[0].numpy().tolist()])
"""


def test_compressions_state_survives_suspend_and_resume() -> None:
    with Job(_RESUMED, 2, 1, env={**QUIET, "BYTEPS_MIN_COMPRESS_BYTES": "0"}) as job:
        for worker in job.workers:
            worker.wait_for_line("suspended")
        job.servers_anew(2)
        for worker in job.workers:
            worker.say("go")
        for _, (straight, half) in job.results():
            assert straight == half
