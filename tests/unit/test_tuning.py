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
    tuning = PartitionTuning(placement, 2 * MIB, 3)
    assert placement.wanted_bytes == LEAST
    assert tuning.add(0, 5e9) == tuning.add(1, 600e6) == ""
    assert placement.wanted_bytes == LEAST
    text = tuning.add(2, 7e9)
    assert "1024 KiB" in text and "600 MB/s" in text
    assert placement.wanted_bytes == MIB
    assert tuning.decide() == ""


def test_a_declaration_ends_the_wait_for_rates() -> None:
    placement = Placement([1, 1])
    tuning = PartitionTuning(placement, 2 * MIB, 3)
    tuning.add(1, 1e3)
    assert "128 KiB" in tuning.decide()
    assert tuning.add(0, 9e9) == tuning.add(2, 9e9) == ""  # too late
    assert placement.wanted_bytes == LEAST


def test_without_any_rate_partitions_have_their_usual_size() -> None:
    placement = Placement([1, 1])
    assert PartitionTuning(placement, 2 * MIB, 3).decide() == ""
    assert placement.wanted_bytes == 2 * MIB


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
