"""Train with CrossBarrier, whose ``step()`` does not wait for the averages of the gradients.

    bpsx-run --local --workers 2 --servers 1 python examples/pytorch/cross_barrier.py

Each layer is updated in the next forward pass, when its own average has arrived. The script trains
the same network twice, with DistributedOptimizer and with CrossBarrier, and shows that the weights
are the same bit for bit.

CrossBarrier saves time on a slow network. Backward makes the gradients of the first layers last;
they then travel during the forward pass. On one machine it saves nothing, and each layer's own
update costs a little. ``python -m bench torch --only crossbarrier`` measures on links of 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from models import fingerprint, perceptron
from torch import nn

import bpsx.torch as bps
from bpsx.torch.cross_barrier import CrossBarrier

INPUTS, CLASSES = 256, 10


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="(default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=32,
        help="examples per worker and step (default: %(default)s)",
    )
    parser.add_argument(
        "--width", type=int, default=512, help="width of the hidden layers (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of one worker (default: %(default)s)"
    )
    return parser.parse_args()


def batch(step: int, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a worker's part of a step's batch: noise around one of ten points, and the point's
    number.
    """
    points = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(1 + step * 1000 + rank)
    y = torch.randint(CLASSES, (size,), generator=source)
    return points[y] + 3 * torch.randn(size, INPUTS, generator=source), y


def train(args: argparse.Namespace, crossing: bool) -> tuple[nn.Module, float, float]:
    """Return the trained network, the mean loss and the median time of a step in milliseconds.

    The loss is the mean of all workers over the last steps.
    """
    torch.manual_seed(0)
    model = perceptron(INPUTS, args.width, args.width, args.width, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    way = "CrossBarrier" if crossing else "DistributedOptimizer"
    # Two distributed optimizers of one process need different names for their parameters.
    named = [(f"{way}.{name}", p) for name, p in model.named_parameters()]
    if crossing:
        # From the last of num_steps on, updates are not delayed.
        optimizer = CrossBarrier(model, optimizer, named_parameters=named, num_steps=args.steps)
    else:
        optimizer = bps.DistributedOptimizer(optimizer, named_parameters=named)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    # The schedule steps right after step(), as with any optimizer.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, args.steps // 2), 0.2)
    losses, seconds = [], []
    for step in range(args.steps):
        x, y = batch(step, args.batch_size, bps.rank())
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.detach())
        if bps.rank() == 0 and (step + 1) % max(1, args.steps // 3) == 0:
            print(f"{way}: step {step + 1:4}/{args.steps}, loss {loss.item():.4f}", flush=True)
    last = bps.push_pull(torch.stack(losses[-10:]).mean(), name=f"{way}.loss")
    return model, last.item(), 1e3 * statistics.median(seconds)


def main() -> int:
    args = options()
    torch.set_num_threads(args.threads)
    bps.init()
    first, size = bps.rank() == 0, bps.size()
    if first:
        print(
            f"{size} {'worker' if size == 1 else 'workers'}, a network with hidden layers of"
            f" {args.width}",
            flush=True,
        )
    plain, plain_loss, plain_ms = train(args, crossing=False)
    model, loss, ms = train(args, crossing=True)
    prints = bps.all_gather_object([fingerprint(plain), fingerprint(model)])
    same = len({text for pair in prints for text in pair}) == 1
    if first:
        print(
            f"DistributedOptimizer: loss {plain_loss:.4f} at the end, {plain_ms:.2f} ms a step"
            " (median)"
        )
        print(f"CrossBarrier:         loss {loss:.4f} at the end, {ms:.2f} ms a step (median)")
        print(
            f"weights {'are the same, bit for bit,' if same else 'DIFFER'} with both and on all"
            " workers",
            flush=True,
        )
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
