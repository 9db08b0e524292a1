"""Learns to read made-up digits, with Horovod and Keras."""

import argparse

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=9)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")


def digits(count, seed):
    """Pictures of 28 by 28: one of ten patterns, and noise."""
    patterns = np.random.default_rng(0).random((10, 28, 28, 1))
    source = np.random.default_rng(seed)
    target = source.integers(10, size=count)
    return (patterns[target] + 0.7 * source.normal(size=(count, 28, 28, 1))).astype(
        np.float32
    ), target


x_train, y_train = (part[hvd.rank() :: hvd.size()] for part in digits(1024, seed=1))
x_test, y_test = (part[hvd.rank() :: hvd.size()] for part in digits(256, seed=2))

model = keras.Sequential(
    [
        keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10),
    ]
)
scaled_lr = 0.02 * hvd.size()
optimizer = keras.optimizers.SGD(scaled_lr, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16, op=hvd.Average)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(loss=loss, optimizer=optimizer, metrics=["accuracy"])

verbose = 1 if hvd.rank() == 0 else 0
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=scaled_lr, warmup_epochs=2, verbose=verbose
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        scaled_lr, multiplier=1.0, start_epoch=2, end_epoch=4
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        scaled_lr, multiplier=lambda epoch: 0.1, start_epoch=4
    ),
]
history = model.fit(
    x_train, y_train, batch_size=args.batch_size, callbacks=callbacks, epochs=args.epochs, verbose=0
).history
for epoch, (loss, right) in enumerate(zip(history["loss"], history["accuracy"])):
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, {right:.1%} right", flush=True)
score = model.evaluate(x_test, y_test, verbose=0)
right = hvd.allreduce(score[1], name="right")
if hvd.rank() == 0:
    print(f"{float(right):.1%} right in the test", flush=True)
total = sum(float(np.sum(w, dtype=np.float64)) for w in model.get_weights())
print(f"worker {hvd.rank()}: weights add up to {total!r}", flush=True)
