"""Learns to read made-up digits, with Horovod."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
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
        self.norm = hvd.SyncBatchNorm(8)
        self.fc1 = nn.Linear(8 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


train_set, test_set = digits(1024, seed=1), digits(256, seed=2)
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)

model = Net()
lr_scaler = hvd.size() if not args.use_adasum else hvd.local_size() if hvd.nccl_built() else 1
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()


def test(epoch):
    model.eval()
    loss, worst, right, wrong = torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0), []
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            losses = F.cross_entropy(output, target, reduction="none")
            loss += losses.sum() / len(test_sampler)
            worst = torch.maximum(worst, losses.max())
            right += (output.argmax(1) == target).sum()
            wrong.append(target[output.argmax(1) != target])
    loss = hvd.allreduce(loss, name="avg_loss")
    worst = hvd.allreduce(worst, op=hvd.Max)
    right_handle = hvd.allreduce_async_(right, op=hvd.Sum, name="right")
    wrong = hvd.allgather(torch.cat(wrong), name="wrong")
    right = hvd.synchronize(right_handle)
    if hvd.rank() == 0:
        print(
            f"epoch {epoch}: loss {loss.item():.4f}, {worst.item():.2f} at worst,"
            f" {right.item() / len(test_set):.1%} right, {len(wrong)} wrong",
            flush=True,
        )


plan = hvd.broadcast_object({"epochs": args.epochs}, root_rank=0)
test(0)
for epoch in range(1, plan["epochs"] + 1):
    train(epoch)
    hvd.join()
    test(epoch)
totals = hvd.allgather_object(sum(p.double().sum().item() for p in model.parameters()))
print(f"worker {hvd.rank()}: weights add up to {totals[hvd.rank()]!r}", flush=True)
hvd.shutdown()
