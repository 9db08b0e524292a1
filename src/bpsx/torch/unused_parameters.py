"""Count of the workers that use and train each parameter.

It is a small sum that travels with the gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bpsx.torch.submit import submit

PREFIX = "Used."
#: Ahead of every gradient: all workers wait for the count, and it is small.
_FIRST = 2**30


class Count(NamedTuple):
    """Numbers of workers for one parameter.

    ``used``: workers with a gradient; ``trained``: workers that train it (``requires_grad``);
    ``frozen``: workers that have frozen it.
    """

    used: int
    trained: int
    frozen: int


class UsageCount:
    """Sum in flight of three flags per parameter.

    All workers pass the same parameters in the same order, under the same ``name``.

    ``used``: for each parameter, whether this worker has a gradient; ``trained``: whether this
    worker trains it. The constructor does not wait, so the count costs a message and no time.
    Raises :class:`~bpsx.errors.NotInitializedError`.
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
        """Return whether the sum has ended, successfully or not, without blocking."""
        return self._handle.done()

    @property
    def differ(self) -> bool:
        """Whether some workers train a parameter that others have frozen; after :meth:`wait`."""
        return bool(self._numbers[:, 1:].all(dim=1).any())

    @property
    def agree(self) -> bool:
        """Whether each parameter has a gradient on some worker, and none is frozen on some only.

        Valid after :meth:`wait`.
        """
        return bool(self._numbers[:, 0].all()) and not self.differ

    def wait(self) -> None:
        """Wait for the sum. May be called again. Raises the error that made it fail."""
        self._handle.wait()

    @property
    def counts(self) -> list[Count]:
        """The numbers of each parameter. Valid after :meth:`wait`."""
        return [Count(*numbers) for numbers in self._numbers.tolist()]
