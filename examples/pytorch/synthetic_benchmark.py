"""Measure how many images or tokens a second a job trains on, with real models and synthetic data.

    bpsx-run --local --workers 2 --servers 1 python examples/pytorch/synthetic_benchmark.py \\
        --model resnet18 --quick
    torchrun --standalone --nproc-per-node 2 examples/pytorch/synthetic_benchmark.py \\
        --framework ddp-gloo --model gpt --batch-size 8

The gradients go through bpsx or, for comparison, PyTorch's gloo. An *iteration* is
``--num-batches-per-iter`` training steps; its rate is one sample. The script prints the mean of the
iterations and 1.96 standard deviations, for a worker and for all workers. The worker's figure is
its own; the total adds up the workers' figures. Compare frameworks on the same machines, with the
same options.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from models import MODELS, build, fingerprint, parameters_of
from torch import nn

import bpsx.torch as bps
from bpsx.torch.cross_barrier import CrossBarrier

FRAMEWORKS = {
    "bpsx": "bpsx's DistributedOptimizer",
    "ddp-hook": "PyTorch's DistributedDataParallel, bpsx's communication hook",
    "ddp-bpsx": 'PyTorch\'s DistributedDataParallel, backend "bpsx"',
    "ddp-gloo": 'PyTorch\'s DistributedDataParallel, backend "gloo"',
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=MODELS, default="resnet50", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        default="bpsx",
        help="; ".join(f"{name}: {what}" for name, what in FRAMEWORKS.items())
        + " (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        default=32,
        help="images (for a GPT: texts) per worker and step (default: %(default)s)",
    )
    parser.add_argument(
        "--num-warmup-batches",
        type=int,
        default=10,
        help="first steps, which are not counted (default: %(default)s)",
    )
    parser.add_argument(
        "--num-batches-per-iter", type=_positive, default=10, help="(default: %(default)s)"
    )
    parser.add_argument("--num-iters", type=_positive, default=10, help="(default: %(default)s)")
    parser.add_argument(
        "--image-size",
        type=_positive,
        help="width and height of the images in pixels (default: as the model was published)",
    )
    parser.add_argument(
        "--sequence",
        type=_positive,
        help="tokens per text (default: the most that the model takes)",
    )
    parser.add_argument(
        "--num-classes",
        type=_positive,
        help="classes (for a GPT: tokens of the vocabulary; default: as the model was published)",
    )
    parser.add_argument("--fp16-pushpull", action="store_true", help="send gradients as float16")
    parser.add_argument(
        "--cross-barrier",
        action="store_true",
        help="with bpsx: CrossBarrier instead of DistributedOptimizer",
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        help="torch threads of one worker (default: PyTorch's choice; 1 with --quick)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=(
            "few small images: seconds instead of minutes; other options that are given override it"
        ),
    )
    args = parser.parse_args()
    kind = MODELS[args.model]
    parser.set_defaults(image_size=kind.image, sequence=kind.sequence, num_classes=kind.classes)
    if args.quick:
        parser.set_defaults(
            batch_size=4,
            num_warmup_batches=2,
            num_batches_per_iter=2,
            num_iters=3,
            threads=1,
            image_size=min(kind.image, 32),
            sequence=min(kind.sequence, 64),
        )
    args = parser.parse_args()
    if args.cross_barrier and args.framework != "bpsx":
        parser.error(f"--cross-barrier needs --framework bpsx, not {args.framework}")
    if kind.sequence and args.sequence > kind.sequence:
        parser.error(
            f"--sequence {args.sequence}: {args.model} takes {kind.sequence} tokens at most"
        )
    if args.model == "mlp" and args.image_size != kind.image:
        parser.error(f"--image-size {args.image_size}: mlp takes {kind.image} only")
    return args


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer from 1")
    return number


class Training:
    """A model that trains on one batch again and again.

    ``bare`` is the model without its wrapper.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        torch.manual_seed(0)
        self.bare = self._model = build(args.model, args.num_classes)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.01)
        (self._with_bpsx if args.framework == "bpsx" else self._with_ddp)()
        source = torch.Generator().manual_seed(bps.rank())
        if MODELS[args.model].sequence:
            text = torch.randint(
                args.num_classes, (args.batch_size, args.sequence + 1), generator=source
            )
            self._input, self._target = text[:, :-1], text[:, 1:].flatten()
        else:
            self._input = torch.randn(
                args.batch_size, 3, args.image_size, args.image_size, generator=source
            )
            self._target = torch.randint(args.num_classes, (args.batch_size,), generator=source)
        self.units = self._target.numel()  # this worker's images or tokens in a step

    def _with_bpsx(self) -> None:
        args = self._args
        compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
        named = list(self.bare.named_parameters())
        if args.cross_barrier:
            self.optimizer = CrossBarrier(
                self.bare, self.optimizer, named_parameters=named, compression=compression
            )
        else:
            self.optimizer = bps.DistributedOptimizer(
                self.optimizer, named_parameters=named, compression=compression
            )
        bps.broadcast_parameters(self.bare.state_dict(), root_rank=0)
        bps.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def _with_ddp(self) -> None:
        args = self._args
        dist.init_process_group("bpsx" if args.framework == "ddp-bpsx" else "gloo")
        model = nn.parallel.DistributedDataParallel(self.bare)
        if args.framework == "ddp-hook":
            compression = bps.Compression.fp16 if args.fp16_pushpull else bps.Compression.none
            model.register_comm_hook(bps.DDPHookState(compression=compression), bps.ddp_comm_hook)
        elif args.fp16_pushpull:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)
        self._model = model

    def step(self) -> None:
        self.optimizer.zero_grad()
        output = self._model(self._input)
        nn.functional.cross_entropy(output.flatten(0, -2), self._target).backward()
        self.optimizer.step()

    def end(self) -> None:
        """Complete the last step."""
        if self._args.cross_barrier:
            self.optimizer.synchronize()


def rates(training: Training, args: argparse.Namespace, unit: str) -> Iterator[float]:
    """Yield, for each iteration, this worker's rate per second."""
    first = bps.rank() == 0
    if first:
        print(f"warming up: {args.num_warmup_batches} steps", flush=True)
    for _ in range(args.num_warmup_batches):
        training.step()
    bps.barrier()
    for i in range(args.num_iters):
        begin = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            training.step()
        rate = training.units * args.num_batches_per_iter / (time.perf_counter() - begin)
        if first:
            print(
                f"iteration {i + 1:2}/{args.num_iters}: {rate:,.1f} {unit}/s per worker", flush=True
            )
        yield rate


def spread(samples: torch.Tensor) -> str:
    """Return the mean and the interval that would contain 95 % of normally distributed samples."""
    return f"{samples.mean().item():,.1f} +- {1.96 * samples.std(correction=0).item():,.1f}"


def main() -> int:
    args = options()
    if args.threads:
        torch.set_num_threads(args.threads)
    bps.init()
    first, size, unit = bps.rank() == 0, bps.size(), MODELS[args.model].unit
    training = Training(args)
    if first:
        what = (
            f"pictures of {args.image_size} x {args.image_size}"
            if args.image_size
            else f"texts of {args.sequence} tokens"
        )
        how = FRAMEWORKS[args.framework] + (", CrossBarrier" if args.cross_barrier else "")
        print(
            f"{size} {'worker' if size == 1 else 'workers'}, {how}\n{args.model}:"
            f" {parameters_of(training.bare):,} parameters; batches of {args.batch_size} {what} for"
            " each worker",
            flush=True,
        )
    mine = torch.tensor(list(rates(training, args, unit)), dtype=torch.float64)
    training.end()
    total = bps.push_pull(mine, average=False, name="rates")
    same = len(set(bps.all_gather_object(fingerprint(training.bare)))) == 1
    if first:
        print(f"{unit}/s per worker: {spread(mine)}")
        print(f"total {unit}/s on {size} {'worker' if size == 1 else 'workers'}: {spread(total)}")
        print(f"weights {'are the same' if same else 'DIFFER'} on all workers", flush=True)
    with contextlib.suppress(AssertionError, ValueError):
        dist.destroy_process_group()
    bps.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
