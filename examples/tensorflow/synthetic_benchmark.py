"""Measure how many images a second a job trains on, with models of ``tf.keras.applications``.

    bpsx-run --local --workers 2 --servers 1 python examples/tensorflow/synthetic_benchmark.py \\
        --model ResNet50 --quick

The data are synthetic, the weights random; gradients go through bpsx. An *iteration* is
``--num-batches-per-iter`` training steps; its rate is one sample. The script prints the mean of the
iterations and 1.96 standard deviations, for a worker and for all workers.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time

import numpy as np
import tensorflow as tf

import bpsx.tensorflow as bps


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="ResNet50", help="model in tf.keras.applications (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        default=32,
        help="images per worker and step (default: %(default)s)",
    )
    parser.add_argument(
        "--image-size",
        type=_positive,
        default=224,
        help="width and height of the images in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--num-classes", type=_positive, default=1000, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--num-warmup-batches",
        type=_positive,
        default=10,
        help="first steps, which are not counted (default: %(default)s)",
    )
    parser.add_argument(
        "--num-batches-per-iter", type=_positive, default=10, help="(default: %(default)s)"
    )
    parser.add_argument("--num-iters", type=_positive, default=10, help="(default: %(default)s)")
    parser.add_argument("--fp16-pushpull", action="store_true", help="send gradients as float16")
    parser.add_argument("--eager", action="store_true", help="run without tf.function")
    parser.add_argument("--jit", action="store_true", help="have XLA compile the step")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=(
            "few small images: seconds instead of minutes; other options that are given override it"
        ),
    )
    if parser.parse_args().quick:
        parser.set_defaults(
            batch_size=2,
            image_size=32,
            num_classes=10,
            num_warmup_batches=1,
            num_batches_per_iter=1,
            num_iters=2,
        )
    args = parser.parse_args()
    if not hasattr(tf.keras.applications, args.model) or not args.model[0].isupper():
        parser.error(
            f"--model {args.model}: not in tf.keras.applications, which has ResNet50, VGG16 and"
            " others"
        )
    return args


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer from 1")
    return number


def main() -> int:
    args = options()
    bps.init()
    first = bps.rank() == 0
    tf.keras.utils.set_random_seed(0)
    model = getattr(tf.keras.applications, args.model)(
        weights=None,
        classes=args.num_classes,
        input_shape=(args.image_size, args.image_size, 3),
        classifier_activation=None,
    )
    optimizer = tf.keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
    images = tf.random.uniform((args.batch_size, args.image_size, args.image_size, 3))
    labels = tf.random.uniform((args.batch_size,), maxval=args.num_classes, dtype=tf.int64)

    def step() -> None:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        tape = bps.DistributedGradientTape(tape, compression=compression)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )

    train = step if args.eager else tf.function(step, jit_compile=args.jit or None)
    bps.broadcast_variables(model.variables, root_rank=0)
    if first:
        print(
            f"{bps.size()} workers, {args.model} with {model.count_params():,} parameters, batches"
            f" of {args.batch_size} images of {args.image_size} x {args.image_size} on each",
            flush=True,
        )
    for _ in range(args.num_warmup_batches):
        train()
    rates = []
    for i in range(args.num_iters):
        start = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            train()
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - start))
        if first:
            print(
                f"iteration {i + 1:2}/{args.num_iters}: {rates[-1]:,.1f} images/s per worker",
                flush=True,
            )
    total = bps.push_pull(tf.constant(rates, tf.float64), op=bps.Sum, name="rates").numpy()
    digest = hashlib.sha256(
        b"".join(np.asarray(v).tobytes() for v in model.trainable_variables)
    ).digest()
    mine = tf.constant(list(digest), tf.int32)
    same = bool(tf.reduce_all(bps.push_pull(mine, op=bps.Sum, name="digest") == mine * bps.size()))
    if first:
        for what, found in (
            ("images/s per worker", np.array(rates)),
            (f"total images/s on {bps.size()} workers", total),
        ):
            print(f"{what}: {found.mean():,.1f} +- {1.96 * found.std():,.1f}")
        print(
            (
                "trained weights are the same on all workers"
                if same
                else "trained weights DIFFER between workers"
            ),
            flush=True,
        )
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
