"""First-step check of an owner: all workers must have equal names, in one order, and equal weights.

Each worker puts two digests into its own row of a small sum. So all workers see all rows and reach
the same verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bpsx.errors import MismatchError
from bpsx.plugin import adapter
from bpsx.system.tracebacks import warn

#: Rows are exchanged under this prefix and a name of the owner.
PREFIX = "Digest of "
#: Number of compared elements per tensor, evenly spread over it.
SAMPLES = 64
_MASK = 2**63 - 1
#: Columns of a row. A 0 means that this worker has nothing to compare.
COLUMNS = 2


def digest(parts: Iterable[bytes]) -> int:
    """Return 63 bits, never 0, that depend on all ``parts`` and their order."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return int.from_bytes(state.digest(), "little") & _MASK or 1


def meaning_of(names: Iterable[str]) -> int:
    """Return the digest of names in order. Declaring a name compares its shape and dtype."""
    return digest(name.encode() for name in names)


def digest_of(samples: Mapping[str, bytes]) -> int:
    """Return the digest of samples of weights, by label. 0: all are empty."""
    parts = [part for label in sorted(samples) for part in (label.encode(), samples[label])]
    return digest(parts) if any(samples.values()) else 0


def rows_of_all(name: str, own: Sequence[int]) -> list[list[int]]:
    """Return every worker's ``own`` 64-bit numbers, by worker number. Waits for all workers.

    A worker that has been lost has zeros. Raises as :func:`bpsx.push_pull`.
    """
    session = adapter.session()
    # Ranks change when a worker is lost, which the others notice at different moments.
    rows = np.zeros((session.config.places, len(own)), np.int64)
    rows[session.number] = own
    if session.config.asynchronous:  # a push_pull would add to the servers' values
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
    """Return elements of a contiguous array, evenly spread over it, as bytes."""
    flat = array.reshape(-1)
    return flat[:: stride_of(flat.size)].tobytes()


def stride_of(elements: int) -> int:
    """Return the stride between compared elements of a tensor with this many elements."""
    return max(1, elements // SAMPLES)


def odd_ones(column: Sequence[int]) -> tuple[int, list[int]]:
    """Return the first worker with a nonzero value, and the workers with another nonzero value."""
    told = [rank for rank, value in enumerate(column) if value]
    return (
        (told[0], [rank for rank in told if column[rank] != column[told[0]]]) if told else (0, [])
    )


class Subject(NamedTuple):
    """Texts that describe a comparison in error messages.

    ``what``: the owner of the names, which begins each message. ``here``: this worker's names, for
    people. ``call``: the call that makes weights equal. ``things``: the objects that have the
    names. ``order``: other actions that must happen in the same order on all workers.
    """

    what: str
    here: str
    call: str = ""
    things: str = "parameters"
    order: str = "unnamed optimizers are made"

    def judge(self, rows: Sequence[Sequence[int]]) -> tuple[str, str]:
        """Return two errors, empty where there is none: names differ, or only weights differ.

        ``rows``: of all workers, so all get the same result.
        """
        first, others = odd_ones([row[0] for row in rows])
        if others:
            return (
                f"{self.what}: {_workers(others)} other names of {self.things} than worker {first},"
                " or the same names in another order. Names, their order, and the order in which"
                f" {self.order} must be the same on all workers. This worker has: {self.here}",
                "",
            )
        first, others = odd_ones([row[1] for row in rows])
        if not others:
            return "", ""
        return (
            "",
            f"{self.what}: {_workers(others)} other weights than worker {first} before the first"
            " step. They stay different, because averaged gradients do not make weights equal. Call"
            f" {self.call} on all workers before training, or set BPSX_CHECK_WEIGHTS=off if they"
            " are meant to differ",
        )

    def compare(self, name: str, meaning: int, weights: int) -> tuple[str, str]:
        """Compare this worker's digests with all workers', and :meth:`judge`.

        ``name``: one of the owner's names, the same on all workers. ``weights`` 0: nothing to
        compare. Waits for all workers. Raises as :func:`bpsx.push_pull`.
        """
        return self.judge(rows_of_all(PREFIX + name, [meaning, weights]))


def tell(problem: str) -> None:
    """Raise :class:`MismatchError` that weights differ, or warn, as ``BPSX_CHECK_WEIGHTS`` says."""
    if problem and adapter.session().config.check_weights == "error":
        raise MismatchError(problem)
    if problem:
        warn(problem)


def _workers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]} has"
    shown = ", ".join(map(str, ranks[:10]))
    return f"workers {shown}{', …' * (len(ranks) > 10)} have"
