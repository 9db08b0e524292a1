"""The workers that a job still has, for scripts that divide data among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bpsx.errors import ConfigError, PeerLostError


class Company:
    """The living workers of a job, as one of them sees it.

    Worker numbers never change; messages and logs show them. Scripts see places among the living
    workers in the order of entry, without gaps. All see a change at the same moment, if they have
    boundaries. One thread calls :meth:`lose` and :meth:`enter`,
    any thread the others.
    """

    def __init__(self, number: int, numbers: Sequence[int]) -> None:
        """``number``: this worker's. ``numbers``: those of all, in the order of entry."""
        self._number, self._living = number, list(numbers)
        self._shown = self._living  # as the script sees them
        #: A call in use that needs all workers, so that a loss ends the job; "": there is none.
        self.needed_by = ""

    def lose(self, numbers: Collection[int]) -> None:
        """Remove lost workers."""
        self._living = [number for number in self._living if number not in numbers]

    def enter(self, numbers: Collection[int]) -> None:
        """Add workers that join the job."""
        old = [number for number in self._living if number not in numbers]
        self._living = [*old, *numbers]

    @property
    def all_shown(self) -> bool:
        """Whether the script sees the workers that live now."""
        return self._shown == self._living

    def show(self) -> None:
        """Let the script see the workers that live now."""
        self._shown = self._living

    @property
    def has_me(self) -> bool:
        """Whether the script sees this worker; False on a newcomer until its TERM."""
        return self._number in self._shown

    @property
    def rank(self) -> int:
        """This worker's place."""
        return self._shown.index(self._number)

    @property
    def size(self) -> int:
        """Number of living workers."""
        return len(self._shown)

    def place(self, number: int, what: str) -> int:
        """The place of worker ``number``.

        Raises :class:`~bpsx.errors.PeerLostError`, which names ``what``, if it has been lost.
        """
        shown = self._shown
        if number not in shown:
            raise PeerLostError(f"{what}: worker {number} has been lost")
        return shown.index(number)

    def number(self, rank: int, what: str) -> int:
        """The number of the worker in place ``rank``.

        Raises :class:`~bpsx.errors.ConfigError`, which names ``what``, if a worker has been lost
        meanwhile and there is no such place any more.
        """
        shown = self._shown
        if rank >= len(shown):
            raise ConfigError(f"{what}: rank {rank}; expected 0 to {len(shown) - 1}")
        return shown[rank]
