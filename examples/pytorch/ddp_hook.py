"""Average the gradients of PyTorch's DistributedDataParallel with bpsx, by one hook on the model.

    bpsx-run --local --workers 2 --servers 1 python examples/pytorch/ddp_hook.py
    torchrun --standalone --nproc-per-node 2 examples/pytorch/ddp_hook.py

The model learns to tell three spirals apart. PyTorch's process group sets the model up; each bucket
of gradients then goes through bpsx while backward is still running. ``--plain`` omits the hook:
then the same script averages over gloo.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
import torch.distributed as dist
from models import fingerprint, perceptron
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bpsx.torch as bps


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument(
        "--points",
        type=int,
        default=3000,
        help="points to train on; the test has a third as many (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="points per worker and step (default: %(default)s)",
    )
    parser.add_argument("--lr", type=float, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--fp16-pushpull", action="store_true", help="send gradients as float16")
    parser.add_argument(
        "--plain", action="store_true", help="do not use the hook: gloo exchanges the gradients"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of one worker (default: %(default)s)"
    )
    return parser.parse_args()


def spirals(points: int, seed: int) -> TensorDataset:
    """Return noisy points of the plane on three arms, and the number of each point's arm.

    float32 (points, 2) and int64 (points,).
    """
    source = torch.Generator().manual_seed(seed)
    arm, along = torch.randint(3, (points,), generator=source), torch.rand(points, generator=source)
    angle = arm * (2 * math.pi / 3) + along * 5 + 0.15 * torch.randn(points, generator=source)
    return TensorDataset(torch.stack([along * angle.cos(), along * angle.sin()], 1), arm)


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    """Train one epoch, and return the mean loss over this worker's batches."""
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # on its return all gradients are averages over the workers
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def main() -> int:
    args = options()
    torch.set_num_threads(args.threads)
    # Under bpsx-run the group finds the other processes through bpsx, under torchrun as usual.
    dist.init_process_group("gloo")
    bps.init()
    first, size = bps.rank() == 0, bps.size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(perceptron(2, 64, 64, 3))
    if not args.plain:
        compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
        model.register_comm_hook(bps.DDPHookState(compression=compression), bps.ddp_comm_hook)
    if first:
        print(
            f"{size} {'worker' if size == 1 else 'workers'}, DistributedDataParallel, gradients"
            f" through {'gloo' if args.plain else 'bpsx'}",
            flush=True,
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    known, unknown = spirals(args.points, seed=1), spirals(args.points // 3, seed=2)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(known)
    loader = DataLoader(known, args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = bps.push_pull(train_epoch(model, optimizer, loader), name="loss")
        if first:
            print(f"epoch {epoch + 1:2}/{args.epochs}: loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        x, y = unknown.tensors
        accuracy = (model.module(x).argmax(1) == y).float().mean().item()
    same = len(set(bps.all_gather_object(fingerprint(model)))) == 1
    if first:
        print(
            f"{accuracy:.1%} of {len(y)} new points are on the right spiral; weights "
            f"{'are the same' if same else 'DIFFER'} on all workers",
            flush=True,
        )
    dist.destroy_process_group()
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
