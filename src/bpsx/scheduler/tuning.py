"""The scheduler's choices for a whole job: servers' shares, and the size of partitions. Pure.

docs/internals/autotune.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bpsx.config import AUTO, PARTITION_BYTES
from bpsx.planning.link_rate import LEAST, PROBE, partition_size
from bpsx.planning.load_balance import shares_by_host
from bpsx.planning.placement import Placement
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
    """Chooses the partition size of a job from the rates that its workers measure.

    It decides when all workers have told their rates, or before that if one declares a tensor of
    its own. ``placement``: the job's; workers measure with small partitions.
    """

    def __init__(self, placement: Placement, most: int, workers: int, size: int = 0) -> None:
        """``most``: bytes of a partition where links are fast. ``workers``: number of them.

        ``size``: what an earlier scheduler has decided; 0: nothing.
        """
        self.placement, self._most, self._workers = placement, most, workers
        self._rates: dict[int, float] = {}
        self.decided = bool(size)  # the size is known
        placement.wanted_bytes = size or min(LEAST, most)

    def add(self, worker: int, rate: float) -> str:
        """Note a worker's rate in bytes per second; returns what was decided by it, as text."""
        self._rates[worker] = rate
        return self.decide() if len(self._rates) >= self._workers else ""

    def decide(self) -> str:
        """Decide by the rates that are known; returns what was decided, "" if nothing was."""
        if self.decided:
            return ""
        self.decided = True
        size = partition_size(self._rates.values(), self._most) if self._rates else self._most
        self.placement.wanted_bytes = size
        if not self._rates:
            return ""
        return (
            f"partitions have {size >> 10} KiB: workers exchange"
            f" {min(self._rates.values()) / 1e6:.0f} MB/s with the servers"
            " (BPSX_AUTOTUNE, BYTEPS_PARTITION_BYTES)"
        )

    def set_size(self, size: int) -> None:
        """Cut tensors by another size from now on."""
        self.placement.wanted_bytes = size

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
