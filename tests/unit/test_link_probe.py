"""The rate that workers measure when a job begins, on imitated links."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from bpsx.planning import link_rate
from bpsx.planning.link_rate import LEAST, PROBE, lanes_needed, partition_size, rate_above
from bpsx.session.link_probe import measure
from bpsx.system.address import NETWORK_SEND_BUFFER

MIB = 1 << 20


@dataclass
class Link:
    """Workers whose sums take a round trip and the time of their bytes; a clock of its own."""

    rate: float  # bytes per second
    round_trip: float = 0.0
    workers: int = 2
    slow_start: int = 0  # round trips that each sum of a large tensor waits at first
    time: float = 100.0
    sums: list[tuple[str, int]] = field(default_factory=list)

    def sum(self, name: str, array: np.ndarray) -> None:
        self.sums.append((name, array.nbytes))
        self.time += 5e-5 + self.round_trip + array.nbytes / self.rate
        if array.nbytes > 1000:
            self.time += self.round_trip * self.slow_start
            self.slow_start = 0
        array *= self.workers

    def measure(self) -> tuple[float, float]:
        return measure(self.sum, self.workers, lambda: self.time)


@pytest.mark.parametrize("round_trip", [0.0, 1e-4, 0.002, 0.03])
@pytest.mark.parametrize("rate", [1e5, 1e6, 12e6, 60e6, 120e6, 1.2e9])
def test_the_rate_is_found(rate: float, round_trip: float) -> None:
    link = Link(rate, round_trip)
    found, trip = link.measure()
    assert found == pytest.approx(rate, rel=0.03)
    assert trip == pytest.approx(5e-5 + round_trip + 4 / rate)
    assert all(name.startswith(PROBE) for name, _ in link.sums)


@pytest.mark.parametrize(("rate", "sums"), [(10e6, 4), (100e6, 6), (1e9, 8)])
def test_slow_links_are_measured_with_fewer_bytes(rate: float, sums: int) -> None:
    link = Link(rate)
    link.measure()
    assert len(link.sums) == sums
    assert sum(nbytes for _, nbytes in link.sums) < (1.1 * MIB if rate < 20e6 else 18.1 * MIB)


def test_the_growth_of_a_window_is_not_taken_for_a_slow_link() -> None:
    """The first sum over a far link takes many round trips."""
    rate, _ = Link(120e6, 0.03, slow_start=7).measure()
    assert rate == pytest.approx(120e6, rel=0.05)


def test_a_link_that_takes_no_time_has_some_rate() -> None:
    assert Link(1e15).measure()[0] > 1e9


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ([1e3], LEAST),
        ([60e6], LEAST),  # 500 Mbit/s
        ([115e6], 2 * LEAST),  # 1 Gbit/s
        ([600e6], MIB),
        ([1.1e9], 2 * MIB),  # 10 Gbit/s
        ([1e12], 2 * MIB),
        ([1e12, 60e6, 1e9], LEAST),
        ([0.0], LEAST),
    ],
)
def test_the_slowest_link_decides(rates: list[float], size: int) -> None:
    assert partition_size(rates, 2 * MIB) == size


def test_a_size_lies_between_its_bounds() -> None:
    sizes = [partition_size([10.0**e], 2 * MIB) for e in np.arange(0, 12, 0.01)]
    assert sizes == sorted(sizes)
    assert set(sizes) == {LEAST << i for i in range(5)}


def test_the_rule_for_lanes_counts_with_the_send_buffers_that_connections_have() -> None:
    """Planning imports nothing of the system, so the number stands there, too."""
    assert link_rate._BUFFER == NETWORK_SEND_BUFFER


@pytest.mark.parametrize("size", [LEAST, 2 * LEAST, MIB])
def test_partitions_are_larger_from_the_fastest_rate_on(size: int) -> None:
    assert partition_size([rate_above(size) * 0.999], 2 * MIB) == size
    assert partition_size([rate_above(size) * 1.001], 2 * MIB) == 2 * size


@pytest.mark.parametrize(
    ("rate", "workers", "round_trip", "share", "lanes"),
    [
        (65e6, 16, 3e-4, 1 / 16, 1),  # 1 Gbit/s, a server beside each worker
        (65e6, 16, 3e-3, 1 / 16, 1),  # a busy machine's round trip
        (60e6, 2, 3e-4, 1 / 4, 1),
        (600e6, 2, 2e-4, 1 / 2, 2),
        (300e6, 4, 2e-4, 1.0, 4),  # one server for four workers
        (300e6, 4, 2e-4, 0.9, 4),
        (300e6, 4, 2e-4, 0.1, 1),
        (8e6, 16, 2e-4, 1.0, 1),
        (100e6, 2, 0.03, 1 / 2, 14),  # far machines
        (100e6, 2, 0.03, 1.0, 27),
        (1e3, 1, 0.1, 1.0, 1),
        (0.0, 1, 0.0, 0.0, 1),
        (2.0**62, 1, 2.0**42, 1.0, 2**105 // 229376),
    ],
)
def test_lanes_are_enough_for_the_work_and_for_round_trips(
    rate: float, workers: int, round_trip: float, share: float, lanes: int
) -> None:
    assert lanes_needed(rate, workers, round_trip, share) == pytest.approx(lanes)
