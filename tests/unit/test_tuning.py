"""What the scheduler chooses for a job: shares of servers, the size of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bpsx.compression.spec import CompressionSpec
from bpsx.config import PARTITION_BYTES, Config
from bpsx.config.fingerprint import fingerprint
from bpsx.planning.link_rate import LEAST, PROBE
from bpsx.planning.placement import Placement
from bpsx.scheduler.registry import RegisteredTensor, Registry
from bpsx.scheduler.tuning import (
    PartitionTuning,
    divides_by_machine,
    restored_size,
    shares,
    tunes_partitions,
)

MIB = 1 << 20


def options(**given: str) -> dict[str, Any]:
    return fingerprint(Config({"DMLC_ROLE": "worker", "DMLC_NUM_SERVER": "2", **given}))


@pytest.mark.parametrize(
    ("given", "workers", "servers", "by_machine"),
    [
        ({}, "ab", "ac", True),
        ({}, "ab", "abcd", True),
        ({}, "ab", "ab", False),
        ({}, "ab", "aa", False),
        ({}, "ab", "cd", False),
        ({}, "aa", "aa", False),
        ({"BYTEPS_KEY_HASH_FN": "djb2"}, "ab", "ac", False),
        ({"BYTEPS_ENABLE_MIXED_MODE": "0"}, "ab", "ac", False),
        ({"BYTEPS_ENABLE_MIXED_MODE": "1"}, "ab", "cd", True),
        ({"BYTEPS_ENABLE_MIXED_MODE": "true"}, "ab", "ab", True),
    ],
)
def test_machines_count_if_servers_are_of_both_kinds(
    given: dict[str, str], workers: str, servers: str, by_machine: bool
) -> None:
    assert divides_by_machine(options(**given), workers, servers) is by_machine


def test_shares_are_by_machine_or_by_weight() -> None:
    weighed = [("a", 1), ("b", 1), ("c", 2)]
    by_machine = shares(options(), "ab", [(host, 1) for host, _ in weighed])
    assert by_machine == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    by_weight = shares(options(BYTEPS_ENABLE_MIXED_MODE="0"), "ab", weighed)
    assert by_weight == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    assert shares(options(), "a", []) == []


@pytest.mark.parametrize(
    ("given", "machines", "asynchronous", "tunes"),
    [
        ({}, 2, False, True),
        ({}, 1, False, False),
        ({}, 2, True, False),
        ({"BPSX_AUTOTUNE": "0"}, 2, False, False),
        ({"BYTEPS_PARTITION_BYTES": "1048576"}, 2, False, False),
        ({"BYTEPS_PARTITION_BYTES": str(PARTITION_BYTES)}, 2, False, True),
    ],
)
def test_links_are_measured_between_machines_unless_a_size_was_given(
    given: dict[str, str], machines: int, asynchronous: bool, tunes: bool
) -> None:
    assert tunes_partitions(options(**given), machines, asynchronous) is tunes


def test_the_size_is_chosen_when_all_rates_are_known() -> None:
    placement = Placement([1, 1])
    tuning = PartitionTuning(placement, 2 * MIB, 3, 3)
    assert placement.wanted_bytes == LEAST
    assert tuning.add(0, 5e9, 1e-4) == tuning.add(1, 600e6, 1e-4) == ""
    assert placement.wanted_bytes == LEAST
    text = tuning.add(2, 7e9, 1e-4)
    assert "1024 KiB" in text and "600 MB/s" in text
    assert placement.wanted_bytes == MIB
    assert tuning.decide() == ""


def test_a_declaration_ends_the_wait_for_rates() -> None:
    placement = Placement([1, 1])
    tuning = PartitionTuning(placement, 2 * MIB, 3, 3)
    tuning.add(1, 1e3, 1e-4)
    assert "128 KiB" in tuning.decide()
    assert tuning.add(0, 9e9, 1e-4) == tuning.add(2, 9e9, 1e-4) == ""  # too late
    assert placement.wanted_bytes == LEAST


def test_without_any_rate_partitions_have_their_usual_size() -> None:
    placement = Placement([1, 1])
    assert PartitionTuning(placement, 2 * MIB, 3, 3).decide() == ""
    assert placement.wanted_bytes == 2 * MIB and placement.lane_rule is None


@pytest.mark.parametrize(
    ("rate", "round_trip", "lanes"),
    [(60e6, 3e-4, 1), (600e6, 3e-4, 2), (1e9, 3e-4, 4), (60e6, 0.05, 2), (60e6, 0.1, 4)],
)
def test_slow_links_use_fewer_lanes(rate: float, round_trip: float, lanes: int) -> None:
    """The farthest worker's round trip counts."""
    placement = Placement([4] * 16)
    tuning = PartitionTuning(placement, 2 * MIB, 16, 16)
    trips = [1e-4] * 15 + [round_trip]
    texts = [tuning.add(worker, rate, trip) for worker, trip in enumerate(trips)]
    assert placement.lanes_used == (lanes, 4)
    assert (f"{lanes} of 4 lanes of a server" in texts[-1]) is (lanes < 4)
    assert {place.lane % 4 for place in placement.place(0, 400 * MIB)} == set(range(lanes))


def test_each_server_uses_lanes_by_its_present_share() -> None:
    placement = Placement([4, 4, 4], shares=[0.1, 0.5, 0.4])
    tuning = PartitionTuning(placement, 2 * MIB, 4, 4)
    for worker in range(4):
        tuning.add(worker, 300e6, 1e-4)

    def used(number: int) -> set[int]:
        return {place.lane for place in placement.place(number, 400 * MIB)}

    assert used(0) == {0, 4, 5, 8, 9}
    placement.lose(1)
    assert placement.lanes_used == (3, 4) and used(1) == {0, 8, 9, 10}
    placement.reserve(1)
    placement.admit(3, {0: 0.1, 2: 0.1, 3: 0.8})
    assert placement.lanes_used == (1, 4) and used(2) == {12}


@pytest.mark.parametrize("function", ["balanced", "djb2"])
def test_the_servers_that_use_fewer_lanes_than_they_have_are_named(function: str) -> None:
    """Hashes give all servers the same share, whatever their weight."""
    placement = Placement([8, 2], function, shares=[0.9, 0.1])
    assert placement.lanes_used == (8, 8)
    placement.lane_rule = lambda share: round(share * 10)
    assert placement.lanes_used == ((1, 2) if function == "balanced" else (5, 8))
    placement.lane_rule = lambda share: 3
    assert placement.lanes_used == (3, 8)


def test_lanes_follow_links_that_change() -> None:
    placement = Placement([8, 8])
    tuning = PartitionTuning(placement, 2 * MIB, 2, 2)
    tuning.add(0, 400e6, 1e-4), tuning.add(1, 1e9, 1e-4)
    assert tuning.choice == "partitions have 1024 KiB, on 2 of 8 lanes of a server"
    tuning.set_size(LEAST)
    assert tuning.choice == "partitions have 128 KiB, on 1 of 8 lanes of a server"
    tuning.set_size(MIB)
    assert placement.lanes_used == (2, 8)
    tuning.set_size(2 * MIB)
    assert tuning.choice == "partitions have 2048 KiB"


def test_links_that_carry_more_than_at_first_use_all_lanes() -> None:
    """Send buffers stay as they are, so more connections may be what carries more."""
    placement = Placement([8, 8])
    tuning = PartitionTuning(placement, 2 * MIB, 1, 2)
    tuning.add(0, 50e6, 1e-4)
    assert placement.lanes_used == (1, 8)
    tuning.set_size(4 * LEAST)
    assert placement.lanes_used == (8, 8)


def test_another_scheduler_uses_all_lanes() -> None:
    """It does not know what was measured, and one late rate is not that of all."""
    placement = Placement([4, 4])
    tuning = PartitionTuning(placement, 2 * MIB, 2, size=LEAST)
    assert tuning.add(0, 1e6, 1e-4) == ""
    tuning.set_size(LEAST)
    assert placement.wanted_bytes == LEAST and placement.lanes_used == (4, 4)


@pytest.mark.parametrize("function", ["balanced", "djb2"])
def test_only_what_is_not_compressed_uses_fewer_lanes(function: str) -> None:
    """A lane works longer on each byte of what is, be it as halves or as factors of matrices."""
    placement = Placement([3, 3, 2], function)
    placement.lane_rule = lambda share: 2
    registry = Registry(placement, 2 * MIB)

    def used(name: str, codec: str = "", pieces: Sequence[int] = ()) -> set[int]:
        nbytes = 40 * MIB
        tensor, _ = registry.declare(0, name, 0, nbytes, 0, [nbytes], codec, pieces)
        return {place.lane for place in tensor.places}

    assert used("floats") == {0, 1, 3, 4, 6, 7}
    assert {2, 5} <= used("compressed", "onebit") & used("halves", "half", [20 * MIB])
    assert {2, 5} <= used("factors", "powersgd", [20 * MIB, 20 * MIB])
    placement.lane_rule = lambda share: 1
    assert used("more floats") == {0, 3, 6}
    moved = {lane for _, targets in placement.lose(1) for lane, _ in targets}
    assert {1, 2} & moved  # keys of a lost server go to all lanes
    assert used("again") == {0, 6}


@pytest.mark.parametrize("lanes", [[1], [2, 1], [1, 1, 1]])
def test_tensors_are_cut_into_partitions_of_the_wanted_size(lanes: list[int]) -> None:
    placement = Placement(lanes)
    placement.wanted_bytes = LEAST
    for number, (nbytes, compressed, most) in enumerate(
        [(5 * MIB + 12, False, LEAST), (9 * MIB, True, 4 * MIB), (0, False, 0)]
    ):
        places = placement.place(number, nbytes, compressed)
        assert sum(place.length for place in places) == nbytes
        assert max(place.length for place in places) == most
        assert len({place.key for place in places}) == len(places)


def test_the_largest_tensors_have_larger_partitions() -> None:
    """Else they would have more partitions than there are keys."""
    placement = Placement([1])
    placement.wanted_bytes = 4096
    places = placement.place(0, (4 << 30) + 1)
    assert {place.length for place in places} == {2 * MIB, 1}


def test_halves_are_cut_as_what_is_not_compressed() -> None:
    """No state belongs to their partitions, and 2 MiB on the wire would be as slow as of floats."""
    placement = Placement([1, 1])
    placement.wanted_bytes = LEAST
    registry = Registry(placement, 2 * MIB)
    for number, (pieces, most) in enumerate([([16 * MIB], LEAST), ([], 4 * MIB)]):
        tensor, _ = registry.declare(0, f"{number}", 0, 16 * MIB, 3, [4 * MIB], "a codec", pieces)
        assert sum(place.length for place in tensor.places) == 16 * MIB
        assert max(place.length for place in tensor.places) == most


@pytest.mark.parametrize("size", [LEAST, MIB, 2 * MIB])
def test_another_scheduler_goes_on_with_the_size(size: int) -> None:
    placement = Placement([1, 1])
    placement.wanted_bytes = LEAST
    registry = Registry(placement, 2 * MIB)
    tensors: dict[tuple[str, int], RegisteredTensor] = {}

    def declare(name: str, nbytes: int, codec: str = "", pieces: Sequence[int] = ()) -> None:
        tensors[name, 0], _ = registry.declare(0, name, 0, nbytes, 0, [nbytes], codec, pieces)

    declare(PROBE + "large", 8 * MIB)
    assert restored_size(tensors) == PARTITION_BYTES  # nothing says otherwise
    placement.wanted_bytes = size
    declare("compressed", 16 * MIB, "onebit")
    declare("b", 100)
    declare("in halves", 9 * MIB, CompressionSpec("half").text(), [9 * MIB])
    assert restored_size(tensors) == size
    declare("a", 9 * MIB)
    assert restored_size(tensors) == size
