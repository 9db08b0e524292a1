"""Learns to read made-up digits, with Horovod and TensorFlow."""

import argparse

import bpsx.tensorflow.horovod as hvd
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")


def digits(count, seed):
    """Pictures of 28 by 28: one of ten patterns, and noise."""
    patterns = tf.random.stateless_uniform((10, 28, 28, 1), (0, 0))
    target = tf.random.stateless_uniform((count,), (seed, 1), 0, 10, tf.int64)
    noise = tf.random.stateless_normal((count, 28, 28, 1), (seed, 2))
    return tf.data.Dataset.from_tensor_slices((tf.gather(patterns, target) + 0.7 * noise, target))


train_set = (
    digits(1024, seed=1).shard(hvd.size(), hvd.rank()).batch(args.batch_size, drop_remainder=True)
)
test_set = digits(256, seed=2).shard(hvd.size(), hvd.rank()).batch(64)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, 5, strides=2),
        hvd.SyncBatchNormalization(),
        tf.keras.layers.ReLU(),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss_of = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.optimizers.SGD(args.lr * hvd.size(), momentum=0.5)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:  # once everything has been made
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


def test(epoch):
    losses, wrong = [], []
    for images, labels in test_set:
        logits = model(images, training=False)
        losses.append(loss_of(labels, logits))
        wrong.append(tf.boolean_mask(labels, tf.argmax(logits, 1) != labels))
    loss = hvd.allreduce(tf.reduce_mean(losses), name="loss")
    worst = hvd.allreduce(tf.reduce_max(losses), op=hvd.Max, name="worst")
    wrong = hvd.allgather(tf.concat(wrong, 0), name="wrong")
    if hvd.rank() == 0:
        print(
            f"epoch {epoch}: loss {float(loss):.4f}, {float(worst):.2f} at worst, "
            f"{len(wrong)} of 256 wrong",
            flush=True,
        )


plan = hvd.broadcast_object({"epochs": args.epochs}, root_rank=0)
test(0)
for epoch in range(1, plan["epochs"] + 1):
    for batch, (images, labels) in enumerate(train_set):
        training_step(images, labels, epoch == 1 and batch == 0)
    test(epoch)
total = sum(float(tf.reduce_sum(tf.cast(v, tf.float64))) for v in model.trainable_variables)
print(f"worker {hvd.rank()}: weights add up to {total!r}", flush=True)
