"""A model without a framework: its gradients follow from its weights, so that any process can tell
what the weights of a job are after some steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

#: Elements of the tensors. "mixed": sent in batches, whole, and cut; "large": 100 MB.
SIZES = {"mixed": [3, 500, 2_000, 30_000, 200_000, 600_000], "large": [1_000_000] * 25}


def start_weights(sizes: Sequence[int]) -> list[np.ndarray]:
    return [np.linspace(-1, 1, n, dtype=np.float32) for n in sizes]


def next_weights(
    weights: list[np.ndarray],
    step: int,
    ranks: Sequence[int],
    exchange: Callable[[list[np.ndarray]], Iterable[np.ndarray]] = iter,
) -> None:
    """Do one step in place. ``exchange`` sums gradients with those of ranks not in ``ranks``."""
    gradients = []
    for w in weights:
        total = w * np.float32(0.1 * (ranks[0] + 1)) + np.float32(step % 100)
        for rank in ranks[1:]:
            total += w * np.float32(0.1 * (rank + 1)) + np.float32(step % 100)
        gradients.append(total)
    for w, gradient in zip(weights, exchange(gradients)):
        w -= np.float32(0.01) * gradient


def digest_after(model: str, steps: int, workers: int) -> str:
    """Return the SHA-256 of the weights after some steps of so many workers."""
    weights = start_weights(SIZES[model])
    for step in range(steps):
        next_weights(weights, step, range(workers))
    return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
