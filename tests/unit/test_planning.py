"""Partitions, placement and stages, which are pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import RESNET50

from bpsx.planning.partitioner import PAGE_BYTES, most_bytes, partition
from bpsx.planning.placement import Placement, key_of
from bpsx.planning.stages import Stage, stages_for


@given(
    nbytes=st.integers(0, 10**8), partition_bytes=st.integers(1, 10**7), compressed=st.booleans()
)
def test_spans_cover_exactly_in_order_and_begin_at_pages(nbytes, partition_bytes, compressed):
    partition_bytes = max(partition_bytes, nbytes // 5000)
    spans = partition(nbytes, partition_bytes, compressed)
    at = 0
    for span in spans:
        assert span.offset == at and at % PAGE_BYTES == 0
        at += span.length
    assert at == nbytes
    bound = -(-partition_bytes // PAGE_BYTES) * PAGE_BYTES * (2 if compressed else 1)
    assert all(0 < s.length <= bound for s in spans) or nbytes == 0
    assert len(spans) == max(1, -(-nbytes // bound))


@pytest.mark.parametrize("function", ["balanced", "naive", "built_in", "djb2", "sdbm"])
def test_places_are_in_range_distinct_and_slots_are_dense(function):
    lanes = [2, 1, 3]
    placement = Placement(lanes, function, partition_bytes=8192)
    places = [p for tensor in range(300) for p in placement.place(tensor, 5000 * (tensor % 4 + 1))]
    assert len({p.key for p in places}) == len(places)
    for lane in range(6):
        assert sorted(p.slot for p in places if p.lane == lane) == list(
            range(sum(p.lane == lane for p in places))
        )
    assert {p.lane for p in places} <= set(range(6))
    again = Placement(lanes, function, partition_bytes=8192)
    assert [
        p for tensor in range(300) for p in again.place(tensor, 5000 * (tensor % 4 + 1))
    ] == places


@pytest.mark.parametrize("function", ["naive", "built_in", "djb2", "sdbm"])
def test_a_hash_looks_at_the_key_only(function):
    first, second = (Placement([1] * 7, function, partition_bytes=4096) for _ in range(2))
    second.place(99, 5 * 4096)
    assert [p.lane for p in first.place(3, 5000)] == [p.lane for p in second.place(3, 8192)]


def test_the_coefficient_changes_the_built_in_hash_only():
    lanes = {
        c: [p.lane for t in range(50) for p in Placement([1] * 5, "built_in", c).place(t, 1)]
        for c in (1, 3)
    }
    assert lanes[1] != lanes[3]


@given(
    tensors=st.lists(st.tuples(st.integers(0, 10**8), st.booleans()), max_size=12),
    shares=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    partition_bytes=st.integers(4096, 10**7),
    function=st.sampled_from(["balanced", "djb2"]),
)
def test_partitions_cover_exactly_begin_at_pages_and_are_no_more_than_needed(
    tensors, shares, partition_bytes, function
):
    partition_bytes = max(partition_bytes, 10**8 // 5000)
    parts = (
        [s / max(1, sum(shares)) for s in shares]
        if any(shares)
        else [1 / len(shares)] * len(shares)
    )
    placement = Placement([1] * len(shares), function, 1, parts, partition_bytes)
    for number, (nbytes, compressed) in enumerate(tensors):
        places = placement.place(number, nbytes, compressed)
        assert sum(p.length for p in places) == nbytes
        assert all(p.length % PAGE_BYTES == 0 for p in places[:-1])
        assert (
            all(0 < p.length <= most_bytes(partition_bytes, compressed) for p in places)
            or nbytes == 0 == places[0].length
        )
        plain = partition(nbytes, partition_bytes, compressed)
        if compressed or function != "balanced":
            assert [p.length for p in places] == [s.length for s in plain]
        assert len(places) <= len(plain) + len(shares)
        assert function != "balanced" or not any(shares) or all(shares[p.lane] for p in places)


def test_bytes_are_balanced_over_the_lanes_of_a_server():
    placement = Placement([4], partition_bytes=4096000)
    for tensor, nbytes in enumerate(RESNET50):
        placement.place(tensor, nbytes)
    assert max(placement.lane_bytes) - min(placement.lane_bytes) <= 4096000


def test_empty_tensors_are_spread_over_servers_too():
    placement = Placement([1] * 4)
    assert {placement.place(t, 0)[0].lane for t in range(8)} == {0, 1, 2, 3}


def test_keys_do_not_collide():
    assert len({key_of(t, p) for t in range(100) for p in range(100)}) == 10_000


def test_stages_of_a_cpu_tensor():
    assert stages_for() == bytes([Stage.PUSH, Stage.PULL, Stage.COPY])
    with pytest.raises(KeyError):
        stages_for("cuda")
