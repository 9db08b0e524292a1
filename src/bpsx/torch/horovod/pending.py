"""Operations under way, and the names that they have on the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bpsx.errors import ConfigError
from bpsx.plugin.adapter import check_name
from bpsx.torch.dynamo import eager
from bpsx.torch.ops import check_rows, check_tensor, unnamed


class Part(Protocol):
    """Something that is under way by itself."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not block."""

    def wait(self) -> Any:
        """Its result. Raises what made it fail."""


class Pending:
    """What the ``_async`` verbs return: parts under way, and what makes the result of theirs, done
    once by whoever waits first.

    Thread-safe.
    """

    def __init__(self, parts: Sequence[Part], finish: Callable[[list[Any]], Any] = tuple) -> None:
        self._parts, self._finish = parts, finish
        self._lock = threading.Lock()
        self._finished = False
        self._result: Any = None

    def done(self) -> bool:
        """Whether all parts have ended, well or not. Does not block."""
        # of each, since asking a gather of rows lets it go on
        ended = [part.done() for part in self._parts]
        return all(ended)

    def wait(self) -> Any:
        """The result. May be called again. Raises what made the first part fail."""
        results = [part.wait() for part in self._parts]
        with self._lock, torch.no_grad():
            if not self._finished:
                self._result, self._finished, self._parts = self._finish(results), True, ()
        return self._result

    def __call__(self) -> Any:
        """As :meth:`wait`: what Horovod's sparse_allreduce_async returns is called."""
        return self.wait()


@eager
def poll(handle: Pending) -> bool:
    """Whether what ``handle`` stands for has ended, so that :func:`synchronize` does not block.

    Does not block itself.
    """
    return _checked(handle, "poll").done()


@eager
def synchronize(handle: Pending) -> Any:
    """Wait, and return the result: a tensor; a tuple of tensors, of a grouped operation; (output,
    received splits), of an alltoall.

    May be called again. Raises as :func:`bpsx.torch.synchronize`.
    """
    return _checked(handle, "synchronize").wait()


def _checked(handle: Any, verb: str) -> Pending:
    if not isinstance(handle, Pending):
        raise ConfigError(
            f"{verb}: a handle is needed, as the _async verbs return it, not"
            f" {type(handle).__name__}"
        )
    return handle


def wire_name(verb: str, name: str | None, tensor: torch.Tensor, rows: bool = False) -> str:
    """What an operation is called on the wire: verbs do not share names.

    ``rows``: the first dimension may differ between workers.

    Raises :class:`ConfigError` for a name that is no string, :class:`UnsupportedTensor`.
    """
    check_name(name, verb)
    check_tensor(tensor, f"{verb} of {name!r}" if name else verb)
    if rows:
        check_rows(tensor, verb)
    return f"{verb}.{name}" if name else unnamed(verb, tensor, whole=not rows)


def group_names(verb: str, name: str | None, tensors: Sequence[torch.Tensor]) -> list[str | None]:
    """The names of a group's members. Raises :class:`ConfigError`, :class:`UnsupportedTensor`."""
    check_name(name, verb)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ConfigError(f"{verb}: a list of tensors is needed, not {type(tensors).__name__}")
    for i, tensor in enumerate(tensors):
        check_tensor(tensor, f"{verb}: tensor {i}")
    return [f"{name}.{i}" if name else None for i in range(len(tensors))]


def needs_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd follows one of ``tensors``."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
