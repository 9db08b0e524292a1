"""A session without processes: it records what the PyTorch plugin sends.

Results arrive when a thread waits for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

import bpsx.torch as bps
from bpsx.plugin.adapter import Item, TensorView
from bpsx.plugin.exchange import KINDS
from bpsx.plugin.startup import PREFIX as DIGEST
from bpsx.torch.unused_parameters import PREFIX as USED

#: (name, this worker's values) -> sum of the other workers' values.
Others = Callable[[str, np.ndarray], np.ndarray]


def memory(view: TensorView) -> np.ndarray:
    """Return a view's memory as an array that writes through."""
    kind = np.dtype(ml_dtypes.bfloat16) if view.dtype == "bfloat16" else np.dtype(view.dtype)
    assert view.nbytes == int(np.prod(view.shape)) * kind.itemsize
    if view.nbytes == 0:
        return np.empty(view.shape, kind)
    return np.frombuffer((ctypes.c_char * view.nbytes).from_address(view.address), kind).reshape(
        view.shape
    )


@dataclass
class Push:
    """A call and its handle.

    The sum is computed when it is delivered, from the memory at that time.
    """

    session: FakeSession
    name: str
    source: TensorView
    target: TensorView
    result: Any
    average: bool = False
    priority: int = 0
    will_wait: bool = False
    root: int | None = None
    delivered: bool = False

    def done(self) -> bool:
        return self.delivered

    def wait(self, timeout: float | None = None) -> Any:
        if not self.delivered:
            self.delivered = True
            failure = self.session.failures.get(self.name)
            if failure is not None:
                raise failure
            self.session.deliver(self)
        return self.result


@dataclass(eq=False)  # as sessions: each is equal to itself only
class FakeSession:
    """Replacement for :class:`bpsx.session.session.Session`.

    By default the other workers push the same values and have gradients where this one has.
    ``others_use``: they have dense gradients for all parameters. ``failures``: errors of the waits,
    by name.
    """

    rank: int = 0
    size: int = 2
    distributed: bool = True
    asynchronous: bool = False
    shrinks: bool = False
    entries: int = 0
    others: Others | None = None
    others_use: bool = False
    bucket_bytes: int = 1 << 20
    failures: dict[str, Exception] = field(default_factory=dict)
    #: Errors of sums that cannot start in a bucket, by name.
    refusals: dict[str, Exception] = field(default_factory=dict)
    pushes: list[Push] = field(default_factory=list)
    declared: list[str] = field(default_factory=list)
    compressions: dict[str, object] = field(default_factory=dict)
    broadcasts: dict[str, bytes] = field(default_factory=dict)

    def require_all(self, what: str) -> None:
        """No worker is ever lost."""

    def group_of(self, names: Any, group: None = None) -> None:
        """Push_pulls are not committed in groups."""

    def seal(self, group: None) -> None:
        """As before."""

    @property
    def config(self) -> Any:
        return SimpleNamespace(
            distributed=self.distributed,
            asynchronous=self.asynchronous,
            check_weights="error",
            places=self.size,
        )

    @property
    def number(self) -> int:
        return self.rank

    @property
    def names(self) -> list[str]:
        return [p.name for p in self.pushes]

    def declare(self, name: str, compression: object = None, anew: bool = False) -> int:
        if name not in self.declared:
            self.declared.append(name)
        if compression is not None:
            self.compressions[name] = compression
        return self.declared.index(name)

    def push_pull(
        self,
        name: str,
        source: TensorView,
        target: TensorView,
        *,
        average: bool,
        priority: int = 0,
        will_wait: bool = False,
        result: object = None,
    ) -> Push:
        assert source.shape == target.shape and source.dtype == target.dtype
        if name.startswith((KINDS, USED, DIGEST)):
            return Push(self, name, source, target, result)
        self.pushes.append(Push(self, name, source, target, result, average, priority, will_wait))
        return self.pushes[-1]

    def push_pull_known(self, item: Item, average: bool) -> bool:
        view = TensorView(item.address, item.nbytes, item.dtype, item.shape, item.owner)
        item.begun = self.push_pull(item.name, view, view, average=average, priority=item.priority)
        return True

    def push_pull_all(
        self, items: list[Item], gpu: int, streams: Any, stream: int, *, average: bool
    ) -> None:
        for item in items:
            if item.name in self.refusals:
                item.begun = self.refusals[item.name]
            else:
                self.push_pull_known(item, average)

    @property
    def devices(self) -> Any:
        return SimpleNamespace(batch_bytes=self.bucket_bytes)

    def broadcast(self, name: str, view: TensorView, root: int, *, result: object = None) -> Push:
        """As root, keep the bytes; as another worker, replace them by those kept."""
        return Push(self, name, view, view, result, root=root)

    def deliver(self, push: Push) -> None:
        if push.root is not None:
            flat = memory(push.target).reshape(-1).view(np.uint8)
            if push.root == self.rank:
                self.broadcasts[push.name] = flat.tobytes()
                return
            ours = push.name.removesuffix(str(push.root)) + str(self.rank)
            flat[:] = np.frombuffer(
                self.broadcasts[push.name if push.name in self.broadcasts else ours], np.uint8
            )  # a gathering: the other workers have the same values
            return
        mine = memory(push.source)
        if push.name.startswith(DIGEST):
            memory(push.target)[...] = mine.max(axis=0)  # the other workers send the same
            return
        if push.name.startswith((KINDS, USED)):
            if self.others_use:
                flags = memory(push.target)
                (flags[0] if push.name.startswith(KINDS) else flags[:, 0])[...] += self.size - 1
            return
        wide = mine.astype(np.float64) if push.source.dtype in ("float16", "bfloat16") else mine
        rest = wide * (self.size - 1) if self.others is None else self.others(push.name, wide)
        total = wide + rest
        if push.average:
            total = total // self.size if total.dtype.kind in "iu" else total / self.size
        memory(push.target)[...] = total.astype(mine.dtype)


#: A model's input, and the names of its gradients.
DATA = torch.arange(12.0).reshape(4, 3) / 10
NAMES = ["Gradient.0.weight", "Gradient.0.bias", "Gradient.2.weight", "Gradient.2.bias"]


def network() -> nn.Sequential:
    """Return a network with the same weights each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(model: nn.Module, named: Any = "model", **options: Any) -> Any:
    """Return a distributed SGD for ``model``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return bps.DistributedOptimizer(
        optimizer, model.named_parameters() if named == "model" else named, **options
    )


def backward(model: nn.Module, scale: float = 1.0) -> None:
    """Compute gradients of a loss of ``DATA``."""
    (model(DATA).pow(2).sum() * scale).backward()
