"""Worker of ``bench elastic --only committed`` and of ``bench chaos``, which may die at any moment.

It trains with :func:`bpsx.torch.elastic.run`, so another one may join in its place. It writes each
step to a file (:mod:`bench.diary`), where its death does not take it away.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

import torch

import bpsx.torch as bps
from bench import roll_call
from bench.child import serve
from bench.diary import Writer


class Slowly(torch.autograd.Function):  # type: ignore[misc]
    """The identity. Its backward pass sleeps, in place of the computation of a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Member:
    """This worker: its model, and how it makes a step."""

    def __init__(self, number: int, places: int, seconds: float) -> None:
        """``seconds``: of the computation in a step, which is spread over the gradients."""
        self._number, self._places = number, places
        weights = roll_call.start_weights(places)
        self.model = torch.nn.ParameterList(map(torch.from_numpy, weights))
        self._each = seconds / len(weights)
        self.optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=roll_call.RATE),
            named_parameters=self.model.named_parameters(),
        )

    def step(self, step: int, stops: bool) -> bool:
        """Make a step. Returns whether a worker wished to stop."""
        self.optimizer.zero_grad()
        parts = []
        for p in self.model:
            of = roll_call.gradient(p.detach().numpy(), step, self._number, self._places, stops)
            parts.append((Slowly.apply(p, self._each) * torch.from_numpy(of)).sum())
        torch.stack(parts).sum().backward()
        self.optimizer.step()
        return any(roll_call.stops(p.grad.numpy(), self._places) for p in self.model)

    def members(self) -> list[int]:
        """Who is in the averages of the latest step, for each tensor."""
        return [roll_call.members(p.grad.numpy(), self._places) for p in self.model]

    def digest(self) -> int:
        return roll_call.digest((p.detach().numpy() for p in self.model), self._places)


def train(diary: str, steps: int, seconds: float, stop: str) -> None:
    """Make ``steps`` steps; fewer if there is a file ``stop``. Ends the process if that fails."""
    try:
        _train(Writer(diary), steps, seconds, stop)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _train(diary: Writer, steps: int, seconds: float, stop: str) -> None:
    torch.set_num_threads(1)
    bps.init()
    number, places = int(os.environ["DMLC_WORKER_ID"]), int(os.environ["DMLC_NUM_WORKER"])
    member = Member(number, places, seconds)
    state = bps.elastic.TorchState(model=member.model, optimizer=member.optimizer, step=0)

    @bps.elastic.run
    def make_steps(state: bps.elastic.State) -> None:
        while state.step < steps:
            diary.begun(state.step)
            over = member.step(state.step, os.path.exists(stop))
            diary.ended(state.step, member.digest(), member.members())
            state.step += 1
            if over:
                return
            state.check_host_updates()

    make_steps(state)
    bps.barrier()


def init() -> int:
    bps.init()
    return int(bps.rank())


if __name__ == "__main__":
    serve({"init": init, "train": train})
    bps.shutdown()
