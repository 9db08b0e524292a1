"""State of one gradient exchange, and helpers to wait for it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from bpsx.torch.unused_parameters import UsageCount


class Waited(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> Any: ...


class ExchangeRound:
    """One exchange of all gradients, from the first wait to its end.

    A wait may be interrupted by Ctrl-C or another exception of a signal handler. Then the round
    stays open and the next wait resumes it, because what this worker has pushed has not changed. So
    a round is cleared only when nothing is left to wait for.
    """

    def __init__(self, failures: list[Exception]) -> None:
        self.failures: list[Exception | None] = [*failures]
        self.usage: UsageCount | None = None  # count in flight, not evaluated yet
        self.frozen: set[int] = set()  # ids of the Managed objects that this worker does not push
        self.begun = False  # all gradients that need no count have been pushed
        self.pushed = False  # all others have been pushed


def ended(operation: Waited) -> Exception | None:
    """Wait until ``operation`` has ended.

    Returns the exception that made it fail. If the wait is interrupted, raises the interruption;
    the operation is then still in flight.
    """
    try:
        operation.wait()
    except Exception as e:
        if not operation.done():
            raise
        return e
    return None


def raise_first(failures: list[Exception | None] | list[Exception]) -> None:
    """Raise the first exception in the list, if any, and empty the list.

    The exception refers to its caller's frame, and that frame to the list. A list that kept the
    exception would keep the optimizer and its hooks alive until the next garbage collection.
    """
    first = next((f for f in failures if f is not None), None)
    failures.clear()
    if first is not None:
        try:
            raise first
        finally:
            del first


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a zero gradient for ``parameter``.

    Its dtype need not be the parameter's (PyTorch 2.10 and newer).
    """
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
