"""How many workers have a gradient of each parameter: a small sum that travels beside the gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bpsx.torch.ops import submit

PREFIX = "Used."
#: Before every gradient: all workers wait for it, and it is small.
_FIRST = 2**30


class Users:
    """The sum under way of one flag per parameter. All workers give the same parameters in the same order, under the same ``name``.

    Begun without waiting, so that it costs a message and no time. Raises :class:`~bpsx.errors.NotInitializedError`.
    """

    def __init__(self, flags: Iterable[bool], name: str) -> None:
        self._numbers = torch.tensor([*flags], dtype=torch.int32)
        self._handle = submit(self._numbers, self._numbers, PREFIX + name, average=False, priority=_FIRST)

    def done(self) -> bool:
        """Whether the sum has ended, well or not. Does not block."""
        return self._handle.done()

    def wait(self) -> list[int]:
        """The number of workers with a gradient, for each parameter. May be called again. Raises what made the sum fail."""
        self._handle.wait()
        numbers: list[int] = self._numbers.tolist()
        return numbers
