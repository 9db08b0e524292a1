"""Learns to read made-up digits, with BytePS and MXNet's gluon."""

import argparse

import bpsx.mxnet as bps
import mxnet as mx
from mxnet import autograd, gluon

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--compressor", default="onebit")
args = parser.parse_args()

bps.init()
rank, workers = bps.rank(), bps.size()
context = mx.gpu(bps.local_rank()) if mx.context.num_gpus() else mx.cpu()


def digits(count, seed):
    """Pictures of 28 by 28: one of ten patterns, and noise."""
    mx.random.seed(0)
    patterns = mx.nd.random.uniform(shape=(10, 1, 28, 28))
    mx.random.seed(seed)
    target = mx.nd.random.randint(0, 10, shape=(count,)).astype("int32")
    return mx.nd.take(patterns, target) + 0.7 * mx.nd.random.normal(
        shape=(count, 1, 28, 28)
    ), target.astype("float32")


images, labels = digits(1024, seed=1)
share = slice(rank * len(images) // workers, (rank + 1) * len(images) // workers)
train_set = gluon.data.DataLoader(
    gluon.data.ArrayDataset(images[share], labels[share]), args.batch_size, last_batch="discard"
)

net = gluon.nn.HybridSequential()
net.add(
    gluon.nn.Conv2D(8, 5, strides=2, activation="relu"),
    gluon.nn.MaxPool2D(),
    gluon.nn.Flatten(),
    gluon.nn.Dense(32, activation="relu"),
    gluon.nn.Dense(10),
)
mx.random.seed(10 + rank)
net.initialize(mx.init.Xavier(), ctx=context)
net.hybridize()
compression = {
    "compressor": args.compressor,
    "ef": "vanilla",
    "momentum": "nesterov",
    "scaling": True,
}
trainer = bps.DistributedTrainer(
    net.collect_params(),
    "sgd",
    {"learning_rate": args.lr * workers, "momentum": 0.5, "wd": 1e-4},
    root_rank=0,
    compression_params=compression,
)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    total, batches = 0.0, 0
    for data, label in train_set:
        data, label = data.as_in_context(context), label.as_in_context(context)
        with autograd.record():
            loss = loss_of(net(data), label)
        loss.backward()
        trainer.step(args.batch_size)
        total, batches = total + float(loss.mean().asscalar()), batches + 1
    mean = mx.nd.array([total / batches])
    bps.byteps_declare_tensor("mean loss")
    bps.byteps_push_pull(mean, version=0, priority=0, name="mean loss", is_average=True)
    if rank == 0:
        print(f"epoch {epoch}: loss {mean.asscalar():.4f}, worker 0 of {workers}", flush=True)
weights = sum(
    float(p.data().asnumpy().astype("float64").sum()) for p in net.collect_params().values()
)
print(f"worker {rank}: weights add up to {weights!r}", flush=True)
bps.shutdown()
