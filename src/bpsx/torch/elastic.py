"""Training with PyTorch that goes on when workers are lost or join.

Set ``BPSX_ELASTIC=shrink`` on all processes. docs/train/uneven-and-elastic.md has an example.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from bpsx.api.lifecycle import initialised
from bpsx.api.verbs import rank, size
from bpsx.errors import ConfigError
from bpsx.plugin import elastic
from bpsx.plugin.elastic import Departed, HostsUpdatedInterrupt, leave, run, steps_of
from bpsx.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from bpsx.torch.objects import broadcast_object
from bpsx.torch.ops import push_pull
from bpsx.torch.optimizer import _DistributedOptimizer

__all__ = [
    "Departed",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "State",
    "TorchState",
    "leave",
    "run",
    "steps",
]


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """Divides the rest of an epoch among the workers, anew when workers join or are lost.

    After each batch call :meth:`record_batch`; after each epoch :meth:`set_epoch`. As a value of
    :class:`TorchState` it learns what other workers have processed. Not thread-safe.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """``shuffle``: in an order that depends on ``seed`` and the epoch."""
        self.dataset, self.shuffle, self.seed, self.epoch = dataset, shuffle, seed, 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing has been processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this worker has processed batch ``batch_idx`` of its iteration."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that ``indices`` of the dataset have been processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The indices of batch ``batch_idx`` of this worker's iteration."""
        first = batch_idx * batch_size
        return self._mine[first : first + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch and what has been processed."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the workers that are there now."""
        self.rank, self.num_replicas = (rank(), size()) if initialised() else (0, 1)
        done = self.processed_indices
        left = [i for i in range(len(self.dataset)) if i not in done]
        self.remaining_indices = left
        self.num_samples = math.ceil(len(left) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        if self.shuffle:
            order = torch.Generator().manual_seed(self.seed + self.epoch)
            left = [left[i] for i in torch.randperm(len(left), generator=order).tolist()]
        # All workers get equally many: the last ones repeat the first.
        filled = (left * math.ceil(self.total_size / len(left)) if left else [])[: self.total_size]
        self._mine = filled[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)

    def _merge(self, name: str) -> None:
        """Learn what all other workers have processed, and the epoch of rank 0."""
        self.epoch = broadcast_object(self.epoch, 0, f"{name}.epoch")
        done = torch.zeros(len(self.dataset), dtype=torch.int32)
        done[list(self.processed_indices)] = 1
        everybody = push_pull(done, average=False, name=f"{name}.processed")
        self.processed_indices = set(everybody.nonzero().flatten().tolist())
        self.reset()


class State(elastic.State):
    """Values that all workers have to agree on, as attributes.

    Tensors, NumPy arrays, numbers and text travel plainly; a tensor stays on this worker's device.
    Other objects are pickled, which needs a job secret. Objects with a ``state_dict``, as models,
    need a :class:`TorchState`. See :class:`bpsx.plugin.elastic.State` for the methods.
    """

    _INSTEAD = "Use a TorchState"

    @staticmethod
    def _is_part(value: Any) -> bool:
        return all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))

    def _broadcast(self, values: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = broadcast_object(values, 0, "elastic")
        for name, mine in values.items():
            if isinstance(mine, torch.Tensor) and isinstance(found[name], torch.Tensor):
                found[name] = found[name].to(mine.device)
        return found


class TorchState(State, elastic.PartsState):
    """Models, optimizers, samplers and other values that all workers have to agree on.

    ``model``: an :class:`torch.nn.Module`; ``optimizer``: an optimizer, also a
    :class:`bpsx.torch.DistributedOptimizer`. Both may also be among ``more``, under any names, as
    may an :class:`ElasticSampler`, which learns what all workers have processed, and other objects
    with ``state_dict()`` and ``load_state_dict()``: learning-rate schedulers, gradient scalers.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **more: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ConfigError(f"TorchState: model is {type(model).__name__}; expected a Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"TorchState: optimizer is {type(optimizer).__name__}; expected an Optimizer"
            )
        parts = {name: part for name, part in {**given, **more}.items() if self._is_part(part)}
        super().__init__(parts, {n: value for n, value in more.items() if n not in parts})

    def _settle(self) -> None:
        """Wait for gradients in flight, before workers join that have not pushed any.

        The backward pass of a GAN's generator pushes gradients of the discriminator, which wait for
        its next ``zero_grad()``.
        """
        for part in self._parts.values():
            if isinstance(part, _DistributedOptimizer):
                part._exchange.wait_before_read()

    def _copied(self, part: Any) -> Any:
        return copy.deepcopy(part.state_dict())

    def _put_back(self, part: Any, kept: Any) -> None:
        part.load_state_dict(copy.deepcopy(kept))

    def _send(self, name: str, part: Any) -> None:
        if isinstance(part, torch.nn.Module):
            broadcast_parameters(part.state_dict(), 0, prefix=f"{name}.")
        elif isinstance(part, torch.optim.Optimizer):
            broadcast_optimizer_state(part, 0, prefix=f"{name}.")
        elif isinstance(part, ElasticSampler):
            part._merge(name)
        else:
            told = broadcast_object(part.state_dict(), 0, name)
            if rank() != 0:
                part.load_state_dict(told)

    def regroup(self) -> None:
        """Let samplers divide what is left among the workers that are there now.

        Elements that a lost worker has processed since the last :meth:`sync` count as left.
        """
        for name, part in self._parts.items():
            if isinstance(part, ElasticSampler):
                part._merge(f"elastic.{name}")


def steps(number: int, *given: Any, **more: Any) -> Iterator[int]:
    """Return the numbers of the steps of a training loop, for jobs whose workers come and go.

    ``given`` and ``more``: a :class:`State`, or the arguments of :class:`TorchState`, such as
    ``steps(1000, model, optimizer)``. See :func:`bpsx.elastic.steps`.
    """
    return steps_of(TorchState, number, given, more)
