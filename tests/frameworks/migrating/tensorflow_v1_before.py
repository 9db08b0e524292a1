"""Learns to read made-up digits in a graph and a session of TensorFlow 1, with BytePS."""

import argparse
import tempfile

import byteps.tensorflow as bps
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_eager_execution()
tf1.logging.set_verbosity(tf1.logging.INFO)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, default=120, help="all workers together")
parser.add_argument("--lr", type=float, default=0.002)
args = parser.parse_args()

bps.init()
tf1.set_random_seed(bps.rank())
rng = np.random.default_rng(bps.rank())
patterns = np.random.default_rng(0).random((10, 784), np.float32)


def batches():
    """Pictures of 784 points: one of ten patterns, and noise."""
    while True:
        target = rng.integers(0, 10, args.batch_size)
        yield (
            patterns[target] + 0.7 * rng.standard_normal((args.batch_size, 784)).astype(np.float32),
            target,
        )


def network(feature, target):
    """One hidden layer; its logits' loss."""

    def layer(name, x, width):
        with tf1.variable_scope(name):
            w = tf1.get_variable(
                "w", (x.shape[-1], width), initializer=tf1.glorot_uniform_initializer()
            )
            return tf.matmul(x, w) + tf1.get_variable(
                "b", (width,), initializer=tf1.zeros_initializer()
            )

    logits = layer("logits", tf.nn.relu(layer("hidden", feature, 32)), 10)
    return tf1.losses.sparse_softmax_cross_entropy(target, logits)


image = tf1.placeholder(tf.float32, (None, 784), name="image")
label = tf1.placeholder(tf.int64, (None,), name="label")
loss = network(image, label)
mean = bps.push_pull(loss, average=True, name="mean loss")

optimizer = bps.DistributedOptimizer(tf1.train.AdamOptimizer(args.lr * bps.size()))
global_step = tf1.train.get_or_create_global_step()
train = optimizer.minimize(loss, global_step=global_step)


class Report(tf1.train.SessionRunHook):
    """Says at the end what has been learnt."""

    def end(self, session):
        total = sum(
            float(w.astype(np.float64).sum()) for w in session.run(tf1.trainable_variables())
        )
        print(f"worker {bps.rank()}: weights add up to {total!r}", flush=True)


hooks = [
    bps.BroadcastGlobalVariablesHook(0),
    tf1.train.StopAtStepHook(last_step=args.steps // bps.size()),
    tf1.train.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=20),
    Report(),
]
config = tf1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(bps.local_rank())

with tempfile.TemporaryDirectory() as folder:
    training = batches()
    checkpoints = folder if bps.rank() == 0 else None  # or workers write over each other's
    with tf1.train.MonitoredTrainingSession(
        checkpoint_dir=checkpoints, hooks=hooks, config=config
    ) as session:
        while not session.should_stop():
            pictures, digits = next(training)
            _, step, value = session.run(
                [train, global_step, mean], {image: pictures, label: digits}
            )
            if bps.rank() == 0 and step % 10 == 0:
                print(f"epoch {step // 10}: loss {value:.4f}, step {step}", flush=True)
