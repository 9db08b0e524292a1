"""How waits for gradients end, and what stands in for one."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from bpsx.torch.unused_parameters import Users


class Waited(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> Any: ...


class Round:
    """One exchange of all gradients, from the first wait to its end.

    A wait may be interrupted: Ctrl-C, or whatever else a signal's handler raises. Then the round
    stays open, and who waits next goes on with it: what this worker has pushed and what it has not
    is the same as before. So it is cleared only when there is nothing left to wait for.
    """

    def __init__(self, failures: list[Exception]) -> None:
        self.failures: list[Exception | None] = [*failures]
        self.users: Users | None = None  # begun, not heeded
        self.frozen: set[int] = set()  # by id of Managed: what this worker does not push
        self.begun = False  # all that is sure to be pushed has been
        self.pushed = False  # everything else has been


def ended(operation: Waited) -> Exception | None:
    """Wait until ``operation`` has ended.

    Returns what made it fail, and raises what has interrupted the wait: then it is still under way.
    """
    try:
        operation.wait()
    except Exception as e:
        if not operation.done():
            raise
        return e
    return None


def raise_first(failures: list[Exception | None] | list[Exception]) -> None:
    """Raise the first of them, if any.

    The list is emptied: from its caller's frame, which the exception refers to, it would refer to
    the exception, and with it the optimizer and its hooks would live until the garbage collection.
    """
    first = next((f for f in failures if f is not None), None)
    failures.clear()
    if first is not None:
        try:
            raise first
        finally:
            del first


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """What a gradient of ``parameter`` would be that is zero; its dtype need not be the parameter's
    (PyTorch 2.10 and newer).
    """
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
