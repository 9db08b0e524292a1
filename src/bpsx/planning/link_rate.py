"""Size of partitions, and number of lanes, by the rate at which links carry tensors. Pure.

Workers measure the rate when a job begins, by push_pulls of tensors that no script sees
(:mod:`bpsx.session.link_probe`); the scheduler chooses. docs/internals/autotune.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

#: Beginning of the names of the tensors with which workers measure the rate.
PROBE = "bpsx.link_probe."
#: Size of a partition at most, in seconds of the link. Sums arrive that much later than the last
#: byte was sent, and an urgent tensor waits that long for the partition before it.
_SECONDS = 0.003
#: Partitions of the measured tensors, and of others at least. A smaller one costs processors as
#: much as one of this size.
LEAST = 128 << 10
#: Bytes per second, each way, that any lane's thread can sum and send. A fast processor's lane does
#: 2.3e9: docs/decisions/0042.
_LANE_RATE = 350e6
#: Bytes of a near connection's send buffer: it carries so many in a round trip.
_BUFFER = 224 << 10


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


def rate_above(size: int) -> float:
    """Return the bytes per second from which on partitions are larger than ``size``."""
    return 2 * size / _SECONDS


def lanes_needed(rate: float, workers: int, round_trip: float, share: float) -> int:
    """Return how many lanes of a server are enough for links that carry tensors at ``rate``.

    Each lane has a connection to each worker, and many connections were slower on slow links:
    docs/decisions/0042.

    ``rate``: bytes per second of each of the ``workers``. ``round_trip``: seconds. ``share``: the
    server's part of all bytes.
    """
    work = rate * workers * share / _LANE_RATE
    connections = 2 * rate * share * round_trip / _BUFFER
    return max(1, math.ceil(max(work, connections)))
