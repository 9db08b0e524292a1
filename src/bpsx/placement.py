"""Partitions to servers and lanes. Pure: no I/O; the scheduler is the only one who asks, so all workers agree.

BytePS' hashes are kept by name (``BYTEPS_KEY_HASH_FN``, see its ``global.cc``): they look at the key only. The default looks at the bytes
placed so far and takes the server that has least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Most partitions of a tensor: 4 GiB at the smallest partition size, 4 TiB at the default.
PARTS_PER_TENSOR = 1 << 20


class Place(NamedTuple):
    """Where a partition is summed: ``key`` in the job, ``lane`` among all lanes of all servers, ``slot`` on that lane."""

    key: int
    lane: int
    slot: int


def key_of(tensor: int, part: int) -> int:
    """The key of a tensor's partition, unique in the job."""
    return tensor * PARTS_PER_TENSOR + part


def _naive(key: int, coefficient: int) -> int:
    return (key // PARTS_PER_TENSOR + key % PARTS_PER_TENSOR) * 9973


def _built_in(key: int, coefficient: int) -> int:
    """A multiplicative hash of the key's decimal digits stands in for the C++ library's std::hash, which no document fixes."""
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


_HASHES: dict[str, Callable[[int, int], int]] = {"naive": _naive, "built_in": _built_in, "djb2": _djb2, "sdbm": _sdbm}


class Placement:
    """Hands out places. Not thread-safe: the scheduler's one thread owns it.

    ``lanes``: how many lanes each server has; lanes are numbered through, server by server. ``function``: ``balanced`` or a hash's name.
    """

    def __init__(self, lanes: Sequence[int], function: str = "balanced", coefficient: int = 1) -> None:
        self._hash = _HASHES.get(function)
        self._coefficient = coefficient
        firsts = [sum(lanes[:s]) for s in range(len(lanes))]
        self._lanes = [list(range(first, first + n)) for first, n in zip(firsts, lanes)]
        self.lane_bytes = [0] * sum(lanes)
        self.server_bytes = [0] * len(lanes)
        self._slots = [0] * sum(lanes)

    def place(self, tensor: int, sizes: Sequence[int]) -> list[Place]:
        """Places for the partitions of tensor number ``tensor``, whose sizes in bytes are given."""
        return [self._place_one(key_of(tensor, i), size) for i, size in enumerate(sizes)]

    def _place_one(self, key: int, size: int) -> Place:
        if not self.server_bytes:
            return Place(key, 0, 0)         # a single machine: its root has the sum
        if self._hash is None:
            server = min(range(len(self.server_bytes)), key=lambda s: self.server_bytes[s])
        else:
            server = self._hash(key, self._coefficient) % len(self.server_bytes)
        # Tensors of no bytes cost a message all the same: count a little, or all of them would land on one server.
        lane = min(self._lanes[server], key=lambda i: self.lane_bytes[i])
        self.server_bytes[server] += max(size, 64)
        self.lane_bytes[lane] += max(size, 64)
        slot = self._slots[lane]
        self._slots[lane] += 1
        return Place(key, lane, slot)
