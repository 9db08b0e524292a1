"""Cutting tensors into partitions. Pure: no I/O, no state."""

from __future__ import annotations

from typing import NamedTuple

PAGE_BYTES = 4096


class Span(NamedTuple):
    """A partition's range in its tensor, in bytes."""

    offset: int
    length: int


def whole_pages(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def most_bytes(partition_bytes: int, compressed: bool) -> int:
    """Return the most bytes of a partition, a multiple of the page size.

    ``partition_bytes``: value of BYTEPS_PARTITION_BYTES. A compressed partition may have twice as
    much: each one costs kernels of its own and is small on the wire (docs/decisions/0016).
    """
    return whole_pages(partition_bytes) * (2 if compressed else 1)


def partition(nbytes: int, partition_bytes: int, compressed: bool = False) -> list[Span]:
    """Cut ``nbytes`` into spans of at most :func:`most_bytes`.

    An empty tensor has one span of length 0, so that it too has a round in which all workers take
    part. Spans begin at multiples of the page size, which are multiples of every element size.
    """
    step = most_bytes(partition_bytes, compressed)
    if nbytes == 0:
        return [Span(0, 0)]
    return [Span(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
