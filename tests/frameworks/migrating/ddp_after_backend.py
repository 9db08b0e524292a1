"""Learns to read made-up digits, with PyTorch's DistributedDataParallel."""

import argparse

import bpsx.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

dist.init_process_group("bpsx")
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
train_sampler, test_sampler = DistributedSampler(train_set), DistributedSampler(test_set)
train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)

model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        half = len(data) // 2
        with model.no_sync():
            F.cross_entropy(model(data[:half]), target[:half]).backward()
        F.cross_entropy(model(data[half:]), target[half:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


def test(epoch):
    model.eval()
    totals = torch.zeros(2)
    with torch.no_grad():
        for data, target in test_loader:
            output = model.module(data)
            totals[0] += F.cross_entropy(output, target, reduction="sum")
            totals[1] += (output.argmax(1) == target).sum()
    dist.all_reduce(totals)
    loss, right = (totals / len(test_set)).tolist()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, {right:.1%} right", flush=True)


test(0)
for epoch in range(1, args.epochs + 1):
    train(epoch)
    test(epoch)
print(
    f"worker {dist.get_rank()}: weights add up to"
    f" {sum(p.double().sum().item() for p in model.parameters())!r}",
    flush=True,
)
dist.destroy_process_group()
