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


def partition(nbytes: int, partition_bytes: int) -> list[Span]:
    """Cut ``nbytes`` into spans of at most ``partition_bytes``, which is rounded up to whole pages.

    A tensor of no bytes has one span of length 0, so that it too is a round that all workers take part in. Spans begin at page
    multiples, which is a multiple of every element size.
    """
    step = whole_pages(partition_bytes)
    if nbytes == 0:
        return [Span(0, 0)]
    return [Span(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
