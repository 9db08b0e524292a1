"""Train a small network on scikit-learn's handwritten digits in a loop of one's own.

    bpsx-run --local --workers 2 --servers 1 python examples/tensorflow/digits.py

Each worker takes its share of every batch. Three lines make the training distributed: ``init``,
``DistributedGradientTape`` and ``broadcast_variables``.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import bpsx.tensorflow as bps

WARM_UP_STEPS = 5  # not counted: functions are traced and tensors declared in them


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="images per worker and step (default: %(default)s)",
    )
    parser.add_argument("--lr", type=float, default=0.05, help="(default: %(default)s)")
    parser.add_argument(
        "--hidden",
        type=int,
        default=256,
        help="width of the two hidden layers (default: %(default)s)",
    )
    parser.add_argument("--eager", action="store_true", help="run without tf.function")
    parser.add_argument("--jit", action="store_true", help="have XLA compile the step")
    return parser.parse_args()


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training and test data: 1797 pictures of 8 by 8 pixels.

    The first four fifths, shuffled once, are for training.
    """
    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.target))
    x, y = source.data[order].astype(np.float32) / 16, source.target[order]
    cut = len(y) * 4 // 5
    return x[:cut], y[:cut], x[cut:], y[cut:]


def network(hidden: int) -> tf.Module:
    return tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(hidden, activation="relu"),
            tf.keras.layers.Dense(hidden, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def main() -> int:
    args = options()
    bps.init()
    first = bps.rank() == 0
    x, y, test_x, test_y = data()
    tf.keras.utils.set_random_seed(bps.rank())
    model, optimizer = network(args.hidden), tf.keras.optimizers.SGD(args.lr, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        tape = bps.DistributedGradientTape(tape)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )
        return loss

    train = step if args.eager else tf.function(step, jit_compile=args.jit or None)
    bps.broadcast_variables(model.variables, root_rank=0)
    if first:
        print(
            f"{bps.size()} workers, batches of {args.batch_size} each, {model.count_params():,}"
            " parameters",
            flush=True,
        )
    seconds: list[float] = []
    whole = args.batch_size * bps.size()
    for epoch in range(args.epochs):
        order = np.random.default_rng(1 + epoch).permutation(len(y))
        losses = []
        for i in range(
            bps.rank() * args.batch_size,
            len(order) - whole + 1 + bps.rank() * args.batch_size,
            whole,
        ):
            part = order[i : i + args.batch_size]
            start = time.perf_counter()
            losses.append(train(tf.constant(x[part]), tf.constant(y[part])))
            seconds.append(time.perf_counter() - start)
        loss = float(bps.push_pull(tf.reduce_mean(losses), name="loss"))
        right = float(np.mean(np.argmax(model(test_x), 1) == test_y))
        if first:
            print(
                f"epoch {epoch + 1:2}/{args.epochs}: loss {loss:.4f}, test accuracy {right:.1%}",
                flush=True,
            )
    digest = hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in model.variables)).digest()
    mine = tf.constant(list(digest), tf.int32)
    same = bool(tf.reduce_all(bps.push_pull(mine, op=bps.Sum, name="digest") == mine * bps.size()))
    if first:
        print(
            f"{statistics.median(seconds[WARM_UP_STEPS:] or seconds) * 1e3:.2f} ms a step (median),"
            f" push_pull speed {bps.get_pushpull_speed()[1]:,.0f} MB/s per worker"
        )
        print(
            (
                f"weights {digest.hex()[:16]} are the same on all workers"
                if same
                else "weights DIFFER between workers"
            ),
            flush=True,
        )
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
