"""Mixed mode: how many bytes each server sums, and how close placement comes to that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import BERT_LARGE, GPT2, MODELS, RESNET50, VGG16

from bpsx.planning.load_balance import MachineLinks, level, load, shares_by_host
from bpsx.planning.placement import Placement

BOTH, SERVER = MachineLinks(1, (1.0,)), MachineLinks(0, (1.0,))


def test_the_models_have_their_published_sizes():
    assert [sum(sizes) // 4 for sizes in (RESNET50, VGG16, BERT_LARGE, GPT2)] == [
        25_557_032,
        138_357_544,
        335_141_888,
        124_439_808,
    ]


@pytest.mark.parametrize("n", range(2, 33))
def test_shares_are_the_papers(n):
    for k in range(n + 1):
        beside, alone = (n - k) / (n * n + k * n - 2 * k), 2 * (n - 1) / (n * n + k * n - 2 * k)
        assert level([BOTH] * n + [SERVER] * k) == pytest.approx(
            [beside] * n + [alone] * k, abs=1e-12
        )


@pytest.mark.parametrize(("n", "k"), [(2, 3), (3, 4), (8, 20), (31, 60)])
def test_with_more_servers_than_workers_servers_beside_workers_get_nothing(n, k):
    assert level([BOTH] * n + [SERVER] * k) == pytest.approx([0] * n + [1 / k] * k)


_WEIGHTS = st.lists(st.floats(0.1, 10), max_size=3).map(tuple)


@given(
    st.lists(st.builds(MachineLinks, st.integers(0, 4), _WEIGHTS), min_size=1, max_size=7).filter(
        lambda ms: any(m.servers for m in ms)
    ),
    st.lists(st.floats(0, 1), min_size=7, max_size=7),
)
def test_no_other_division_has_a_less_loaded_worst_card(machines, others):
    """Holds for any placement of processes on machines and any speeds of network cards."""
    if not any(m.workers for m in machines):
        machines = [*machines, MachineLinks(1, ())]
    workers = sum(m.workers for m in machines)

    def worst(parts):
        return max(
            load(m, workers, part) / m.speed for m, part in zip(machines, parts, strict=True)
        )

    found = level(machines)
    assert sum(found) == pytest.approx(1) and all(
        part >= 0 and (part == 0 or m.servers) for part, m in zip(found, machines, strict=True)
    )
    given = [o if m.servers else 0.0 for o, m in zip([*others, 0.0], machines, strict=False)]
    if sum(given) > 0:
        assert worst(found) <= worst([g / sum(given) for g in given]) + 1e-9


def test_hosts_are_machines():
    assert shares_by_host(
        ["a", "b", "a", "b"], [("a", 1), ("c", 3), ("c", 1), ("b", 1)]
    ) == pytest.approx(
        [0, 0.75, 0.25, 0]
    )  # c's card is twice as fast: 4 shares of 1/2 each way, as the others carry 2


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
@pytest.mark.parametrize("model", MODELS)
def test_the_most_loaded_card_carries_no_more_than_1_03_of_the_optimum(model, order):
    """Checked for n from 2 to 32 and k from 0 to n."""
    sizes = MODELS[model][::order]
    for n in range(2, 33):
        for k in range(n + 1):
            machines = [BOTH] * n + [SERVER] * k
            best = level(machines)
            placed = Placement([1] * (n + k), shares=best)
            for number, nbytes in enumerate(sizes):
                placed.place(number, nbytes)
            carried = max(
                load(m, n, part / sum(sizes))
                for m, part in zip(machines, placed.server_bytes, strict=True)
            )
            assert carried <= 1.03 * max(
                load(m, n, part) for m, part in zip(machines, best, strict=True)
            ), (n, k)


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weights", [(1,), (1, 2)], ids=["alike", "weighted"])
def test_no_server_has_more_than_1_03_of_its_share(model, order, weights):
    """Checked without mixed mode, for 1 to 32 servers."""
    for servers in range(1, 33):
        own = [weights[i % len(weights)] for i in range(servers)]
        shares = [w / sum(own) for w in own]
        placed = Placement([1] * servers, shares=shares)
        for number, nbytes in enumerate(MODELS[model][::order]):
            placed.place(number, nbytes)
        assert all(
            got <= 1.03 * share * sum(MODELS[model])
            for got, share in zip(placed.server_bytes, shares, strict=True)
        ), servers


@pytest.mark.parametrize("nbytes", [1024 * 65536, 1024 * 32768, 1024 * 32768 - 1])
def test_a_tensor_that_is_cut_finer_has_no_more_partitions_than_keys(monkeypatch, nbytes):
    monkeypatch.setattr("bpsx.planning.placement.PARTS_PER_TENSOR", 1024)
    placement = Placement([1] * 31, shares=[i / 496 for i in range(1, 32)], partition_bytes=65536)
    places = placement.place(3, nbytes)
    assert sum(place.length for place in places) == nbytes and places[-1].key < 4 * 1024
