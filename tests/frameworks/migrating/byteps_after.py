"""Learns to read made-up digits, with BytePS."""

import argparse

import bpsx.torch as bps
import torch
import torch.nn.functional as F
from bpsx.torch.cross_barrier import CrossBarrier
from bpsx.torch.parallel import DistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-pushpull", action="store_true")
parser.add_argument("--way", choices=("optimizer", "cross-barrier", "module"), default="optimizer")
args = parser.parse_args()

bps.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)


def digits(count, seed):
    """Pictures of 28 by 28: one of ten patterns, and noise."""
    patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (count,), generator=source)
    return TensorDataset(
        patterns[target] + 0.7 * torch.randn(count, 1, 28, 28, generator=source), target
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, stride=2)
        self.fc1 = nn.Linear(8 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


train_set, test_set = digits(1024, seed=1), digits(256, seed=2)
train_sampler = DistributedSampler(train_set, num_replicas=bps.size(), rank=bps.rank())
train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test_set, num_replicas=bps.size(), rank=bps.rank())
test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * bps.size(), momentum=0.5)
compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
if args.way == "optimizer":
    optimizer = bps.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
elif args.way == "cross-barrier":
    steps = args.epochs * len(train_loader)
    optimizer = CrossBarrier(
        model, optimizer, model.named_parameters(), compression=compression, num_steps=steps
    )
else:
    model = DistributedDataParallel(model, device_ids=None, compression=compression)
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        if args.way == "optimizer":
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()


def metric_average(value, name):
    handle = bps.byteps_push_pull(torch.tensor(value), average=True, name=name)
    return bps.synchronize(handle).item()


def test(epoch):
    model.eval()
    loss, right = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss += F.cross_entropy(output, target, reduction="sum").item() / len(test_sampler)
            right += (output.argmax(1) == target).sum().item() / len(test_sampler)
    loss, right = metric_average(loss, "avg_loss"), metric_average(right, "avg_accuracy")
    if bps.rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, {right:.1%} right", flush=True)


test(0)
for epoch in range(1, args.epochs + 1):
    train(epoch)
    test(epoch)
print(
    f"worker {bps.rank()}: weights add up to"
    f" {sum(p.double().sum().item() for p in model.parameters())!r}",
    flush=True,
)
