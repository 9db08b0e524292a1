"""Check in an owner's first step that all workers mean the same: names, their order, and equal
weights to begin with.

Each worker puts two digests into its own row of a small sum, so that all see all rows and come to
the same verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

#: Under this, with a name of the owner's, rows are exchanged.
PREFIX = "Digest of "
#: Elements of each tensor that are compared, evenly spread over it.
SAMPLES = 64
_MASK = 2**63 - 1
#: Of a row. 0: this worker says nothing.
COLUMNS = 2


def digest(parts: Iterable[bytes]) -> int:
    """63 bits, never 0, that depend on all ``parts`` and their order."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return int.from_bytes(state.digest(), "little") & _MASK or 1


def meaning_of(names: Iterable[str]) -> int:
    """The digest of names in order. Shapes and dtypes are compared when each name is declared."""
    return digest(name.encode() for name in names)


def stride_of(elements: int) -> int:
    """Every how many-th element of a tensor is compared."""
    return max(1, elements // SAMPLES)


def odd_ones(column: Sequence[int]) -> tuple[int, list[int]]:
    """The first worker that says anything, and those that say something else."""
    told = [rank for rank, value in enumerate(column) if value]
    return (
        (told[0], [rank for rank in told if column[rank] != column[told[0]]]) if told else (0, [])
    )


def meaning_problem(rows: Sequence[Sequence[int]], what: str, here: str) -> str:
    """The error if workers have another meaning of the owner's names. ``here``: what this worker
    has, for people."""
    first, others = odd_ones([row[0] for row in rows])
    if not others:
        return ""
    return (
        f"{what}: {_workers(others)} other names of parameters, or the same in another order, than "
        f"worker {first}: names and their order must be the same on all workers, and so must be the "
        f"order in which unnamed optimizers are made. Here: {here}"
    )


def weights_problem(rows: Sequence[Sequence[int]], what: str, call: str) -> str:
    """What to say if weights differ; empty if not. ``call``: what makes them equal."""
    first, others = odd_ones([row[1] for row in rows])
    if not others:
        return ""
    return (
        f"{what}: {_workers(others)} other weights than worker {first} before the first step, and "
        "will keep them: averaged gradients do not make "
        f"weights equal. Call {call} on all workers before training (BPSX_CHECK_WEIGHTS=off if "
        "they shall differ)"
    )


def _workers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]} has"
    shown = ", ".join(map(str, ranks[:10]))
    return f"workers {shown}{', …' * (len(ranks) > 10)} have"
