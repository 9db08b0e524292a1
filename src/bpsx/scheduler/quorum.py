"""Quorum of workers that may go on, so that a split network has at most one job. Pure.

docs/internals/elastic-scheduler.md has the rule. A scheduler that loses workers in silence cannot
tell whether they have died, or live on the other side of a split network, where another scheduler
may take their job over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def suffice(here: Collection[int], order: Sequence[int]) -> bool:
    """Whether the workers ``here`` may go on without the others of ``order``.

    ``order``: workers in the order of entry. More than half of them suffice, or half of them with
    the one that entered first.
    """
    found = [rank for rank in order if rank in here]
    return 2 * len(found) > len(order) or 2 * len(found) == len(order) and order[:1] == found[:1]


class Quorum:
    """The workers that a scheduler has lost in silence, and those that it still hears.

    With another scheduler, workers would count by the latest term of which one of them knows. So
    the job must have a quorum by each term since the last one of which all living workers know.
    """

    def __init__(self) -> None:
        self._orders: list[list[int]] = []  # the workers of each of those terms
        self._silent: set[int] = set()  # lost meanwhile

    def confirm(self, order: Iterable[int]) -> None:
        """Note that all living workers know ``order``: these workers, in the order of entry."""
        self._orders, self._silent = [list(order)], set()

    def change(self, order: Iterable[int]) -> None:
        """Note a term that begins with the workers ``order``, some of which may not hear of it."""
        self._orders.append(list(order))

    def lose(self, ranks: Iterable[int]) -> None:
        """Note workers of the job that were lost in silence."""
        self._silent.update(ranks)

    def holds(self, living: Collection[int], more: Collection[int] = ()) -> bool:
        """Whether the job may go on with ``living``.

        ``more``: workers that are just being lost in silence. Workers whose connections have ended
        have died, and do not count.
        """
        counted = self._silent.union(more, living)
        return all(
            suffice(living, [rank for rank in order if rank in counted]) for order in self._orders
        )
