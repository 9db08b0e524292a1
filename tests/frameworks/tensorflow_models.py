"""Small models and data for tests of bpsx.tensorflow, identical in every process."""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH = 8


def data(steps: int = 4, workers: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of shape (steps, workers, BATCH, 6) and labels (steps, workers, BATCH) of three
    classes.
    """
    rng = np.random.default_rng(5)
    return rng.normal(size=(steps, workers, BATCH, 6)).astype(np.float32), rng.integers(
        0, 3, (steps, workers, BATCH)
    )


def mlp() -> Any:
    """Return a Keras model of two layers with fixed initial weights."""
    import keras

    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(10, activation="tanh"), keras.layers.Dense(3)]
    )
    rng = np.random.default_rng(6)
    model.set_weights(
        [rng.normal(size=w.shape).astype(np.float32) * 0.3 for w in model.get_weights()]
    )
    return model


def loss_of(model: Any, x: Any, y: Any) -> Any:
    """Return the mean loss over the batch, so that the average of two workers' gradients is the
    gradient of the joined batch.
    """
    import tensorflow as tf

    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x, training=True))
    )


def whole(variables: Any, **more: Any) -> dict[str, dict[str, Any]]:
    """Return ``compression_params`` that compress every gradient without loss: top-k with all
    values.
    """
    from bpsx.tensorflow.names import own_names_of

    return {
        name: {"compressor": "topk", "k": int(np.prod(v.shape)), **more}
        for name, v in zip(own_names_of(variables), variables, strict=True)
    }


def joined(steps: int = 4) -> list[np.ndarray]:
    """Return the weights after training alone on all workers' batches, with SGD and momentum."""
    import keras
    import tensorflow as tf

    model, optimizer = mlp(), keras.optimizers.SGD(0.1, momentum=0.9)
    inputs, labels = data(steps)
    for x, y in zip(inputs, labels, strict=True):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x.reshape(-1, 6), y.reshape(-1))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return [np.array(w) for w in model.get_weights()]
