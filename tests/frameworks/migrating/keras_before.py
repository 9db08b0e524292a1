"""Learns to read made-up digits, with BytePS and Keras."""

import argparse

import byteps.keras as bps
import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

bps.init()
keras.utils.set_random_seed(bps.rank())
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[bps.local_rank()], "GPU")


def digits(count, seed):
    """Pictures of 28 by 28: one of ten patterns, and noise."""
    patterns = np.random.default_rng(0).random((10, 28, 28, 1))
    source = np.random.default_rng(seed)
    target = source.integers(10, size=count)
    return (patterns[target] + 0.7 * source.normal(size=(count, 28, 28, 1))).astype(
        np.float32
    ), target


x_train, y_train = (part[bps.rank() :: bps.size()] for part in digits(1024, seed=1))
x_test, y_test = digits(256, seed=2)

model = keras.Sequential(
    [
        keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10),
    ]
)
scaled_lr = 0.02 * bps.size()
optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(scaled_lr, momentum=0.5))
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=optimizer,
    metrics=["accuracy"],
)

callbacks = [
    bps.callbacks.BroadcastGlobalVariablesCallback(0),
    bps.callbacks.MetricAverageCallback(),
    bps.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
history = model.fit(
    x_train, y_train, batch_size=args.batch_size, callbacks=callbacks, epochs=args.epochs, verbose=0
).history
for epoch, (loss, right) in enumerate(zip(history["loss"], history["accuracy"])):
    if bps.rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, {right:.1%} right", flush=True)
score = model.evaluate(x_test, y_test, verbose=0)
total = sum(float(np.sum(w, dtype=np.float64)) for w in model.get_weights())
print(f"worker {bps.rank()}: weights add up to {total!r}", flush=True)
