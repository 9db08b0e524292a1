"""Training that continues from its checkpoint, for tests of torchrun.

As a script it is the worker: ``script.py FAULTS``. FAULTS is a JSON list of [step, rank, "kill" or
"raise"]: each happens once, after that step on that rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

STEPS = 6


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def take(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int = 0, size: int = 1
) -> None:
    """Make one step on this worker's part of the step's batch."""
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[
        rank::size
    ]
    optimizer.zero_grad()
    (model(batch[:, :4]) - batch[:, 4:]).square().mean().backward()
    optimizer.step()


def reference() -> list[torch.Tensor]:
    """Return the weights after the same training in one process."""
    model, optimizer = make()
    for step in range(STEPS):
        take(model, optimizer, step)
    return [p.detach() for p in model.parameters()]


def fail(step: int, rank: int) -> None:
    for at, who, how in json.loads(sys.argv[1]):
        happened = Path(f"fault-{at}")
        if (step, rank) == (at, who) and not happened.exists():
            happened.touch()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"worker {rank} has had enough at step {step}")


@record
def main() -> None:
    import bpsx.torch as bps
    from bpsx.api.verbs import session

    torch.set_num_threads(1)
    dist.init_process_group("bpsx")
    rank, size, config = bps.rank(), bps.size(), session().config
    model, optimizer = make()
    kept = (
        torch.load("state.pt", weights_only=True)
        if rank == 0 and os.path.exists("state.pt")
        else None
    )
    kept = bps.broadcast_object(kept, root_rank=0, name="kept")
    if kept is not None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    done = kept["step"] if kept is not None else 0
    facts = [
        done,
        rank,
        size,
        config.num_worker,
        config.servers,
        config.root_uri,
        hashlib.sha256(str(config.secret).encode()).hexdigest(),
    ]
    # in one write, because torchrun's workers share a pipe
    sys.stdout.write(f"BEGINS {json.dumps(facts)}\n")
    sys.stdout.flush()
    outer = nn.parallel.DistributedDataParallel(model)
    for step in range(done, STEPS):
        if step % 2:  # replace the group and the wrapping module during training
            dist.destroy_process_group()
            dist.init_process_group("bpsx")
            outer = nn.parallel.DistributedDataParallel(model)
        take(outer, optimizer, step, rank, size)
        if rank == 0:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                },
                "state.new",
            )
            os.replace("state.new", "state.pt")
        fail(step, rank)
    torch.save([p.detach() for p in model.parameters()], f"weights-{rank}.pt")


if __name__ == "__main__":
    main()
