"""Predicts the seconds of a training step from what its parts cost. Pure.

A discrete simulation: partitions of gradients pass processors and network cards, each of which
works on one at a time. All workers do the same at the same time. docs/internals/advise.md has the
model and its limits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from bpsx.planning.load_balance import MachineLinks, level, load

#: Partitions of a step at most, and that number times the machines. More would make the simulation
#: slow and the result no better.
_MOST, _MOST_IN_ALL = 800, 20_000
#: The bounds of a link's rate in bytes per second, and how close a fit comes to the best one.
_SLOWEST, _FASTEST, _CLOSE = 1e5, 1e12, 0.002


class Gradient(NamedTuple):
    """A tensor that is exchanged in each step.

    ``ready``: seconds from the step's begin, which is the end of the exchange before it.
    ``shape``: empty if it is unknown.
    """

    name: str
    nbytes: int
    ready: float
    shape: tuple[int, ...] = ()


class Costs(NamedTuple):
    """Seconds of one processor per byte of gradient.

    ``worker``: on each worker, both ways. ``push``: on a server, for each worker. ``sum``: on a
    server, once. ``alone``: seconds per byte that a worker takes at least, though it has processors
    to spare: some of its work is done by one thread.
    """

    worker: float
    push: float
    sum: float
    alone: float = 0.0


class Cluster(NamedTuple):
    """Machines and links.

    ``workers``: machines with a worker and a server each. ``spare``: machines with a server only.
    ``link``: bytes of gradients per second of each machine's network card, each way.
    ``round_trip``: seconds.
    ``cores``: processors of a machine that are free for the exchange. ``together``: whether workers
    have servers; otherwise only spare machines have.
    """

    workers: int
    spare: int
    link: float
    round_trip: float
    cores: float
    together: bool = True

    def shares(self) -> tuple[float, float]:
        """Return the part of the bytes that a worker machine sums, and a spare one."""
        machines = [MachineLinks(1, (1.0,) if self.together else ())] * self.workers
        machines += [MachineLinks(0, (1.0,))] * self.spare
        parts = level(machines)
        return parts[0], parts[-1] if self.spare else 0.0

    def card_load(self) -> float:
        """Return what the most loaded network card carries, as a multiple of the gradients."""
        own, spare = self.shares()
        on_spare = load(MachineLinks(0, (1.0,)), self.workers, spare) if self.spare else 0.0
        return max(load(MachineLinks(1, (1.0,)), self.workers, own), on_spare)


class GradientTraffic(NamedTuple):
    """Exchange of one gradient: bytes on the wire of each round trip, and processors' costs."""

    wire: tuple[float, ...]
    costs: Costs


#: Chooses the exchange of a gradient.
Chooser = Callable[[Gradient], GradientTraffic]


class _Server:
    """Something that works on one partition at a time, with ``lanes`` of them side by side."""

    def __init__(self, lanes: int = 1) -> None:
        self._free = [0.0] * lanes

    def take(self, at: float, seconds: float) -> float:
        """Work for ``seconds`` from ``at`` on, or later; return when that ends."""
        end = max(at, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, end)
        return end


class _Machine:
    """A machine's processors, its network card each way, and a thread that no other one helps."""

    def __init__(self, lanes: int) -> None:
        self.cores, self.driver = _Server(lanes), _Server()
        self.outbound, self.inbound = _Server(), _Server()


class _Machines:
    """All machines of one simulation."""

    def __init__(self, cluster: Cluster) -> None:
        self._c = cluster
        lanes = max(1, int(cluster.cores))
        self._speed = cluster.cores / lanes
        self._workers = [_Machine(lanes) for _ in range(cluster.workers)]
        self._spare = [_Machine(lanes) for _ in range(cluster.spare)]
        own, spare = cluster.shares()
        shares = [(own, m) for m in self._workers] + [(spare, m) for m in self._spare]
        # (bytes so far by share, number, share, machine) of each server: the least comes next.
        self._next = [(0.0, i, share, m) for i, (share, m) in enumerate(shares) if share > 0]

    def server(self, nbytes: float) -> _Machine:
        """Return the machine whose server sums the next partition."""
        has, number, share, machine = self._next[0]
        heapq.heapreplace(self._next, (has + nbytes / share, number, share, machine))
        return machine

    def compute(self, at: float, seconds: float, alone: float) -> float:
        """Work of all workers; ``alone``: of the thread that no other one helps."""
        ends = []
        for machine in self._workers:
            end = machine.cores.take(at, seconds / self._speed)
            ends.append(max(end, machine.driver.take(at, alone)))
        return max(ends)

    def push(self, at: float, wire: float, server: _Machine) -> float:
        """Pushes of all workers to a server."""
        far = self._far(server)
        return self._move(at, wire, [machine.outbound for machine in far], server.inbound)

    def pull(self, at: float, wire: float, server: _Machine) -> float:
        """The sum from a server to all workers."""
        far = self._far(server)
        return self._move(at, wire, [machine.inbound for machine in far], server.outbound)

    def _far(self, server: _Machine) -> list[_Machine]:
        """Return the worker machines that reach the server over the network."""
        return [machine for machine in self._workers if machine is not server]

    def _move(self, at: float, wire: float, many: Sequence[_Server], one: _Server) -> float:
        """Move ``wire`` bytes through each card of ``many``, and all of these through ``one``."""
        seconds = wire / self._c.link
        ends = [card.take(at, seconds) for card in many]
        ends.append(one.take(at, seconds * len(many)))
        return max(ends) + self._c.round_trip / 2

    def add(self, at: float, nbytes: float, costs: Costs, server: _Machine) -> float:
        """Work of a server."""
        seconds = nbytes * (costs.push * self._c.workers + costs.sum)
        return server.cores.take(at, seconds / self._speed)


def _pieces(
    gradients: Iterable[Gradient], choose: Chooser, most: float
) -> list[tuple[float, float, GradientTraffic]]:
    """Cut gradients into (ready, part of the gradient's bytes, exchange), in order of ``ready``."""
    found = []
    for gradient in sorted(gradients, key=lambda g: g.ready):
        count = max(1, -(-gradient.nbytes // int(most)))
        whole = choose(gradient)
        part = GradientTraffic(tuple(w / count for w in whole.wire), whole.costs)
        found += [(gradient.ready, gradient.nbytes / count, part)] * count
    return found


def step_seconds(
    gradients: Sequence[Gradient], choose: Chooser, cluster: Cluster, partition: int
) -> float:
    """Return the seconds of a step: until the last sum is there, or the last gradient is ready.

    ``partition``: bytes of a partition.
    """
    total = sum(g.nbytes for g in gradients)
    most = min(_MOST, _MOST_IN_ALL // (cluster.workers + cluster.spare))
    pieces = _pieces(gradients, choose, max(partition, total / max(most, 1), 1))
    machines, numbers = _Machines(cluster), itertools.count()
    # (time, number, what happens then): events in order of time.
    events: list[tuple[float, int, Callable[[float], None]]] = []
    done = max((g.ready for g in gradients), default=0.0)

    def at(time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(numbers), action))

    def begin(nbytes: float, how: GradientTraffic, trip: int, time: float) -> None:
        share = nbytes / len(how.wire)
        # Half of the work before a push, half of it after a pull.
        work = share / 2 * how.costs.worker, share / 2 * how.costs.alone
        wire, server = how.wire[trip], machines.server(how.wire[trip])

        def pushed(now: float) -> None:
            at(machines.push(now, wire, server), arrived)

        def arrived(now: float) -> None:
            at(machines.add(now, share, how.costs, server), added)

        def added(now: float) -> None:
            at(machines.pull(now, wire, server), here)

        def here(now: float) -> None:
            at(machines.compute(now, *work), over)

        def over(now: float) -> None:
            nonlocal done
            if trip + 1 < len(how.wire):
                begin(nbytes, how, trip + 1, now)
            done = max(done, now)

        at(machines.compute(time, *work), pushed)

    for ready, nbytes, how in pieces:
        at(ready, partial(begin, nbytes, how, 0))
    while events:
        now, _, action = heapq.heappop(events)
        action(now)
    return done


def fitted_link(seconds: float, predict: Callable[[float], float]) -> float | None:
    """Return the bytes per second of links for which ``predict`` returns ``seconds``.

    ``predict`` must not grow with the rate. None: even the fastest links would not explain it, so
    the links are not what the step waits for.
    """
    if predict(_FASTEST) >= seconds:
        return None
    low, high = _SLOWEST, _FASTEST
    while high / low > 1 + _CLOSE:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if predict(middle) <= seconds else (middle, high)
    return float((low * high) ** 0.5)
