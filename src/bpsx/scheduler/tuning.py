"""The scheduler's choices for a whole job: servers' shares, size of partitions, lanes. Pure.

docs/internals/autotune.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bpsx.config import AUTO, PARTITION_BYTES
from bpsx.planning.link_rate import LEAST, PROBE, lanes_needed, partition_size, rate_above
from bpsx.planning.load_balance import shares_by_host
from bpsx.planning.placement import LaneRule, Placement
from bpsx.scheduler.registry import RegisteredTensor
from bpsx.scheduler.resizing import Resizing


def divides_by_machine(
    options: Mapping[str, Any], workers: Sequence[str], servers: Sequence[str]
) -> bool:
    """Whether servers' shares depend on which machines have workers.

    ``options``: a worker's. ``workers``, ``servers``: their hosts. By default shares depend on
    machines if some servers have a machine of their own, and others do not.
    """
    given = options["BYTEPS_ENABLE_MIXED_MODE"]
    if given != AUTO:
        return bool(given)
    beside = sum(host in workers for host in servers)
    return options["BYTEPS_KEY_HASH_FN"] == "balanced" and 0 < beside < len(servers)


def shares(
    options: Mapping[str, Any], workers: Sequence[str], servers: Sequence[tuple[str, int]]
) -> list[float]:
    """Return the fraction of all bytes that each server should sum.

    ``options``: a worker's. ``workers``: host of each worker that speaks to servers. ``servers``:
    host and weight of each.
    """
    if divides_by_machine(options, workers, [host for host, _ in servers]):
        return shares_by_host(workers, servers)
    whole = sum(weight for _, weight in servers)
    return [weight / whole for _, weight in servers]


class PartitionTuning:
    """Chooses the partitions' size and lanes from what a job's workers measure.

    It decides when all workers have told their rates, or before that if one declares a tensor of
    its own. ``placement``: the job's; workers measure with small partitions.
    """

    def __init__(
        self, placement: Placement, most: int, workers: int, senders: int = 1, size: int = 0
    ) -> None:
        """``most``: bytes of a partition where links are fast. ``workers``: number of them.

        ``senders``: number of workers that speak to servers. ``size``: what an earlier scheduler
        has decided, after which rates do not matter; 0: nothing.
        """
        self.placement, self._most = placement, most
        self._workers, self._senders = workers, senders
        self._rates: dict[int, float] = {}
        self._round_trips: list[float] = []
        self.decided = bool(size)  # the size is known
        placement.wanted_bytes = size or min(LEAST, most)

    def add(self, worker: int, rate: float, round_trip: float) -> str:
        """Note what a worker has measured; returns what was decided by it, as text.

        ``rate``: bytes per second. ``round_trip``: seconds, to its farthest server.
        """
        if self.decided:
            return ""
        self._rates[worker] = rate
        self._round_trips.append(round_trip)
        return self.decide() if len(self._rates) >= self._workers else ""

    def decide(self) -> str:
        """Decide by the rates that are known; returns what was decided, "" if nothing was."""
        if self.decided:
            return ""
        self.decided = True
        size = partition_size(self._rates.values(), self._most) if self._rates else self._most
        self.set_size(size)
        if not self._rates:
            return ""
        return (
            f"{self.choice}: workers exchange {min(self._rates.values()) / 1e6:.0f} MB/s with the"
            " servers (BPSX_AUTOTUNE, BYTEPS_PARTITION_BYTES)"
        )

    @property
    def choice(self) -> str:
        """Text for the log: the size of partitions, and the lanes if a server does not use all."""
        used, lanes = self.placement.lanes_used
        where = "" if used == lanes else f", on {used} of {lanes} lanes of a server"
        return f"partitions have {self.placement.wanted_bytes >> 10} KiB{where}"

    def set_size(self, size: int) -> None:
        """Cut tensors by another size from now on, and use as many lanes as suit such links."""
        self.placement.wanted_bytes = size
        self.placement.lane_rule = self._rule_for(size)

    def _rule_for(self, size: int) -> LaneRule | None:
        """Return the rule for lanes that suits links for which partitions of this size are right.

        None, for all lanes, where links are fast: their rate is not known exactly. Also where they
        carry more than when they were measured: workers' send buffers have the size for that rate.
        Another scheduler does not know what was measured.
        """
        if size >= self._most or not self._rates:
            return None
        rate = min(self._rates.values())
        measured = partition_size([rate], self._most)
        if size > measured:
            return None
        bound = rate if size == measured else rate_above(size)
        return partial(lanes_needed, bound, self._senders, max(self._round_trips))

    def resizing(self, now: float, number: int = 0) -> Resizing:
        """Return the changes of the size that has been decided. ``number``: of the latest one."""
        return Resizing(self.placement.wanted_bytes, self._most, now, number)


#: Compressions, as spec.py writes them, of tensors whose partitions have the chosen size.
_TUNED = ("", '{"compressor": "half"}')


def restored_size(tensors: Mapping[tuple[str, int], RegisteredTensor]) -> int:
    """Return the partition size that an earlier scheduler has chosen, judged by its tensors."""
    lengths = [
        place.length
        for (name, _), tensor in tensors.items()
        if tensor.codec in _TUNED and not name.startswith(PROBE) and len(tensor.places) > 1
        for place in tensor.places
    ]
    return max(LEAST, max(lengths, default=PARTITION_BYTES))


def tunes_partitions(options: Mapping[str, Any], machines: int, asynchronous: bool) -> bool:
    """Whether workers with these ``options`` measure their links when the job begins.

    A size that was given stays. On one machine there is no link. An asynchronous push_pull does not
    wait for other workers, so its time says nothing about their links.
    """
    return bool(
        options["BPSX_AUTOTUNE"]
        and machines > 1
        and not asynchronous
        and options["BYTEPS_PARTITION_BYTES"] == PARTITION_BYTES
    )
