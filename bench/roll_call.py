"""A model whose gradients tell which workers are in each sum, so that a job of any workers can be
checked: what they have after a step follows from who was in.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

#: Elements of the tensors, besides their heads. They are sent in batches, whole, and cut.
SIZES = (3, 500, 2_000, 30_000, 200_000, 600_000)
#: The learning rate; a power of two, so that a fused multiplication and addition rounds as two.
RATE = 1 / 128


def start_weights(places: int) -> list[np.ndarray]:
    """Return the first weights of a job with so many places for workers.

    Each tensor has a *head*: an element for each place, and one for the wish to stop.
    """
    return [np.linspace(-1, 1, n + places + 1, dtype=np.float32) for n in SIZES]


def gradient(
    weights: np.ndarray, step: int, number: int, places: int, stops: bool = False
) -> np.ndarray:
    """Return the gradient of the worker ``number`` for one tensor."""
    made = weights * np.float32(0.1 * (number + 1)) + np.float32(step % 100)
    made[: places + 1] = 0
    made[number], made[places] = 1, stops
    return made


def members(average: np.ndarray, places: int) -> int:
    """Return who is in the averaged gradient of a tensor: a bit for each place."""
    return int(sum(1 << i for i in np.flatnonzero(average[:places] > 0).tolist()))


def stops(average: np.ndarray, places: int) -> bool:
    """Whether a worker wished to stop in this step."""
    return bool(average[places] > 0)


def digest(weights: Iterable[np.ndarray], places: int) -> int:
    """Return the checksum of the weights without their heads."""
    found = 0
    for w in weights:
        found = zlib.crc32(np.ascontiguousarray(w[places + 1 :]), found)
    return found


def next_weights(weights: Sequence[np.ndarray], step: int, bits: int, places: int) -> None:
    """Do in place the step that the workers in ``bits`` make, summed in the order of numbers."""
    numbers = [i for i in range(places) if bits >> i & 1]
    for w in weights:
        total = gradient(w, step, numbers[0], places)
        for number in numbers[1:]:
            total += gradient(w, step, number, places)
        w -= np.float32(RATE) * (total / np.float32(len(numbers)))
