"""Partitions, places, stages: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpsx.partitioner import PAGE_BYTES, partition
from bpsx.pipeline import Stage, stages_for
from bpsx.placement import Placement, key_of

# Bytes of the float32 parameters of a ResNet-50 and a transformer layer stack, by their published shapes.
_BLOCKS = [(64, 64, 256, 3), (256, 128, 512, 4), (512, 256, 1024, 6), (1024, 512, 2048, 3)]
RESNET50 = [4 * n for n in [64 * 3 * 49] + [
    size for inside, mid, out, times in _BLOCKS for i in range(times)
    for size in ((out if i else inside) * mid, mid * mid * 9, mid * out, mid, mid, mid, mid, out, out, *([inside * out] if i == 0 else []))
] + [2048 * 1000, 1000]]
TRANSFORMER = [4 * n for n in [30522 * 1024] + [1024 * 1024] * 4 * 24 + [4096 * 1024] * 2 * 24 + [1024] * 9 * 24]


@given(nbytes=st.integers(0, 10**8), partition_bytes=st.integers(1, 10**7), compressed=st.booleans())
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
    placement = Placement(lanes, function)
    places = [p for tensor in range(300) for p in placement.place(tensor, [5000] * (tensor % 4 + 1))]
    assert len({p.key for p in places}) == len(places)
    for lane in range(6):
        assert sorted(p.slot for p in places if p.lane == lane) == list(range(sum(p.lane == lane for p in places)))
    assert {p.lane for p in places} <= set(range(6))
    again = Placement(lanes, function)
    assert [p for tensor in range(300) for p in again.place(tensor, [5000] * (tensor % 4 + 1))] == places


@pytest.mark.parametrize("function", ["naive", "built_in", "djb2", "sdbm"])
def test_a_hash_looks_at_the_key_only(function):
    first, second = Placement([1] * 7, function), Placement([1] * 7, function)
    second.place(99, [12345] * 5)
    assert [p.lane for p in first.place(3, [1, 10**6])] == [p.lane for p in second.place(3, [10**9, 1])]


def test_the_coefficient_changes_the_built_in_hash_only():
    lanes = {c: [p.lane for t in range(50) for p in Placement([1] * 5, "built_in", c).place(t, [1])] for c in (1, 3)}
    assert lanes[1] != lanes[3]


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
@pytest.mark.parametrize("model", [RESNET50, TRANSFORMER], ids=["resnet50", "transformer"])
def test_bytes_are_balanced_over_servers(model, servers):
    placement = Placement([1] * servers)
    for tensor, nbytes in enumerate(model):
        placement.place(tensor, [s.length for s in partition(nbytes, 4096000)])
    # the last large partition may tip the scales: at most one partition apart
    assert max(placement.server_bytes) - min(placement.server_bytes) <= 4096000


def test_bytes_are_balanced_over_the_lanes_of_a_server():
    placement = Placement([4])
    for tensor, nbytes in enumerate(RESNET50):
        placement.place(tensor, [s.length for s in partition(nbytes, 4096000)])
    assert max(placement.lane_bytes) - min(placement.lane_bytes) <= 4096000


def test_tensors_of_no_bytes_are_spread_too():
    placement = Placement([1] * 4)
    assert {placement.place(t, [0])[0].lane for t in range(8)} == {0, 1, 2, 3}


def test_keys_do_not_collide():
    assert len({key_of(t, p) for t in range(100) for p in range(100)}) == 10_000


def test_stages_of_a_cpu_tensor():
    assert stages_for() == bytes([Stage.PUSH, Stage.PULL])
    with pytest.raises(KeyError):
        stages_for("cuda")
