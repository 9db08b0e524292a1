"""Bytes to partitions. Pure: no I/O, no state."""

from __future__ import annotations

from typing import NamedTuple

PAGE_BYTES = 4096


class Span(NamedTuple):
    """A partition's place in its tensor, in bytes."""

    offset: int
    length: int


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def most_bytes(partition_bytes: int, compressed: bool) -> int:
    """What a partition may have, by the value of BYTEPS_PARTITION_BYTES: that, or twice that if it
    is compressed; in whole pages.

    Each partition that is compressed costs kernels of its own and is small on the wire;
    docs/decisions/0016.
    """
    return whole_pages(partition_bytes) * (2 if compressed else 1)


def partition(nbytes: int, partition_bytes: int, compressed: bool = False) -> list[Span]:
    """Cut ``nbytes`` into spans of at most :func:`most_bytes`.

    A tensor of no bytes has one span of length 0, so that it too is a round that all workers take
    part in. Spans begin at page multiples, which is a multiple of every element size.
    """
    step = most_bytes(partition_bytes, compressed)
    if nbytes == 0:
        return [Span(0, 0)]
    return [Span(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
