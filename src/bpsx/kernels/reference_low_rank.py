"""Oracle of PowerSGD: the whole step of all workers in plain NumPy, in float64.

Only tests import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bpsx.kernels.reference import GAMMA, splitmix64

_WORD = 2**64 - 1


def random_column(seed: int, counter: int, k: int, m: int) -> np.ndarray:
    """Return the random column k of a Q with m rows, before it is made orthonormal."""
    start = splitmix64(seed + splitmix64(counter + GAMMA & _WORD) & _WORD)
    words = [splitmix64(start + (j + 1) * GAMMA & _WORD) for j in range(k * m, (k + 1) * m)]
    return np.array([(word >> 11) * 2.0**-52 - 1 for word in words])


def straighten(v: np.ndarray, k: int, least: float) -> bool:
    """Make column k of ``v`` orthonormal to those before it; False, and zero, if it cannot be."""
    column = v[:, k]
    norm = np.linalg.norm(column)
    if norm == 0:
        return False
    column = column / norm
    for _ in range(2):
        for before in range(k):
            column = column - (column @ v[:, before]) * v[:, before]
        norm = np.linalg.norm(column)
        if norm <= least:
            v[:, k] = 0
            return False
        column = column / norm
    v[:, k] = column
    return True


def orthogonalise(p: np.ndarray, least: float = 1e-6) -> np.ndarray:
    """Return an orthonormal basis of P's columns; dependent ones are zero, all NaN if one is."""
    basis = p.astype(np.float64)
    if not np.isfinite(basis).all():
        return np.full_like(basis, np.nan)
    for k in range(basis.shape[1]):
        straighten(basis, k, least)
    return basis


def refresh(q: np.ndarray, seed: int, counter: int, least: float = 1e-6) -> np.ndarray:
    """Return the Q of the next step: a basis of the summed Q, with random dependent columns."""
    basis = q.astype(np.float64)
    for k in range(basis.shape[1]):
        if not straighten(basis, k, least):
            basis[:, k] = random_column(seed, counter, k, len(basis))
            straighten(basis, k, least)
    return basis


class LowRank:
    """PowerSGD of one tensor on all workers, seen as a matrix of (rows, columns)."""

    def __init__(
        self, workers: int, rows: int, columns: int, rank: int, seed: int, feedback: bool = True
    ) -> None:
        self.seed, self.feedback, self.counter = seed, feedback, 0
        self.q = refresh(np.zeros((columns, rank)), seed, 0)
        self.residuals = [np.zeros((rows, columns)) for _ in range(workers)]

    def step(self, gradients: Sequence[np.ndarray], divisor: float = 1) -> np.ndarray:
        """Return the sum of the workers' gradients divided by ``divisor``; updates the state."""
        pushed = [
            g.astype(np.float64).reshape(e.shape) + (e if self.feedback else 0)
            for g, e in zip(gradients, self.residuals, strict=True)
        ]
        p = orthogonalise(sum(m @ self.q for m in pushed) / divisor)
        own = [m.T @ p for m in pushed]
        q = sum(own) / divisor
        self.counter += 1
        if not np.isfinite(q).all():
            self.residuals = [np.zeros_like(e) for e in self.residuals]
            return np.full_like(p @ q.T, np.nan)
        self.q = refresh(q, self.seed, self.counter)
        self.residuals = [m - p @ mine.T for m, mine in zip(pushed, own, strict=True)]
        result: np.ndarray = p @ q.T
        return result
