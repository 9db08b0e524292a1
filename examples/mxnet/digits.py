"""Train a small convolutional network on scikit-learn's handwritten digits with gluon.

    bpsx-run --local --workers 2 --servers 1 python examples/mxnet/digits.py --compress onebit

Each worker takes its share of every batch. Two lines make the training distributed: ``init`` and
``DistributedTrainer``. Import bpsx.mxnet before MXNet: it makes MXNet work with today's NumPy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
from sklearn.datasets import load_digits

import bpsx.mxnet as bps
from bpsx.api.verbs import session

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip

WARM_UP_STEPS = 5  # not counted: every gradient is declared in them
COMPRESSION = {
    "none": None,
    "fp16": {"fp16": True},
    "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov"},
    "topk": {"compressor": "topk", "k": 0.05, "ef": "vanilla"},
    "randomk": {"compressor": "randomk", "k": 0.2, "ef": "sparse"},
    "dithering": {"compressor": "dithering", "k": 4},
}


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
        "--compress",
        choices=tuple(COMPRESSION),
        default="none",
        help="compression of the gradients (default: %(default)s)",
    )
    return parser.parse_args()


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training and test data: 1797 pictures of 8 by 8 pixels.

    The first four fifths, shuffled once, are for training.
    """
    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.target))
    x, y = source.data[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16, source.target[order]
    cut = len(y) * 4 // 5
    return x[:cut], y[:cut], x[cut:], y[cut:]


def network() -> gluon.HybridBlock:
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(32, 3, activation="relu"),
        gluon.nn.Conv2D(32, 3, activation="relu"),
        gluon.nn.Flatten(),
        gluon.nn.Dense(256, activation="relu"),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main() -> int:
    args = options()
    bps.init()
    if session().config.asynchronous:
        sys.exit(
            "digits.py: BYTEPS_ENABLE_ASYNC=1 is not supported: byteps_push_pull, which averages"
            " losses and weights here, would add to the servers' value"
        )
    rank, size = bps.rank(), bps.size()
    x, y, test_x, test_y = data()
    mx.random.seed(rank)
    net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = bps.DistributedTrainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": args.lr, "momentum": 0.9},
        compression_params=COMPRESSION[args.compress],
    )
    if rank == 0:
        print(
            f"{size} workers, batches of {args.batch_size} each, compression: {args.compress}",
            flush=True,
        )
    seconds: list[float] = []
    whole = args.batch_size * size
    for epoch in range(args.epochs):
        order = np.random.default_rng(1 + epoch).permutation(len(y))
        losses = []
        for i in range(
            rank * args.batch_size, len(order) - whole + 1 + rank * args.batch_size, whole
        ):
            part = order[i : i + args.batch_size]
            start = time.perf_counter()
            with autograd.record():
                loss = loss_of(net(mx.nd.array(x[part])), mx.nd.array(y[part]))
            loss.backward()
            trainer.step(args.batch_size)
            # asscalar() waits; otherwise MXNet's engine would run ahead.
            losses.append(loss.mean().asscalar())
            seconds.append(time.perf_counter() - start)
        mean = mx.nd.array([np.mean(losses)])
        bps.byteps_push_pull(mean, name="loss")
        right = np.mean(net(mx.nd.array(test_x)).asnumpy().argmax(1) == test_y)
        if rank == 0:
            print(
                f"epoch {epoch + 1:2}/{args.epochs}: loss {mean.asscalar():.4f}, test accuracy"
                f" {right:.1%}",
                flush=True,
            )
    total = mx.nd.array(
        [
            sum(
                float(p.data().asnumpy().astype(np.float64).sum())
                for p in net.collect_params().values()
            )
        ],
        dtype="float64",
    )
    mine = total.copy()
    bps.byteps_push_pull(total, name="weights")
    same = bool(total.asscalar() == mine.asscalar())
    if rank == 0:
        print(
            f"{statistics.median(seconds[WARM_UP_STEPS:] or seconds) * 1e3:.2f} ms a step (median),"
            f" push_pull speed {bps.get_pushpull_speed()[1]:,.0f} MB/s per worker"
        )
        print(
            "weights are the same on all workers" if same else "weights DIFFER between workers",
            flush=True,
        )
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
