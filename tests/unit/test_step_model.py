"""The prediction of step times: its bounds, whatever the numbers, and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.planning.step_model import (
    Cluster,
    Costs,
    Gradient,
    GradientTraffic,
    fitted_link,
    step_seconds,
)

FREE = Costs(0.0, 0.0, 0.0)
MIB = 1 << 20


def cluster(workers: int = 4, spare: int = 0, **more: object) -> Cluster:
    return Cluster(workers, spare, 100e6, 0.0, 8.0)._replace(**more)


def plain(gradient: Gradient) -> GradientTraffic:
    return GradientTraffic((float(gradient.nbytes),), FREE)


def equal(count: int, nbytes: int, ready: float = 0.0) -> list[Gradient]:
    return [Gradient(f"{i}", nbytes, ready, (nbytes // 4,)) for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(0, 9),
    st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=12),
    st.floats(0, 2),
)
def test_links_bound_a_step_and_nothing_else_does_if_the_rest_is_free(workers, spare, sizes, ready):
    gradients = [Gradient(f"{i}", n, ready) for i, n in enumerate(sizes)]
    where = cluster(workers, spare)
    total, largest = sum(sizes), 256 << 10
    seconds = step_seconds(gradients, plain, where, largest)
    bound = ready + total * where.card_load() / where.link
    # At the end the last partitions pass each link once more, and shares are met to a partition.
    piece = max(largest, total * (workers + spare) / 20_000)
    slack = 4 * (workers + spare) * workers * piece / where.link
    assert bound * 0.99 - 1e-9 <= seconds + slack
    assert seconds <= bound + slack
    assert seconds >= ready + total * min(1.0, where.card_load()) / where.link * 0.5


@pytest.mark.parametrize("spare", [0, 1, 2, 4])
def test_large_tensors_take_as_long_as_the_fullest_card(spare):
    """The bound is the one of BytePS' paper: 2n(n-1) / (n^2 + kn - 2k) of the bytes."""
    n, gradients = 4, equal(10, 32 * MIB)
    seconds = step_seconds(gradients, plain, cluster(n, spare), MIB)
    bytes_ = 2 * n * (n - 1) / (n * n + spare * n - 2 * spare) * 320 * MIB
    assert 0.999 < seconds / (bytes_ / 100e6) < 1.04


def test_what_is_ready_early_is_sent_meanwhile():
    late = [*equal(1, 100 * MIB), Gradient("last", 4, 10.0)]
    assert 10.0 <= step_seconds(late, plain, cluster(), MIB) < 10.01
    assert step_seconds([], plain, cluster(), MIB) == 0.0


def test_processors_count_by_their_number_and_a_single_thread_does_not():
    def slow(gradient: Gradient) -> GradientTraffic:
        return GradientTraffic((1.0,), Costs(1e-6, 0.0, 0.0))

    gradients = equal(16, MIB)
    few, many = (step_seconds(gradients, slow, cluster(cores=cores), MIB) for cores in (1.0, 4.0))
    assert few / many == pytest.approx(4, rel=0.01) and few == pytest.approx(16.8, rel=0.01)
    half = step_seconds(gradients, slow, cluster(cores=0.5), MIB)
    assert half == pytest.approx(2 * few, rel=0.01)
    alone = step_seconds(
        gradients,
        lambda _: GradientTraffic((1.0,), Costs(1e-6, 0.0, 0.0, alone=1e-6)),
        cluster(cores=64.0),
        MIB,
    )
    assert alone == pytest.approx(few, rel=0.1)


def test_servers_of_their_own_take_work_from_workers():
    def summed(gradient: Gradient) -> GradientTraffic:
        return GradientTraffic((1.0,), Costs(0.0, 1e-7, 1e-7))

    gradients = equal(64, MIB)
    apart = step_seconds(gradients, summed, cluster(spare=4, cores=1.0), MIB)
    # Four servers either way, so the work of each is the same: five passes over a quarter.
    assert apart == pytest.approx(5e-7 * 16 * MIB, rel=0.05)


def test_two_round_trips_are_one_after_the_other():
    where = cluster(round_trip=0.25)
    once = step_seconds(equal(1, 4), lambda _: GradientTraffic((4.0,), FREE), where, MIB)
    twice = step_seconds(equal(1, 4), lambda _: GradientTraffic((2.0, 2.0), FREE), where, MIB)
    assert once == pytest.approx(0.25, rel=0.01) and twice == pytest.approx(0.5, rel=0.01)


@settings(max_examples=20, deadline=None)
@given(st.floats(1e7, 1e10), st.integers(2, 5), st.integers(0, 3))
def test_a_link_is_found_again_from_the_seconds_that_it_took(link, workers, spare):
    gradients = equal(4, 8 * MIB)

    def predict(rate: float) -> float:
        return step_seconds(gradients, plain, cluster(workers, spare, link=rate), MIB)

    assert fitted_link(predict(link), predict) == pytest.approx(link, rel=0.01)


def test_no_link_explains_less_time_than_the_rest_takes():
    assert fitted_link(1.0, lambda rate: 2.0 + 1e6 / rate) is None
