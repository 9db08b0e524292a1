"""Train a small GPT, byte by byte, on a text that comes with Python: the help on its language.

    bpsx-run --local --workers 2 --servers 1 python examples/pytorch/gpt.py
    torchrun --standalone --nproc-per-node 2 examples/pytorch/gpt.py

The workers share each batch: with 1, 2 or 4 workers the training is the same, only faster.

With ``--checkpoint FILE``, worker 0 writes the state there now and then and at the end. If the file
exists, training continues from it; only worker 0 needs to have it. An interrupted training ends
with the same weights as one without interruption. With three workers or more, the last bits are the
same only if ``BPSX_FIXED_ORDER=1`` is set, since a sum of three depends on the order.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from models import GPT, fingerprint, parameters_of
from torch import nn

import bpsx.torch as bps

BYTES = 256  # the vocabulary
WARM_UP = 20  # number of steps in which the learning rate grows


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=600,
        help="steps in total, including those of earlier runs (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=16,
        help="texts per step, of all workers together (default: %(default)s)",
    )
    parser.add_argument(
        "--sequence", type=int, default=64, help="bytes per text (default: %(default)s)"
    )
    parser.add_argument("--width", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed of weights, batches and the sample (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="file with the state to resume from, and for the state of this run",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=100,
        metavar="STEPS",
        help="steps between checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=300,
        metavar="BYTES",
        help="bytes of text to generate at the end (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of one worker (default: %(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few steps of a smaller model: seconds; other options that are given override it",
    )
    if parser.parse_args().quick:
        parser.set_defaults(steps=60, width=32, layers=1, sequence=32, sample=60)
    return parser.parse_args()


def text() -> torch.Tensor:
    """Return the text's bytes, int64."""
    joined = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8).long()


def share(data: torch.Tensor, step: int, args: argparse.Namespace) -> torch.Tensor:
    """Return this worker's texts of a step's batch: int64 (texts, sequence + 1).

    Each text is one byte longer than the sequence. All workers draw the whole batch, which depends
    only on seed and step, and take their part of it.
    """
    source = torch.Generator().manual_seed(1_000_003 * args.seed + step)
    begins = torch.randint(len(data) - args.sequence - 1, (args.batch_size,), generator=source)
    mine = begins[bps.rank() :: bps.size()]
    return data[mine[:, None] + torch.arange(args.sequence + 1)]


def load(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the state in ``file``, if the file exists. Returns the number of steps already made.

    Only worker 0 calls it.
    """
    if not file.exists():
        return 0
    state: dict[str, Any] = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the state; after an interruption the old file is still there.

    Only worker 0 calls it: the other workers have the same state.
    """
    beside = file.with_name(file.name + ".new")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, beside
    )
    os.replace(beside, file)


def refuse(reason: str) -> NoReturn:
    """Exit with status 2. All workers call it; worker 0 prints the reason."""
    if bps.rank() == 0:
        print(f"gpt.py: {reason}", file=sys.stderr)
    sys.exit(2)


def begin(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Give all workers worker 0's state, from its checkpoint if there is one.

    Returns the number of steps already made.
    """
    done, problem = 0, None
    if args.checkpoint and bps.rank() == 0:
        try:
            done = load(args.checkpoint, model, optimizer)
        except Exception as e:  # broadcast it, or the other workers would wait
            problem = f"{args.checkpoint} cannot be used: {e}"
    done, problem = bps.broadcast_object((done, problem), root_rank=0, name="progress")
    if problem is not None:
        refuse(problem)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    return int(done)


def train(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, done: int
) -> None:
    """Train from step ``done`` to the last one."""
    data, first, began = text(), bps.rank() == 0, time.perf_counter()
    for step in range(done, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / WARM_UP)
        texts = share(data, step, args)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        if step == done or (step + 1) % max(1, args.steps // 10) == 0:
            mean = bps.push_pull(loss.detach(), name="loss").item()
            if first:
                print(
                    f"step {step + 1:4}/{args.steps}: loss {mean:.4f},"
                    f" {time.perf_counter() - began:.1f} s",
                    flush=True,
                )
        if (
            args.checkpoint
            and first
            and ((step + 1) % args.save_every == 0 or step + 1 == args.steps)
        ):
            save(args.checkpoint, model, optimizer, step + 1)


def sample(model: nn.Module, args: argparse.Namespace, start: str = "The ") -> str:
    """Return a text with which the model continues ``start``, byte by byte."""
    source, written = torch.Generator().manual_seed(args.seed), torch.tensor([list(start.encode())])
    with torch.no_grad():
        for _ in range(args.sample):
            likely = (model(written[:, -args.sequence :])[0, -1] / 0.8).softmax(0)
            written = torch.cat([written, torch.multinomial(likely, 1, generator=source)[None]], 1)
    return bytes(written[0].tolist()).decode(errors="replace")


def main() -> int:
    args = options()
    torch.set_num_threads(args.threads)
    bps.init()
    first, size = bps.rank() == 0, bps.size()
    if args.batch_size % size:
        refuse(f"--batch-size {args.batch_size} cannot be divided evenly among {size} workers")
    torch.manual_seed(args.seed)
    model = GPT(BYTES, args.sequence, args.width, args.layers, args.heads)
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
    )
    done = begin(args, model, optimizer)
    if first:
        print(
            f"{size} {'worker' if size == 1 else 'workers'}, {parameters_of(model):,} parameters, "
            f"{args.batch_size // size} texts of {args.sequence} bytes for each worker in a step",
            flush=True,
        )
        if args.checkpoint:
            print(
                (
                    f"resumes from step {done} of {args.checkpoint}"
                    if done
                    else f"starts from step 0 and saves its state to {args.checkpoint}"
                ),
                flush=True,
            )
    train(args, model, optimizer, done)
    prints = bps.all_gather_object(fingerprint(model))
    same = len(set(prints)) == 1
    if first:
        print(f"a sample:\n{sample(model, args)}\n--")
        print(
            (
                f"weights {prints[0]} are the same on all workers"
                if same
                else f"weights DIFFER: {prints}"
            ),
            flush=True,
        )
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
