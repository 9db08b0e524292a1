"""Partition size by the rate at which a job's links carry tensors. Pure.

Workers measure the rate when a job begins, by push_pulls of tensors that no script sees
(:mod:`bpsx.session.link_probe`); the scheduler chooses the size. docs/internals/autotune.md.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Beginning of the names of the tensors with which workers measure the rate.
PROBE = "bpsx.link_probe."
#: Size of a partition at most, in seconds of the link. Sums arrive that much later than the last
#: byte was sent, and an urgent tensor waits that long for the partition before it.
_SECONDS = 0.003
#: Partitions of the measured tensors, and of others at least. A smaller one costs processors as
#: much as one of this size.
LEAST = 128 << 10


def partition_size(rates: Iterable[float], most: int) -> int:
    """Return the bytes of a partition for links that carry tensors at ``rates``.

    ``rates``: bytes per second that each worker has measured; the slowest decides. ``most``: the
    result's upper bound, a power of two times ``LEAST``. The result is such a number, too.
    """
    wanted = min(rates) * _SECONDS
    size = LEAST
    while size * 2 <= min(wanted, most):
        size *= 2
    return min(size, most)
