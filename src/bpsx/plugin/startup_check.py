"""Check in an owner's first step that all workers mean the same: names, their order, and equal
weights to begin with.

Each worker puts two digests into its own row of a small sum, so that all see all rows and come to
the same verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from bpsx.plugin import adapter

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


def rows_of_all(name: str, own: Sequence[int]) -> list[list[int]]:
    """Every worker's ``own`` numbers, of 64 bits, by rank. Waits for all workers.

    Raises as :func:`bpsx.push_pull`.
    """
    session = adapter.session()
    rows = np.zeros((session.size, len(own)), np.int64)
    rows[session.rank] = own
    if session.config.asynchronous:  # there a push_pull adds to what servers keep
        for rank, row in enumerate(rows):
            of_one = f"{name}, of worker {rank}"
            session.broadcast(of_one, _view_of(row), rank, asynchronous=False).wait()
    else:
        view = _view_of(rows)
        session.push_pull(name, view, view, average=False, priority=1, will_wait=True).wait()
    found: list[list[int]] = rows.tolist()
    return found


def _view_of(rows: np.ndarray) -> adapter.TensorView:
    return adapter.TensorView(rows.ctypes.data, rows.nbytes, "int64", rows.shape, rows)


def sample_of(array: np.ndarray) -> bytes:
    """Elements of a contiguous array, evenly spread over it."""
    flat = array.reshape(-1)
    return flat[:: stride_of(flat.size)].tobytes()


def stride_of(elements: int) -> int:
    """Every how many-th element of a tensor is compared."""
    return max(1, elements // SAMPLES)


def odd_ones(column: Sequence[int]) -> tuple[int, list[int]]:
    """The first worker that says anything, and those that say something else."""
    told = [rank for rank, value in enumerate(column) if value]
    return (
        (told[0], [rank for rank in told if column[rank] != column[told[0]]]) if told else (0, [])
    )


def meaning_problem(
    rows: Sequence[Sequence[int]],
    what: str,
    here: str,
    things: str = "parameters",
    order: str = "unnamed optimizers are made",
) -> str:
    """The error if workers have another meaning of the owner's names. ``here``: what this worker
    has, for people; ``things``: what has the names; ``order``: what else has to come in one
    order."""
    first, others = odd_ones([row[0] for row in rows])
    if not others:
        return ""
    return (
        f"{what}: {_workers(others)} other names of {things}, or the same in another order, than"
        f" worker {first}: names and their order must be the same on all workers, and so must be"
        f" the order in which {order}. Here: {here}"
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
