"""Servers' shares of the bytes, such that all machines' network cards carry the same. Pure.

The model is that of BytePS' paper (OSDI'20, section 3.2). Every worker sends its M bytes to the
servers and receives M. Traffic within a machine costs its card nothing. A round takes as long as
the most loaded card.

With n machines that have a worker and a server each, and k <= n with a server only, the optimum is
the paper's: 2(n-1)/(n^2+kn-2k) of the bytes at each of the k, (n-k)/(n^2+kn-2k) at each of the n.
Here machines may also have any number of either, k may exceed n, and cards may differ in speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class MachineLinks(NamedTuple):
    """One machine's part in the job.

    ``workers``: number of its workers that speak to servers. ``servers``: weight of each of its
    servers.
    """

    workers: int
    servers: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Speed of its network card, relative to a weight of 1: its servers' mean weight."""
        return sum(self.servers) / len(self.servers) if self.servers else 1.0


def load(machine: MachineLinks, workers: int, share: float) -> float:
    """Return the load of a machine's card in each direction, as a multiple of M.

    ``workers``: number of workers in the job. ``share``: part of the bytes that the machine's
    servers sum. Outbound, its workers send to other machines' servers and its servers send to other
    machines' workers; inbound is the same.
    """
    return machine.workers * (1 - share) + share * (workers - machine.workers)


def level(machines: Sequence[MachineLinks]) -> list[float]:
    """Return each machine's share of the bytes; its servers sum that part.

    At least one machine must have a server.
    """
    workers = sum(m.workers for m in machines)
    at_home = [float(bool(m.servers) and 2 * m.workers > workers) for m in machines]
    if any(at_home):  # a machine with over half of the workers sums all: most stays within it
        return at_home
    # The card of a machine with half of the workers carries the same load whatever its servers sum.
    # So its servers take the bytes that other machines cannot take within that load.
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
    """Return each server's share of the bytes, given its host and weight.

    ``workers``: host of each worker that speaks to servers.
    """
    hosts = list(dict.fromkeys([*workers, *(host for host, _ in servers)]))
    weights = {host: [weight for h, weight in servers if h == host] for host in hosts}
    parts = level([MachineLinks(workers.count(host), tuple(weights[host])) for host in hosts])
    share = dict(zip(hosts, parts, strict=True))
    return [share[host] * weight / sum(weights[host]) for host, weight in servers]


def _share(machine: MachineLinks, workers: int, limit: float) -> float:
    """Return the share that gives the machine's card a load of ``limit`` relative to its speed."""
    return max(0.0, (limit * machine.speed - machine.workers) / (workers - 2 * machine.workers))


def _limit(machines: Sequence[MachineLinks], workers: int) -> float:
    """Return the load, relative to speed, at which the machines take all bytes together.

    Their total share grows with the load. It is piecewise linear: its slope changes where a machine
    starts to take a share.
    """
    begins = sorted(m.workers / m.speed for m in machines)
    low = max(b for b in begins if sum(_share(m, workers, b) for m in machines) <= 1)
    rate = sum(m.speed / (workers - 2 * m.workers) for m in machines if m.workers / m.speed <= low)
    return low + (1 - sum(_share(m, workers, low) for m in machines)) / rate
