"""Train a small network on scikit-learn's handwritten digits with several workers.

    bpsx-run --local --workers 2 --servers 1 python examples/pytorch/digits.py

Each worker takes its share of every batch. The script also prints figures of the communication. The
four calls that make the training distributed are in ``Bpsx``. ``Gloo`` does the same with torch's
DistributedDataParallel, for comparison (``--backend gloo``, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT in the environment).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

WARM_UP_STEPS = 5  # not counted: tensors are declared and kernels compiled in them


class Bpsx:
    """The job's workers, connected by bpsx."""

    def __init__(self) -> None:
        import bpsx.torch as bps

        self.bps = bps
        bps.init()
        self.rank, self.size = bps.rank(), bps.size()

    def distribute(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Give all workers worker 0's weights, and average gradients before each step."""
        self.bps.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = self.bps.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters()
        )
        self.bps.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer

    def mean(self, value: torch.Tensor, name: str) -> torch.Tensor:
        return self.bps.push_pull(value, name=name)

    def from_first(self, value: torch.Tensor) -> torch.Tensor:
        """Return worker 0's ``value``."""
        result = value.clone()
        self.bps.broadcast_parameters({"digest": result}, root_rank=0)
        return result

    def barrier(self) -> None:
        self.bps.barrier()

    def speed(self) -> float:
        """Return the push_pull rate since the last call, in MB/s."""
        return self.bps.get_pushpull_speed()[1]

    def close(self) -> None:
        self.bps.shutdown()


class Gloo:
    """The same as :class:`Bpsx`, through torch.distributed."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist = dist
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def distribute(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return nn.parallel.DistributedDataParallel(model), optimizer

    def mean(self, value: torch.Tensor, name: str) -> torch.Tensor:
        result = value.clone()
        self.dist.all_reduce(result)
        return result / self.size

    def from_first(self, value: torch.Tensor) -> torch.Tensor:
        result = value.clone()
        self.dist.broadcast(result, 0)
        return result

    def barrier(self) -> None:
        self.dist.barrier()

    def speed(self) -> float:
        return 0.0

    def close(self) -> None:
        self.dist.destroy_process_group()


class Digits:
    """The data: 1797 pictures of 8 by 8 pixels.

    The first four fifths, shuffled once, are for training.
    """

    def __init__(self) -> None:
        source = load_digits()
        order = torch.randperm(len(source.target), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(source.data, dtype=torch.float32)[order] / 16
        y = torch.tensor(source.target)[order]
        cut = len(y) * 4 // 5
        self.x, self.y, self.test_x, self.test_y = x[:cut], y[:cut], x[cut:], y[cut:]

    def batches(self, epoch: int, size: int, rank: int, of: int) -> list[torch.Tensor]:
        """Return the indices of this worker's part of each batch.

        Every worker has the same number of batches.
        """
        order = torch.randperm(len(self.y), generator=torch.Generator().manual_seed(1 + epoch))
        whole = size * of
        return [
            order[i + rank * size : i + (rank + 1) * size]
            for i in range(0, len(order) - whole + 1, whole)
        ]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        default=1024,
        help="width of the two hidden layers (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of one worker (default: %(default)s)"
    )
    parser.add_argument("--backend", choices=("bpsx", "gloo"), default="bpsx")
    parser.add_argument("--json", type=Path, help="write the figures to this file (worker 0)")
    return parser.parse_args()


def network(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Digits, parts: list[torch.Tensor]
) -> tuple[torch.Tensor, list[float]]:
    """Train one epoch. Returns the mean loss over this worker's parts, and the seconds of each
    step.
    """
    total, seconds = torch.zeros(()), []
    for part in parts:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.x[part]), data.y[part])
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        total += loss.detach()
    return total / len(parts), seconds


def accuracy(model: nn.Module, data: Digits) -> float:
    with torch.no_grad():
        return float((model(data.test_x).argmax(1) == data.test_y).float().mean())


def identical(job: Bpsx | Gloo, model: nn.Module) -> bool:
    """Return whether all workers hold the same bits, by SHA-256 digests compared with worker 0's.

    All workers get the same result.
    """
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    differs = not torch.equal(mine, job.from_first(mine))
    return float(job.mean(torch.tensor(float(differs)), "differs")) == 0.0


def main() -> int:
    args = options()
    torch.set_num_threads(args.threads)
    job: Bpsx | Gloo = Bpsx() if args.backend == "bpsx" else Gloo()
    first = job.rank == 0
    data, plain = Digits(), network(args.hidden)
    parameters = sum(p.numel() for p in plain.parameters())
    model, optimizer = job.distribute(
        plain, torch.optim.SGD(plain.parameters(), lr=args.lr, momentum=0.9)
    )
    if first:
        print(
            f"{job.size} workers ({args.backend}), batches of {args.batch_size} each,"
            f" {parameters:,} parameters ({parameters * 4 / 1e6:.1f} MB of gradients a step)",
            flush=True,
        )
    seconds: list[float] = []
    loss = score = 0.0
    for epoch in range(args.epochs):
        mean, spent = train_epoch(
            model, optimizer, data, data.batches(epoch, args.batch_size, job.rank, job.size)
        )
        seconds += spent
        loss, score = float(job.mean(mean, "loss")), accuracy(plain, data)
        if first:
            print(
                f"epoch {epoch + 1:2}/{args.epochs}: loss {loss:.4f}, test accuracy {score:.1%}, "
                f"{statistics.median(spent) * 1e3:.1f} ms a step",
                flush=True,
            )
    rate_seen = job.speed()
    same = identical(job, plain)
    if first:
        report(args, job.size, parameters, seconds, loss, score, rate_seen, same)
    job.barrier()
    job.close()
    return 0 if same else 1


def report(
    args: argparse.Namespace,
    size: int,
    parameters: int,
    seconds: list[float],
    loss: float,
    score: float,
    speed: float,
    same: bool,
) -> None:
    """Print the figures, and write them to a file if asked to."""
    counted = seconds[WARM_UP_STEPS:] or seconds
    images = size * args.batch_size * len(counted) / sum(counted)
    print(
        f"{images:,.0f} images per second (all workers), {statistics.median(counted) * 1e3:.2f} ms"
        " a step (median)"
    )
    if args.backend == "bpsx":
        print(f"push_pull speed {speed:,.0f} MB/s per worker")
    print(
        (
            f"weights are bit-identical on all {size} workers"
            if same
            else "weights DIFFER between workers"
        ),
        flush=True,
    )
    if args.json:
        figures = {
            "backend": args.backend,
            "workers": size,
            "parameters": parameters,
            "batch_size": args.batch_size,
            "steps": len(counted),
            "step_ms_median": statistics.median(counted) * 1e3,
            "step_ms": [s * 1e3 for s in counted],
            "images_per_second": images,
            "push_pull_mb_per_second": speed,
            "loss": loss,
            "accuracy": score,
            "identical": same,
        }
        args.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    sys.exit(main())
