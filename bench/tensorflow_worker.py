"""Worker of ``bench tensorflow``: exchanges gradients and trains.

It uses bpsx or TensorFlow's MultiWorkerMirroredStrategy.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from bench.child import serve

_TENSORS, _ELEMENTS = 100, 65_536
_made: dict[str, Any] = {}


def init() -> int:
    """Join the job of the environment: the peer's if there is a TF_CONFIG, otherwise bpsx's."""
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if "TF_CONFIG" in os.environ:
        _made["strategy"] = tf.distribute.MultiWorkerMirroredStrategy()
        return 0
    import bpsx.tensorflow as bps

    bps.init()
    return int(bps.rank())


# ---- exchanges


@cache
def _ways() -> dict[str, Any]:
    import bpsx
    from bpsx.tensorflow.primitives import sums

    arrays = [np.ones(_ELEMENTS, np.float32) for _ in range(_TENSORS)]
    outputs = [np.zeros_like(a) for a in arrays]
    names = [f"numpy.{i}" for i in range(_TENSORS)]
    tensors = [tf.ones(_ELEMENTS) for _ in range(_TENSORS)]
    urgent = [-i for i in range(_TENSORS)]

    def plain() -> None:
        handles = [
            bpsx.push_pull_async(a, name=n, output=o, priority=p)
            for a, n, o, p in zip(arrays, names, outputs, urgent, strict=True)
        ]
        for handle in handles:
            bpsx.synchronize(handle)

    @tf.function
    def traced() -> tf.Tensor:
        # As in a training step, the tensors are neither arguments nor results of the function: for
        # a hundred of them Python would take as long as for their exchange.
        with tf.control_dependencies(
            sums(
                tensors, [f"function.{i}" for i in range(_TENSORS)], average=True, priorities=urgent
            )
        ):
            return tf.constant(0)

    def eager() -> None:
        sums(tensors, [f"eager.{i}" for i in range(_TENSORS)], average=True, priorities=urgent)

    return {"numpy": plain, "function": traced, "eager": eager}


def exchange(way: str, count: int, warm: int = 2) -> list[float]:
    """Return the seconds of each of ``count`` exchanges after ``warm`` others.

    All workers begin each exchange together.
    """
    import bpsx

    call, seconds = _ways()[way], []
    for i in range(warm + count):
        bpsx.barrier()
        begin = time.perf_counter()
        call()
        if i >= warm:
            seconds.append(time.perf_counter() - begin)
    return seconds


# ---- steps


def _model() -> Any:
    """Return a model of six layers with 1.2 million parameters."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def _loss(model: Any, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=model(images, training=True)
        )
    )


@cache
def _training(way: str) -> tuple[Any, Any]:
    """Return a model, and a function that makes a training step."""
    rng = np.random.default_rng(3)
    images, labels = (
        tf.constant(rng.random((16, 28, 28, 1), np.float32)),
        tf.constant(rng.integers(0, 10, 16)),
    )
    if way == "mirrored":
        strategy = _made["strategy"]
        with strategy.scope():
            model, optimizer = _model(), tf.keras.optimizers.SGD(0.01)
            optimizer.build(model.trainable_variables)

        def replica() -> None:
            with tf.GradientTape() as tape:
                loss = _loss(model, images, labels) / WORKERS
            optimizer.apply_gradients(
                zip(
                    tape.gradient(loss, model.trainable_variables),
                    model.trainable_variables,
                    strict=True,
                )
            )

        return model, tf.function(lambda: strategy.run(replica))
    import bpsx.tensorflow as bps

    model, optimizer = _model(), tf.keras.optimizers.SGD(0.01)
    if way == "step-keras":
        optimizer = bps.DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)

    def own() -> None:
        with tf.GradientTape() as tape:
            loss = _loss(model, images, labels)
        tape = bps.DistributedGradientTape(tape) if way == "step" else tape
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
                strict=True,
            )
        )

    return model, tf.function(own)


WORKERS = 2


def steps(way: str, count: int, warm: int = 3) -> list[float]:
    """Return the seconds of a step: the mean of ``count`` in a row, after ``warm`` others."""
    _, step = _training(way)
    for i in range(warm + count):
        if i == warm:
            begin = time.perf_counter()
        step()
    return [(time.perf_counter() - begin) / count]


def checksum(way: str) -> str:
    """Return a digest of the weights, to compare between workers.

    This guards against a fast step that is wrong.
    """
    model, _ = _training(way)
    return ".".join(
        f"{np.asarray(w).view(np.uint8).astype(np.int64).sum():x}" for w in model.get_weights()
    )


if __name__ == "__main__":
    serve({"init": init, "exchange": exchange, "steps": steps, "checksum": checksum})
    if not _made.get("strategy"):
        import bpsx

        bpsx.shutdown()
