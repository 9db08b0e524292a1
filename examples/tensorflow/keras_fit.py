"""Train a small convolutional network on scikit-learn's handwritten digits with Keras's ``fit``.

    bpsx-run --local --workers 2 --servers 1 python examples/tensorflow/keras_fit.py

Distributed are the optimizer, four callbacks, and each worker's share of the data. The learning
rate grows with the number of workers and begins small. With ``--save FILE``, where all workers can
read it, worker 0 saves the model, and all workers load it and train one more epoch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import bpsx.tensorflow.keras as bps


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="images per worker and step (default: %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, default=0.02, help="learning rate for one worker (default: %(default)s)"
    )
    parser.add_argument(
        "--compress",
        choices=("none", "fp16", "onebit", "topk"),
        default="none",
        help="compression of the gradients (default: %(default)s)",
    )
    parser.add_argument("--save", type=Path, help="file for the trained model, *.keras")
    args = parser.parse_args()
    if args.save is not None and args.save.suffix != ".keras":
        parser.error(
            f"--save {args.save}: the file's name must end in .keras, in which Keras saves whole"
            " models"
        )
    return args


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def compression(name: str) -> dict[str, object]:
    """Return DistributedOptimizer's keyword arguments for this kind of compression."""
    if name == "fp16":
        return {"compression": bps.Compression.fp16}
    params = {
        "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
        "topk": {"compressor": "topk", "k": 0.05, "ef": "vanilla"},
    }
    return {"compression_params": params[name]} if name in params else {}


def main() -> int:
    args = options()
    bps.init()
    rank, size = bps.rank(), bps.size()
    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.target))
    x, y = source.data[order].reshape(-1, 8, 8, 1).astype(np.float32) / 16, source.target[order]
    cut = len(y) * 4 // 5
    # Every worker has the same number of batches.
    share = cut // size // args.batch_size * args.batch_size
    mine = slice(rank * share, (rank + 1) * share)
    if rank == 0:
        print(f"{size} workers, {share} pictures each, batches of {args.batch_size}", flush=True)

    keras.utils.set_random_seed(rank)
    model = network()
    optimizer = bps.DistributedOptimizer(
        keras.optimizers.SGD(args.lr * size, momentum=0.9), **compression(args.compress)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [
        bps.callbacks.BroadcastGlobalVariablesCallback(0),
        bps.callbacks.MetricAverageCallback(),
        bps.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=int(rank == 0)),
        bps.callbacks.LearningRateScheduleCallback(
            lambda epoch: 0.2 ** (epoch >= args.epochs * 3 // 4), start_epoch=2
        ),
    ]
    told = model.fit(
        x[mine],
        y[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=0,
    ).history
    if rank == 0:
        for epoch, (value, right, rate) in enumerate(
            zip(told["loss"], told["accuracy"], told["lr"], strict=True), 1
        ):
            print(
                f"epoch {epoch:2}/{args.epochs}: loss {value:.4f}, {right:.1%} right, learning rate"
                f" {rate:g}"
            )
    if args.save is not None:
        if rank == 0:
            model.save(args.save)
        bps.barrier()
        # Without compression: each worker has its own residuals, and this file has worker 0's.
        model = bps.load_model(args.save)
        model.fit(x[mine], y[mine], batch_size=args.batch_size, verbose=0)
    right = float(model.evaluate(x[cut:], y[cut:], verbose=0)[1])
    total = float(sum(np.asarray(w, np.float64).sum() for w in model.get_weights()))
    same = bps.push_pull(np.array([total]), name="weights")[0] == total
    if rank == 0:
        print(
            f"{right:.1%} of the test right; weights are "
            + ("the same on all workers" if same else "DIFFERENT"),
            flush=True,
        )
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
