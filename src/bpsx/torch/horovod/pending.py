"""Handles of Horovod's operations, and their names on the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bpsx.errors import ConfigError
from bpsx.plugin import horovod
from bpsx.plugin.adapter import check_name
from bpsx.torch.dynamo import eager
from bpsx.torch.tensors import check_rows, check_tensor, unnamed


class Waitable(Protocol):
    """A part of an operation, in flight by itself."""

    def done(self) -> bool:
        """Return whether it has ended, successfully or not, without blocking."""

    def wait(self) -> Any:
        """Return its result. Raises the error that made it fail."""


class Pending:
    """Handle that the ``_async`` verbs return.

    It has parts in flight, and a function that computes the result from theirs. The first wait runs
    that function, once. Thread-safe.
    """

    def __init__(
        self, parts: Sequence[Waitable], finish: Callable[[list[Any]], Any] = tuple
    ) -> None:
        self._parts, self._finish = parts, finish
        self._lock = threading.Lock()
        self._finished = False
        self._result: Any = None

    def done(self) -> bool:
        """Return whether all parts have ended, successfully or not, without blocking."""
        # Ask every part: asking an all_gather of rows starts its second exchange.
        ended = [part.done() for part in self._parts]
        return all(ended)

    def wait(self) -> Any:
        """Return the result. May be called again. Raises the error of the first failed part."""
        results = [part.wait() for part in self._parts]
        with self._lock, torch.no_grad():
            if not self._finished:
                self._result, self._finished, self._parts = self._finish(results), True, ()
        return self._result

    def __call__(self) -> Any:
        """Same as :meth:`wait`: Horovod's sparse_allreduce_async returns a callable."""
        return self.wait()


@eager
def poll(handle: Pending) -> bool:
    """Return whether the operation has ended, without blocking.

    :func:`synchronize` does not block then.
    """
    return _checked(handle, "poll").done()


@eager
def synchronize(handle: Pending) -> Any:
    """Wait, and return the result.

    The result is a tensor, a tuple of tensors for a grouped operation, or (output, received splits)
    for an alltoall. May be called again. Raises as :func:`bpsx.torch.synchronize`.
    """
    return _checked(handle, "synchronize").wait()


def _checked(handle: Any, verb: str) -> Pending:
    if not isinstance(handle, Pending):
        raise ConfigError(
            f"{verb}: expected a handle, as the _async verbs return it, not {type(handle).__name__}"
        )
    return handle


def wire_name(verb: str, name: str | None, tensor: torch.Tensor, rows: bool = False) -> str:
    """Return the wire name of an operation; verbs do not share names.

    ``rows``: the first dimension may differ between workers.

    Raises :class:`ConfigError` if ``name`` is not a string, :class:`UnsupportedTensor`.
    """
    check_name(name, verb)
    check_tensor(tensor, f"{verb} of {name!r}" if name else verb)
    if rows:
        check_rows(tensor, verb)
    return f"{verb}.{name}" if name else unnamed(verb, tensor, rows)


def group_names(verb: str, name: str | None, tensors: Sequence[torch.Tensor]) -> list[str | None]:
    """Return the names of a group's members.

    Raises :class:`ConfigError`, :class:`UnsupportedTensor`.
    """
    names = horovod.group_names(verb, name, tensors)
    for i, tensor in enumerate(tensors):
        check_tensor(tensor, f"{verb}: tensor {i}")
    return names


def needs_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether one of ``tensors`` requires a gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
