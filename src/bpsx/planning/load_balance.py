"""How much each server should sum, so that all machines' network cards carry the same. Pure.

The model is that of BytePS' paper (OSDI'20, section 3.2): every worker sends its M bytes to the
servers and gets M back, what stays within a machine costs its card nothing, and a round takes as
long as the most loaded card. With n machines that have a worker and a server each, and k <= n with
a server only, the optimum is the paper's: 2(n-1)/(n^2+kn-2k) of the bytes at each of the k,
(n-k)/(n^2+kn-2k) at each of the n. Here machines may have any number of either, k may exceed n, and
cards may differ in speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Machine(NamedTuple):
    """``workers``: how many of them speak to servers; ``servers``: the weight of each of its
    servers.
    """

    workers: int
    servers: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Of its card, where another one's is 1: its servers' mean weight."""
        return sum(self.servers) / len(self.servers) if self.servers else 1.0


def load(machine: Machine, workers: int, share: float) -> float:
    """What the card carries each way, as a part of M, if the machine's servers sum ``share`` of the
    bytes, for ``workers`` in the whole job: what its workers send elsewhere, and what its servers
    answer elsewhere; or the same in the other direction.
    """
    return machine.workers * (1 - share) + share * (workers - machine.workers)


def level(machines: Sequence[Machine]) -> list[float]:
    """The parts of the bytes that the machines' servers should sum.

    At least one machine has a server.
    """
    workers = sum(m.workers for m in machines)
    at_home = [float(bool(m.servers) and 2 * m.workers > workers) for m in machines]
    if any(at_home):  # what the machine of most workers sums stays there for most
        return at_home
    # With half of the workers a card carries the same whatever its servers sum, which is then what
    # the others cannot carry beside that.
    half = [bool(m.servers) and 2 * m.workers == workers for m in machines]
    others = [m for m, h in zip(machines, half, strict=True) if m.servers and not h]
    limit = max(
        (m.workers / m.speed for m, h in zip(machines, half, strict=True) if h), default=None
    )
    if limit is None or sum(_share(m, workers, limit) for m in others) > 1:
        limit = _limit(others, workers)
    shares = [
        _share(m, workers, limit) if m.servers and not h else 0.0
        for m, h in zip(machines, half, strict=True)
    ]
    rest = max(0.0, 1 - sum(shares)) / max(1, sum(half))
    return [rest if h else share for h, share in zip(half, shares, strict=True)]


def shares_by_host(workers: Sequence[str], servers: Sequence[tuple[str, float]]) -> list[float]:
    """Of each server, given its host and weight.

    ``workers``: the hosts of those who speak to servers.
    """
    hosts = list(dict.fromkeys([*workers, *(host for host, _ in servers)]))
    weights = {host: [weight for h, weight in servers if h == host] for host in hosts}
    parts = level([Machine(workers.count(host), tuple(weights[host])) for host in hosts])
    share = dict(zip(hosts, parts, strict=True))
    return [share[host] * weight / sum(weights[host]) for host, weight in servers]


def _share(machine: Machine, workers: int, limit: float) -> float:
    """So much that the card's load, by its speed, is ``limit``."""
    return max(0.0, (limit * machine.speed - machine.workers) / (workers - 2 * machine.workers))


def _limit(machines: Sequence[Machine], workers: int) -> float:
    """The load, by speed, at which the machines take all bytes: what they take grows with it, in
    straight lines between the loads at which each begins to.
    """
    begins = sorted(m.workers / m.speed for m in machines)
    low = max(b for b in begins if sum(_share(m, workers, b) for m in machines) <= 1)
    rate = sum(m.speed / (workers - 2 * m.workers) for m in machines if m.workers / m.speed <= low)
    return low + (1 - sum(_share(m, workers, low) for m in machines)) / rate
