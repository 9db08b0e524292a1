"""torchft's processes in ``bench elastic --only committed``: the lighthouse, and its workers.

Each worker is a replica group of its own. The timeouts are those of torchft's example train_ddp.py,
the lighthouse's those of its README for Slurm.
"""

from __future__ import annotations

import datetime
import importlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.child import serve
from bench.diary import Writer
from bench.elastic_member import Slowly
from bench.roll_call import RATE, SIZES

_kept: list[Any] = []  # torchft's servers end when they are collected


def start_lighthouse() -> str:
    """Start the lighthouse; returns its address."""
    coordination = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000
    )
    _kept.append(lighthouse)
    return str(lighthouse.address())


def train(number: int, lighthouse: str, diary: str, steps: int, seconds: float) -> None:
    """Make steps until the job has committed ``steps``, each with ``seconds`` of computation."""
    torchft: Any = importlib.import_module("torchft")
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(torch.linspace(-1, 1, n) for n in SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=datetime.timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker_{number}",
        hostname="127.0.0.1",
    )
    _kept.extend([store, manager])
    writer = Writer(diary)
    for step in _steps(manager, steps):
        writer.begun(step)
        manager.start_quorum()
        optimizer.zero_grad()
        work = [manager.allreduce(gradient) for gradient in _gradients(model, seconds / len(SIZES))]
        for exchange in work:
            exchange.wait()
        if manager.should_commit():
            optimizer.step()
            writer.ended(step, 0, [manager.num_participants()])


def _steps(manager: Any, steps: int) -> Iterator[int]:
    while manager.current_step() < steps:
        yield manager.current_step()


def _gradients(model: torch.nn.ParameterList, seconds: float) -> list[torch.Tensor]:
    """Compute all gradients; it takes ``seconds`` for each."""
    torch.stack([Slowly.apply(p, seconds).sum() for p in model]).sum().backward()
    return [p.grad for p in model if p.grad is not None]


if __name__ == "__main__":
    serve({"lighthouse": start_lighthouse, "train": train, "now": time.monotonic})
