"""Placement of partitions on servers and lanes.

Pure: no I/O. Only the scheduler uses it, so all workers agree.

BytePS' hashes are available by name (``BYTEPS_KEY_HASH_FN``, see its ``global.cc``); they depend on
the key only. The default, ``balanced``, depends on the bytes placed so far: it takes the server
furthest below its share. It cuts a tensor finer where a whole partition would give a server too
much: on 32 servers a ResNet-50 has no more than 3 MB each. docs/decisions/0025.

A lost server's slots move to the others by a rule per lane (:data:`Moves`), and some slots of a
living lane to servers with less than their share (:data:`Yields`). A place that has been given out
never changes: its users apply the rules (:class:`bpsx.scheduler.terms.Terms`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bpsx.planning.partitioner import PAGE_BYTES, most_bytes, partition

#: Most partitions of a tensor: 4 GiB at the smallest partition size, 4 TiB at the default.
PARTS_PER_TENSOR = 1 << 20
#: Least bytes of a partition that is cut finer, and of the rest of its tensor: a smaller partition
#: costs as much as one of this size.
_LEAST = 32 << 10
#: Fraction of all bytes so far by which a server may exceed its share before a tensor is cut finer.
_SLACK = 0.015
#: Most targets of a lane. More make its bytes finer to share out, and the rule longer.
MOST_TARGETS = 64
#: Most slots of a lane, those that have been yielded included: see server/lane.pxd.
MOST_SLOTS = 1 << 22
#: Fraction of its share by which a server must exceed it before another one gets keys of it.
_UNEVEN = 0.05
#: Lost lanes and their targets: with m targets, slot s becomes slot ``base + s // m`` of lane
#: ``lane``, where ``(lane, base) = targets[s % m]``.
Moves = list[tuple[int, list[tuple[int, int]]]]
#: Lanes that live, the number of slots that the rule is about, and their targets. The rule is the
#: same for slots below that number, but those whose target is the lane itself stay.
Yields = list[tuple[int, int, list[tuple[int, int]]]]


#: See :attr:`Placement.lane_rule`.
LaneRule = Callable[[float], int]


class Assignment(NamedTuple):
    """Key of a partition, and the lane and slot that sum it.

    ``key``: unique in the job. ``lane``: number among all lanes of all servers. ``slot``: index on
    that lane. ``length``: bytes; the partition begins where the previous one ends.
    """

    key: int
    lane: int
    slot: int
    length: int


def key_of(tensor: int, part: int) -> int:
    """Return the key of a tensor's partition, unique in the job."""
    return tensor * PARTS_PER_TENSOR + part


def _naive(key: int, coefficient: int) -> int:
    return (key // PARTS_PER_TENSOR + key % PARTS_PER_TENSOR) * 9973


def _built_in(key: int, coefficient: int) -> int:
    """Hash the key's decimal digits, multiplicatively.

    It stands in for the C++ library's std::hash, which no document specifies.
    """
    value = 14695981039346656037
    for byte in str(key).encode():
        value = ((value ^ byte) * 1099511628211) % 2**64
    return value * coefficient


def _djb2(key: int, coefficient: int) -> int:
    value = 5381
    for byte in str(key).encode():
        value = (value * 33 + byte) % 2**64
    return value


def _sdbm(key: int, coefficient: int) -> int:
    value = 0
    for byte in str(key).encode():
        value = (byte + value * 65599) % 2**64
    return value


_HASHES: dict[str, Callable[[int, int], int]] = {
    "naive": _naive,
    "built_in": _built_in,
    "djb2": _djb2,
    "sdbm": _sdbm,
}


class Placement:
    """Assigns places. Not thread-safe: the scheduler's one thread owns it.

    ``lanes``: number of lanes of each server; lanes are numbered consecutively, server by server.
    ``function``: ``balanced`` or a hash's name. ``shares``: part of the bytes that each server
    should sum, equal by default; for ``balanced`` only. ``partition_bytes``: most bytes of a
    partition, by :func:`bpsx.planning.partitioner.most_bytes`.
    """

    def __init__(
        self,
        lanes: Sequence[int],
        function: str = "balanced",
        coefficient: int = 1,
        shares: Sequence[float] | None = None,
        partition_bytes: int = 2 << 20,
    ) -> None:
        self._hash = _HASHES.get(function)
        self._coefficient = coefficient
        self._partition_bytes = partition_bytes
        #: Most bytes of a partition of uncompressed tensors that are placed from now on; at most
        #: ``partition_bytes``.
        self.wanted_bytes = partition_bytes
        #: Number of lanes of a server for uncompressed tensors that are placed from now on, by the
        #: server's share. None: all lanes.
        self.lane_rule: LaneRule | None = None
        firsts = [sum(lanes[:s]) for s in range(len(lanes))]
        self._lanes = [list(range(first, first + n)) for first, n in zip(firsts, lanes)]
        self._shares = [1 / len(lanes)] * len(lanes) if shares is None else list(shares)
        #: Heap of (bytes so far / share, server), for servers with a share; the first lacks most.
        self._least = [(0.0, s) for s, share in enumerate(self._shares) if share > 0]
        self._bytes = 0
        self.lane_bytes = [0] * sum(lanes)
        self.server_bytes = [0] * len(lanes)
        self._living = list(range(len(lanes)))  # servers that have not been lost
        # Bytes of each slot that has been given out, by lane; 0: it has been yielded.
        self._sizes: list[list[int]] = [[] for _ in range(sum(lanes))]
        self._yielded = set[int]()  # lanes that have yielded slots

    def place(
        self,
        tensor: int,
        nbytes: int,
        compressed: bool = False,
        first: int = 0,
        all_lanes: bool = False,
    ) -> list[Assignment]:
        """Return the places of a tensor's partitions, in order.

        ``tensor``: its number. ``nbytes``: its size. ``first``: number of its first partition.
        ``all_lanes``: the rule for lanes does not apply. Partitions begin at multiples of the page
        size.
        """
        # A tensor has at most so many partitions that each has a key.
        fits = nbytes <= PARTS_PER_TENSOR * self.wanted_bytes
        most = self.wanted_bytes if fits and not compressed else self._partition_bytes
        self._bytes += max(nbytes, PAGE_BYTES)
        # A job with other servers must find the state that compression keeps of each partition, so
        # compressed tensors are not cut finer. Neither are tensors from 32 GiB on: they could have
        # more partitions than there are keys.
        finer = (
            self._hash is None
            and not compressed
            and len(self._living) > 1
            and nbytes < PARTS_PER_TENSOR * _LEAST
        )
        if not finer:
            return [
                self._place_one(key_of(tensor, i), span.length, all_lanes)
                for i, span in enumerate(partition(nbytes, most, compressed), first)
            ]
        places: list[Assignment] = []
        left = nbytes
        while left or not places:
            length = self._next_length(left, most_bytes(most, False))
            places.append(self._place_one(key_of(tensor, first + len(places)), length, all_lanes))
            left -= length
        return places

    def _next_length(self, left: int, most: int) -> int:
        """Return the bytes of a tensor's next partition, which goes to the server that lacks most.

        ``left``: bytes of the tensor that have no place yet. ``most``: of a partition.
        """
        has, server = self._least[0]
        lacks = (self._bytes * (1 + _SLACK) - has) * self._shares[server]
        wanted = min(most, max(_LEAST, int(lacks) // PAGE_BYTES * PAGE_BYTES))
        return min(left, most) if left - wanted < _LEAST else wanted

    def _place_one(self, key: int, size: int, all_lanes: bool = False) -> Assignment:
        if not self.server_bytes:
            return Assignment(key, 0, 0, size)  # a single machine: its root has the sum
        # An empty tensor still costs a message. Count a few bytes for it, or all of them would go
        # to one server.
        counted = max(size, 64)
        if self._hash is None:
            server = self._most_lacking(counted)
        else:
            server = self._living[self._hash(key, self._coefficient) % len(self._living)]
        lane = self._least_lane(server, counted, self._lanes_wanted(server, all_lanes))
        self._sizes[lane].append(counted)
        return Assignment(key, lane, len(self._sizes[lane]) - 1, size)

    def _most_lacking(self, counted: int) -> int:
        """Return the server that lacks most of its share, and count ``counted`` bytes for it."""
        has, server = self._least[0]
        heapq.heapreplace(self._least, (has + counted / self._shares[server], server))
        return server

    def _least_lane(self, server: int, counted: int, most: int | None = None) -> int:
        """Return a server's lane with the fewest bytes, and count ``counted`` bytes for it.

        ``most``: only so many of its lanes take part; None: all.
        """
        lane = min(self._lanes[server][:most], key=lambda i: self.lane_bytes[i])
        self._count(server, lane, counted)
        return lane

    @property
    def servers(self) -> int:
        """Number of servers, those that are lost or reserved included."""
        return len(self._lanes)

    def _lanes_wanted(self, server: int, all_lanes: bool = False) -> int | None:
        """Return how many of a server's lanes get places by the rule; None: all."""
        if self.lane_rule is None or all_lanes:
            return None
        # Hashes look at no share.
        share = self._shares[server] if self._hash is None else 1 / len(self._living)
        return self.lane_rule(share)

    @property
    def lanes_used(self) -> tuple[int, int]:
        """Most lanes of a living server that get places by the rule, and how many it has.

        Servers that use all their lanes count only if all servers do.
        """
        each = ((self._lanes_wanted(s), len(self._lanes[s])) for s in self._living)
        found = [(n if used is None else min(used, n), n) for used, n in each]
        return max([pair for pair in found if pair[0] < pair[1]] or found, default=(1, 1))

    def reserve(self, lanes: int) -> int:
        """Number the lanes of a new server; returns the first. No place is on them yet."""
        first = len(self.lane_bytes)
        self._lanes.append(list(range(first, first + lanes)))
        self.lane_bytes += [0] * lanes
        self._sizes += [[] for _ in range(lanes)]
        self.server_bytes.append(0)
        self._shares.append(0.0)
        return first

    def lanes_of(self, server: int) -> list[int]:
        """The numbers of a server's lanes."""
        return list(self._lanes[server])

    def admit(self, server: int, shares: Mapping[int, float]) -> None:
        """Let a server whose lanes are reserved get places.

        It gets those of later tensors, and of servers that are lost later. ``shares``: as for
        :meth:`share`.
        """
        self._living.append(server)
        self.share(shares)

    def share(self, shares: Mapping[int, float]) -> None:
        """Set the part of the bytes that each living server should sum, by number."""
        for other in range(len(self._shares)):
            equal = 1 / len(self._living) if self._hash is not None else 0.0
            self._shares[other] = equal or shares.get(other, 0.0)
        self._rank_by_lack()

    def _rank_by_lack(self) -> None:
        """Order the living servers with a share by what they lack of it."""
        shares = [(s, self._shares[s]) for s in self._living if self._shares[s] > 0]
        self._least = [(self.server_bytes[s] / share, s) for s, share in shares]
        heapq.heapify(self._least)

    def lose(self, server: int) -> Moves:
        """Move a lost server's slots to the other servers; returns the rule for each of its lanes.

        The bytes of a lane are cut into at most :data:`MOST_TARGETS` parts. The largest part comes
        first, and each goes to the server furthest below its share; hashes have equal shares. So no
        server that gets a part then has more than its share of all bytes and one part.

        No later partition gets a place on the lost lanes, and no slot is given out twice. At least
        one server must be left.
        """
        self._leave_out(server)
        return [(lane, self._targets(lane)) for lane in self._lanes[server]]

    def _leave_out(self, server: int) -> None:
        """Give the shares of ``server`` to the others."""
        self._living.remove(server)
        rest = sum(self._shares[s] for s in self._living)
        if self._hash is not None or not rest:
            self._shares = [1 / len(self._living)] * len(self._shares)
        else:
            self._shares = [share / rest for share in self._shares]
        for lane in self._lanes[server]:
            self.lane_bytes[lane] = 0
        self.server_bytes[server] = 0
        self._rank_by_lack()

    def retire(self, slots: Iterable[tuple[int, int]]) -> list[int]:
        """Count slots, (lane, slot) where they are now, as if they held nothing.

        They stay reserved: some worker may still speak of their keys. Returns the bytes of each.
        """
        found = list(slots)
        sizes = [self._sizes[lane][slot] for lane, slot in found]
        self.resize(zip(found, itertools.repeat(1)))
        return sizes

    def resize(self, slots: Iterable[tuple[tuple[int, int], int]]) -> None:
        """Count other bytes for slots. ``slots``: lane and slot where they are now, and bytes."""
        server_of = {lane: s for s, lanes in enumerate(self._lanes) for lane in lanes}
        for (lane, slot), size in slots:
            more = size - self._sizes[lane][slot]
            self._sizes[lane][slot] = size
            self._count(server_of[lane], lane, more)
            self._bytes += more
        self._rank_by_lack()

    def restore(
        self,
        lost: Iterable[int],
        slots: Mapping[int, int],
        places: Iterable[tuple[int, int, int]],
        yields: Yields,
    ) -> None:
        """Go on from the places that an earlier scheduler has given out.

        ``lost``: servers that it has lost. ``slots``: number of slots of each lane that it may have
        given out. ``places``: lane, slot and bytes of each known partition, where it is now.
        ``yields``: of all terms, in order.
        """
        for server in lost:
            self._leave_out(server)
        for lane, count in slots.items():
            # Keys that only lost workers knew may have such slots, unless the lane yielded them.
            self._sizes[lane] += [1] * (count - len(self._sizes[lane]))
        for lane, limit, targets in yields:
            self._yielded.add(lane)
            for i, (to, _) in enumerate(targets):
                if to != lane:
                    left = range(i, limit, len(targets))
                    self._sizes[lane][i : limit : len(targets)] = [0] * len(left)
        server_of = {lane: s for s, lanes in enumerate(self._lanes) for lane in lanes}
        for lane, slot, nbytes in places:
            counted = max(nbytes, 64)
            self._sizes[lane][slot] = counted
            self._count(server_of[lane], lane, counted)
            self._bytes += counted
        self._rank_by_lack()

    def _targets(self, lane: int) -> list[tuple[int, int]]:
        """Return the targets of a lost lane, whose slots they reserve.

        If it has yielded slots before, the classes are those of then: a class without keys gets no
        slots.
        """
        sizes, self._sizes[lane] = self._sizes[lane], []
        even = MOST_TARGETS if lane in self._yielded else max(1, len(sizes))
        count = min(MOST_TARGETS, even)
        parts = [sizes[i::count] for i in range(count)]
        targets = [(0, 0)] * count
        for i in sorted(range(count), key=lambda i: -sum(parts[i])):
            nbytes = sum(parts[i])
            targets[i] = self._take(self._least_lane(self._most_lacking(nbytes), nbytes), parts[i])
        return targets

    def _take(self, lane: int, sizes: list[int]) -> tuple[int, int]:
        """Reserve slots of ``lane`` for a class of another lane's slots; returns the target.

        ``sizes``: of the whole class; leading slots that have been yielded get none, so the
        target's first slot is counted from where they would be.
        """
        empty = next((i for i, size in enumerate(sizes) if size), len(sizes))
        base = len(self._sizes[lane]) - empty
        self._sizes[lane] += sizes[empty:]
        return lane, base

    # ---- balance

    def balance(self) -> tuple[Yields, int]:
        """Move slots of servers with more than their share to servers with less.

        Returns the rule for each lane that yields some, and the bytes of all that they yield. A
        class of a lane's slots, those with the same remainder by :data:`MOST_TARGETS`, moves as a
        whole, the largest first.
        """
        total = sum(self.server_bytes[s] for s in self._living)
        surplus = {s: self.server_bytes[s] - self._shares[s] * total for s in self._living}
        moved, rules = 0, dict[int, list[tuple[int, int]]]()
        classes = sorted(self._classes(surplus), reverse=True)
        poor = sorted(surplus.keys() - {server for _, server, _, _ in classes})
        for nbytes, server, lane, i in classes:
            poorest = min(poor, key=lambda s: surplus[s], default=server)
            if min(surplus[server], -surplus[poorest]) < nbytes / 2:
                continue
            target = min(self._lanes[poorest], key=lambda at: self.lane_bytes[at])
            sizes = self._sizes[lane][i::MOST_TARGETS]
            if len(self._sizes[target]) + len(sizes) > MOST_SLOTS:
                continue
            moved += nbytes
            surplus[server] -= nbytes
            surplus[poorest] += nbytes
            self._count(server, lane, -nbytes)
            self._count(poorest, target, nbytes)
            rules.setdefault(lane, [(lane, 0)] * MOST_TARGETS)[i] = self._take(target, sizes)
            self._sizes[lane][i::MOST_TARGETS] = [0] * len(sizes)
        self._yielded.update(rules)
        self._rank_by_lack()
        return [(lane, len(self._sizes[lane]), to) for lane, to in rules.items()], moved

    def _classes(self, surplus: Mapping[int, float]) -> Iterator[tuple[int, int, int, int]]:
        """Bytes, server, lane and number of each class of slots that may be yielded."""
        for server, more in surplus.items():
            if more <= self._shares[server] * self._bytes * _UNEVEN:
                continue
            for lane in self._lanes[server]:
                for i in range(min(MOST_TARGETS, len(self._sizes[lane]))):
                    if nbytes := sum(self._sizes[lane][i::MOST_TARGETS]):
                        yield nbytes, server, lane, i

    def _count(self, server: int, lane: int, nbytes: int) -> None:
        """Count ``nbytes`` more for a server and one of its lanes."""
        self.server_bytes[server] += nbytes
        self.lane_bytes[lane] += nbytes
