"""Tensor declarations of the whole job. Pure; owned by the hub's only thread.

The n-th declaration of a name on one worker must equal the n-th on every other: same shape, same
dtype, same compression. The first declaration causes the placement. A later one that differs is a
mismatch, reported to every worker that has declared the tensor or will.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bpsx.dtypes import BY_CODE
from bpsx.errors import Status
from bpsx.planning.placement import PARTS_PER_TENSOR, Assignment, Placement
from bpsx.scheduler.resizing import original_of


@dataclass
class RegisteredTensor:
    """One generation of a name: the n-th declaration of it on each worker.

    ``places``: as given out first. They stay the same when a server is lost: workers apply the
    moves of all terms to them (:mod:`bpsx.scheduler.terms`).
    """

    nbytes: int
    dtype: int
    shape: tuple[int, ...]
    codec: str  # compression as spec.py writes it; "" for none
    ranks: dict[int, None]  # ranks of the workers that have declared it, in this order
    places: list[Assignment] = field(default_factory=list)
    failure: str = ""
    status: int = 0  # errors.Status of `failure`; 0: none

    @property
    def first(self) -> str:
        """The first worker that has declared it, as text for messages."""
        return f"worker {next(iter(self.ranks))}" if self.ranks else "a worker that was lost"

    def describe(self) -> str:
        """Dtype, shape and compression, as text for messages."""
        dtype = BY_CODE[self.dtype].name if self.dtype in BY_CODE else f"dtype {self.dtype}"
        return f"{dtype} of shape {self.shape}" + (
            f", compressed with {self.codec}" if self.codec else ""
        )


class Registry:
    """All declared tensors."""

    def __init__(self, placement: Placement, partition_bytes: int, processes: int = 1) -> None:
        """``processes``: workers per machine if the last of them speaks for all to the servers."""
        self._placement = placement
        self._partition_bytes = partition_bytes
        self._processes = processes
        self._tensors: dict[tuple[str, int], RegisteredTensor] = {}
        self._placed = 0  # number of tensors placed so far, never reset
        # Root -> tensors that only its neighbours have declared.
        self._unadopted: dict[int, dict[tuple[str, int], RegisteredTensor]] = {}

    def declare(
        self,
        rank: int,
        name: str,
        generation: int,
        nbytes: int,
        dtype: int,
        shape: Sequence[int],
        codec: str = "",
        pieces: Sequence[int] = (),
    ) -> tuple[RegisteredTensor, list[int]]:
        """Record that worker ``rank`` declares a tensor.

        ``pieces``: bytes of the factors that are summed in its place, or of a tensor that is sent
        in halves; they have the partitions of uncompressed tensors, one behind the other.

        Returns its state and the ranks to notify. If ``failure`` is set, those ranks must receive
        the failure; otherwise the one rank must receive the places.
        """
        wanted = RegisteredTensor(nbytes, dtype, tuple(shape), codec, {rank: None})
        known = self._tensors.get((name, generation))
        if known is None:
            if nbytes > PARTS_PER_TENSOR * self._partition_bytes:
                wanted.failure, wanted.status = (
                    (
                        f"tensor {name!r} of {nbytes} bytes has too many partitions: raise"
                        " BYTEPS_PARTITION_BYTES"
                    ),
                    Status.MISMATCH,
                )
            else:
                for piece in pieces or [nbytes]:
                    # A lane works longer on each byte of what is compressed, also in halves or as
                    # factors, and such tensors get no successor when links change.
                    wanted.places += self._placement.place(
                        self._placed,
                        piece,
                        bool(codec) and not pieces,
                        len(wanted.places),
                        all_lanes=bool(codec),
                    )
                self._placed += 1
            self._tensors[name, generation] = wanted
            self._note(rank, name, generation, wanted)
            return wanted, [rank]
        told = [rank]
        if not known.failure and (known.dtype, known.shape, known.nbytes, known.codec) != (
            dtype,
            wanted.shape,
            nbytes,
            codec,
        ):
            known.failure = (
                f"tensor {name!r}: {known.first} has {known.describe()}, worker"
                f" {rank} has {wanted.describe()}; all workers must use the same shape, dtype and"
                " compression for one name"
            )
            known.status = Status.MISMATCH
            told += [r for r in known.ranks if r != rank]
        known.ranks.setdefault(rank)
        self._note(rank, name, generation, known)
        return known, told

    def succeed(self, name: str, generation: int, successor: int) -> list[Assignment]:
        """Place a tensor's successor, a generation of its name that all its workers know at once.

        Returns its places. The tensor has been placed, and its partitions are not compressed.
        """
        known = self._tensors[name, generation]
        follower = RegisteredTensor(
            known.nbytes, known.dtype, known.shape, known.codec, dict(known.ranks)
        )
        follower.places = self._placement.place(self._placed, known.nbytes)
        self._placed += 1
        self._tensors[name, successor] = follower
        return follower.places

    def drop(self, name: str, generation: int) -> None:
        """Forget a successor that no worker has used."""
        self._tensors.pop((name, generation), None)

    def tensor(self, name: str, generation: int) -> RegisteredTensor | None:
        """Return a declared tensor; None if it is unknown or has failed."""
        known = self._tensors.get((name, generation))
        return known if known is not None and not known.failure else None

    def restore(
        self, tensors: Mapping[tuple[str, int], RegisteredTensor], largest_key: int
    ) -> None:
        """Go on from the declarations that an earlier scheduler has answered.

        ``largest_key``: of those that it may have given out; -1: none.
        """
        self._tensors = dict(tensors)
        self._placed = largest_key // PARTS_PER_TENSOR + 1
        for (name, generation), known in self._tensors.items():
            for rank in known.ranks:
                self._note(rank, name, generation, known)

    def _note(self, rank: int, name: str, generation: int, declared: RegisteredTensor) -> None:
        """Update the list of tensors that a machine's root must adopt when it joins."""
        if self._processes == 1:
            return
        root = rank // self._processes * self._processes + self._processes - 1
        if root in declared.ranks or declared.failure:
            self._unadopted.get(root, {}).pop((name, generation), None)
        else:
            self._unadopted.setdefault(root, {})[name, generation] = declared

    def adopt(self, root: int) -> list[tuple[str, int, RegisteredTensor]]:
        """Return the tensors that only the neighbours of worker ``root`` have declared.

        From then on, ``root`` counts as having declared them.
        """
        found = [
            (name, generation, d)
            for (name, generation), d in self._unadopted.pop(root, {}).items()
            if not d.failure
        ]
        for _, _, declared in found:
            declared.ranks.setdefault(root)
        return found

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget a lost machine's processes: their successors know none of its tensors."""
        for rank in ranks:
            self._unadopted.pop(rank, None)
            for known in self._tensors.values():
                known.ranks.pop(rank, None)

    def clear(self) -> None:
        """Void all declarations: the next declaration of a name is its first.

        Keys are not reused.
        """
        self._tensors.clear()
        self._unadopted.clear()

    def failed(self) -> list[tuple[tuple[str, int], RegisteredTensor]]:
        """The declarations that have failed."""
        return [(key, known) for key, known in self._tensors.items() if known.failure]

    def places(self, name: str, generation: int) -> list[Assignment]:
        """The places of a tensor's partitions; empty if it is unknown or has failed."""
        known = self._tensors.get((name, generation))
        return known.places if known is not None else []

    def describe(self, name: str, generation: int) -> str:
        """Name, dtype, shape and compression of a declared tensor, as text for messages."""
        known = self._tensors.get((name, generation))
        return repr(name) + (f" ({known.describe()})" if known is not None else "")

    def __len__(self) -> int:
        """The number of tensors; one and its successors count once. Any thread may ask."""
        return len({(name, original_of(generation)) for name, generation in list(self._tensors)})
