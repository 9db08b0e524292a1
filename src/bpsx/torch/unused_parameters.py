"""How many workers have a gradient of each parameter, and train it at all: a small sum that travels
beside the gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bpsx.torch.ops import submit

PREFIX = "Used."
#: Before every gradient: all workers wait for it, and it is small.
_FIRST = 2**30


class Count(NamedTuple):
    """Of workers: those with a gradient of a parameter, those that train it (``requires_grad``),
    those that have frozen it.
    """

    used: int
    trained: int
    frozen: int


class Users:
    """The sum under way of three flags per parameter.

    All workers give the same parameters in the same order, under the same ``name``.

    ``used``: for each, whether this worker has a gradient of it; ``trained``: whether it trains it.
    Begun without waiting, so that it costs a message and no time. Raises
    :class:`~bpsx.errors.NotInitializedError`.
    """

    def __init__(self, used: list[bool], trained: list[bool], name: str) -> None:
        self._numbers = torch.zeros(len(used), 3, dtype=torch.int32, device="cpu")
        for column, flags in enumerate((used, trained)):
            self._numbers[:, column] = 1 if all(flags) else torch.tensor(flags, device="cpu")
        self._numbers[:, 2] = 1 - self._numbers[:, 1]
        self._handle = submit(
            self._numbers, self._numbers, PREFIX + name, average=False, priority=_FIRST
        )

    def done(self) -> bool:
        """Whether the sum has ended, well or not. Does not block."""
        return self._handle.done()

    @property
    def differ(self) -> bool:
        """Whether there is a parameter that some train and some have frozen. After :meth:`wait`."""
        return bool(self._numbers[:, 1:].all(dim=1).any())

    @property
    def agree(self) -> bool:
        """Whether each parameter has a gradient on some worker, and none is trained by some and
        frozen by others.

        After :meth:`wait`.
        """
        return bool(self._numbers[:, 0].all()) and not self.differ

    def wait(self) -> None:
        """Wait for the sum. May be called again. Raises what made it fail."""
        self._handle.wait()

    @property
    def counts(self) -> list[Count]:
        """Of each parameter. After :meth:`wait`."""
        return [Count(*numbers) for numbers in self._numbers.tolist()]
