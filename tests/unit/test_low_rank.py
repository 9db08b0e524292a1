"""PowerSGD's steps against the oracle in float64, and their bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpsx.compression.factors import make_matrix
from bpsx.compression.spec import compression
from bpsx.kernels.reference_low_rank import LowRank, orthogonalise
from bpsx.planning.placement import Placement
from bpsx.scheduler.messages import BadMessage, check
from bpsx.scheduler.registry import Registry
from support.low_rank_tools import Worker, gradient, step, to_bits, to_float

DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Rounding of a result, relative to the largest element: of the type, and of sums in float32.
ROUNDING = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-4, "float64": 1e-10}


def workers_of(count: int, n: int, m: int, rank: int, dtype: str, **more) -> list[Worker]:
    return [Worker(n, m, rank, dtype, **more) for _ in range(count)]


def close(found: np.ndarray, wanted: np.ndarray, dtype: str, scale: float) -> bool:
    return bool(np.abs(found - wanted).max() <= ROUNDING[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feedback", [False, True], ids=["", "ef"])
@settings(max_examples=15, deadline=None)
@given(
    n=st.sampled_from([9, 31, 40, 65, 200]),
    m=st.sampled_from([9, 33, 64, 513, 1100]),
    rank=st.integers(1, 4),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_each_step_has_the_result_and_the_residual_of_the_oracle(
    dtype, feedback, n, m, rank, count, seed
):
    rng = np.random.default_rng(seed)
    workers = workers_of(count, n, m, rank, dtype, feedback=feedback, seed=seed)
    oracle = LowRank(count, n, m, rank, seed, feedback)
    for _ in range(3):
        given_ = [to_bits(gradient(rng, n, m), dtype) for _ in workers]
        # Both start from the same state, since a direction may depend on a rounding error.
        oracle.q = workers[0].q.T.astype(np.float64)
        oracle.residuals = [w.e.astype(np.float64) for w in workers]
        wanted = oracle.step([to_float(g, dtype) for g in given_], count)
        found = step(workers, given_, count)
        scale = max(np.abs(to_float(g, dtype)).max() for g in given_) + max(
            np.abs(w.e).max() for w in workers
        )
        assert all((f == found[0]).all() for f in found)
        assert close(to_float(found[0], dtype), wanted, dtype, scale)
        if feedback:
            for worker, residual in zip(workers, oracle.residuals, strict=True):
                assert close(worker.e, residual, worker.p.dtype.name, scale)
        else:
            assert not any(w.e.any() for w in workers)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_gradient_is_lost_with_error_feedback(dtype):
    rng = np.random.default_rng(3)
    workers = workers_of(2, 40, 70, 2, dtype, feedback=True)
    sent, pushed = np.zeros((40, 70)), np.zeros((40, 70))
    for _ in range(10):
        gradients = [gradient(rng, 40, 70).astype(dtype) for _ in workers]
        sent += step(workers, gradients)[0]
        pushed += sum(g.astype(np.float64) for g in gradients)
    left = sum(w.e.astype(np.float64) for w in workers)
    assert np.abs(sent + left - pushed).max() < {"float32": 1e-4, "float64": 1e-12}[dtype] * 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_division_of_the_rows(dtype):
    rng = np.random.default_rng(5)
    given_ = [to_bits(gradient(rng, 77, 600), dtype) for _ in range(3)]
    found = []
    for rows in (1, 7, 77):
        worker = Worker(77, 600, 3, dtype, True, rows=rows)
        results = [step([worker], [g])[0].tobytes() for g in given_]
        found.append((results, worker.e.tobytes(), worker.q.tobytes()))
    assert found[0] == found[1] == found[2]


def test_columns_are_orthonormal_even_if_they_nearly_depend_on_each_other():
    rng = np.random.default_rng(1)
    for dtype, most in (("float32", 1e-6), ("float64", 1e-14)):
        worker = Worker(500, 60, 4, dtype, False)
        base = rng.standard_normal(500)
        p = np.array([base + 1e-4 * rng.standard_normal(500) for _ in range(4)]).astype(dtype)
        worker.p[:] = p * worker.p.dtype.type(1e-30)
        worker.call("orthogonalise", worker.p, 500, 4)
        found = worker.p.astype(np.float64)
        assert np.abs(found @ found.T - np.eye(4)).max() < most
        if dtype == "float64":
            assert np.abs(found.T - orthogonalise(p.T, 1e-14)).max() < 1e-9


def test_thousands_of_alike_rows_lose_few_bits():
    worker = Worker(70_000, 10, 1, "float32", False)
    (out,) = step([worker], [np.full((70_000, 10), 37, np.float32)])
    assert np.abs(out / 37 - 1).max() < 1e-5


def test_dependent_and_zero_columns_become_zero_and_are_drawn_anew():
    worker = Worker(30, 40, 4, "float32", False, seed=9)
    ones = np.ones((30, 40), np.float32)
    (out,) = step([worker], [ones])
    assert np.allclose(out, 1, atol=1e-5)  # of rank 1
    assert (np.abs(worker.p).sum(axis=1) > 0).tolist() == [True, False, False, False]
    basis = worker.q.astype(np.float64)
    assert np.abs(basis @ basis.T - np.eye(4)).max() < 1e-6  # three columns are random
    (out,) = step([worker], [np.zeros_like(ones)])
    assert not out.any()
    assert np.abs(worker.q @ worker.q.T - np.eye(4)).max() < 1e-6
    gradients = gradient(np.random.default_rng(0), 30, 40).astype(np.float32)
    (out,) = step([worker], [gradients])
    assert 0.5 < np.linalg.norm(out) / np.linalg.norm(gradients) <= 1


def test_the_first_q_is_the_oracles_random_one():
    worker, oracle = Worker(20, 50, 3, "float64", True, seed=77), LowRank(1, 20, 50, 3, 77)
    assert np.abs(worker.q.T - oracle.q).max() < 1e-14
    assert (worker.q != Worker(20, 50, 3, "float64", True, seed=78).q).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", [np.inf, -np.inf, np.nan])
def test_an_overflow_shows_in_the_whole_result_and_leaves_no_trace(dtype, what):
    rng = np.random.default_rng(2)
    workers = workers_of(2, 33, 40, 2, dtype, feedback=True)
    fine = [to_bits(gradient(rng, 33, 40), dtype) for _ in workers]
    step(workers, fine)
    before = [w.q.copy() for w in workers]
    spoilt = to_float(fine[1], dtype)
    spoilt[3, 5] = what
    found = step(workers, [fine[0], to_bits(spoilt, dtype)])
    for worker, result, q in zip(workers, found, before, strict=True):
        assert np.isnan(to_float(result, dtype)).all()
        assert not worker.e.any()
        assert (worker.q == q).all()
    assert all(np.isfinite(to_float(f, dtype)).all() for f in step(workers, fine))


def test_sums_that_overflow_leave_no_trace_either():
    worker = Worker(40, 40, 2, "float32", True)
    (out,) = step([worker], [np.full((40, 40), 3e38, np.float32)])
    assert np.isnan(out).all()
    assert not worker.e.any()
    (out,) = step([worker], [np.ones((40, 40), np.float32)])
    assert np.allclose(out, 1, atol=1e-5)


def test_the_scheduler_cuts_each_factor_by_itself():
    registry = Registry(Placement([1, 1], partition_bytes=4096), 4096)
    factored = (0, "x", 0, 600_000, 3, [300, 500], "codec", [10_000, 5_000])
    known, ranks = registry.declare(*factored)
    lengths = [place.length for place in known.places]
    first = next(i for i in range(len(lengths)) if sum(lengths[:i]) == 10_000)
    assert sum(lengths[first:]) == 5_000
    assert [place.key for place in known.places] == list(range(len(lengths)))
    assert ranks == [0] and not known.failure
    made = make_matrix(
        compression({"compressor": "powersgd", "rank": 5}), "x", 3, (500, 250), lengths, 2
    )
    assert (made.n_first, made.q_offset) == (first, 12_288)


@pytest.mark.parametrize("pieces", [[0, 5], [5, -1], [True, 5], ["5"], [300, 301], [1, 2, 3]])
def test_pieces_that_no_worker_sends_are_refused(pieces):
    declare = {
        "type": "DECLARE",
        "name": "x",
        "generation": 0,
        "nbytes": 600,
        "dtype": 3,
        "shape": [150],
        "codec": "",
        "epoch": 0,
    }
    check(declare)
    check({**declare, "pieces": [100, 200]})
    check({**declare, "pieces": [600]})  # a tensor in halves
    with pytest.raises(BadMessage, match="pieces"):
        check({**declare, "pieces": pieces})
