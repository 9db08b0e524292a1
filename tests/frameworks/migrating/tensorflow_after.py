"""Learns to read made-up digits, with BytePS and TensorFlow."""

import argparse

import bpsx.tensorflow as bps
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-pushpull", action="store_true")
args = parser.parse_args()

bps.init()
tf.keras.utils.set_random_seed(bps.rank())
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[bps.local_rank()], "GPU")


def digits(count, seed):
    """Pictures of 28 by 28: one of ten patterns, and noise."""
    patterns = tf.random.stateless_uniform((10, 28, 28, 1), (0, 0))
    target = tf.random.stateless_uniform((count,), (seed, 1), 0, 10, tf.int64)
    return tf.data.Dataset.from_tensor_slices(
        (
            tf.gather(patterns, target)
            + 0.7 * tf.random.stateless_normal((count, 28, 28, 1), (seed, 2)),
            target,
        )
    )


train_set = (
    digits(1024, seed=1).shard(bps.size(), bps.rank()).batch(args.batch_size, drop_remainder=True)
)
test_set = digits(256, seed=2).shard(bps.size(), bps.rank()).batch(64)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss_of = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.optimizers.SGD(args.lr * bps.size(), momentum=0.5)
compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = bps.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:  # once everything has been made
        bps.broadcast_variables(model.variables, root_rank=0)
        bps.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


def test(epoch):
    loss, right = tf.keras.metrics.Mean(), tf.keras.metrics.SparseCategoricalAccuracy()
    for images, labels in test_set:
        logits = model(images)
        loss.update_state(loss_of(labels, logits))
        right.update_state(labels, logits)
    mean, share = (
        bps.push_pull(loss.result(), average=True),
        bps.push_pull(right.result(), average=True),
    )
    if bps.rank() == 0:
        print(f"epoch {epoch}: loss {float(mean):.4f}, {float(share):.1%} right", flush=True)


test(0)
for epoch in range(1, args.epochs + 1):
    for batch, (images, labels) in enumerate(train_set):
        training_step(images, labels, epoch == 1 and batch == 0)
    test(epoch)
total = sum(float(tf.reduce_sum(tf.cast(v, tf.float64))) for v in model.trainable_variables)
print(f"worker {bps.rank()}: weights add up to {total!r}", flush=True)
