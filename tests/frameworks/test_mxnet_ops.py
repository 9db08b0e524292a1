"""bpsx.mxnet's operations: their sums, their order, and rejected arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.mxnet_job import Finished, each, run_job, values
from support.running import alone

pytestmark = pytest.mark.timeout(300)
WORKERS = 2
WORK = str(Path(__file__).with_name("mxnet_ops_work.py"))
JOBS = [
    "job_sums",
    "job_bfloat16",
    "job_numpy_arrays",
    "job_in_flight",
    "job_dependencies",
    "job_layouts",
    "job_one_name",
    "job_threads",
    "job_without_names",
    "job_broadcast",
    "job_another_device",
    "job_arguments_that_reach_the_core",
    "job_declared",
    "job_compression_types",
    "job_refused",
    "job_mismatch",
    "job_forks",
]


def total(shape: Any, dtype: str = "float32") -> np.ndarray:
    return values(shape, 0, dtype) + values(shape, 1, dtype)


@pytest.fixture(scope="module", params=["", "NaiveEngine"], ids=lambda engine: engine or "threads")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run the job with MXNet's default engine and with NaiveEngine, which executes each operation
    at once.
    """
    naive = request.param == "NaiveEngine"
    jobs = [
        name
        for name in JOBS
        if not (naive and name in ("job_in_flight", "job_mismatch", "job_forks"))
    ]
    env = {"MXNET_ENGINE_TYPE": "NaiveEngine"} if naive else {}
    finished = run_job(
        WORK, jobs, tmp_path_factory.mktemp("ops"), BYTEPS_MIN_COMPRESS_BYTES="1000", **env
    )
    assert finished.status == 0, finished.output[-3000:]
    return finished


def found_in(job: Finished, name: str) -> list[Any]:
    if name not in job.results[0]:
        pytest.skip("with threads only")
    return each(job, name)


def test_sums_and_averages(job: Finished) -> None:
    for found in found_in(job, "job_sums"):
        for (dtype, shape, average), got in found.items():
            want = total(shape, dtype)
            if average:
                want = want // 2 if want.dtype.kind in "iu" else (want / 2).astype(dtype)
            assert got.dtype == want.dtype and (got == want).all(), (dtype, shape, average)
        assert len(found) == 70


def test_bfloat16(job: Finished) -> None:
    for got in found_in(job, "job_bfloat16"):
        assert (got == total((3, 4))).all()


def test_arrays_of_numpys_kind(job: Finished) -> None:
    for matrix, empty, scalar in found_in(job, "job_numpy_arrays"):
        assert (matrix == total((2, 3))).all() and empty.shape == (0, 3) and scalar == 3.0


def test_many_are_in_flight_at_once(job: Finished) -> None:
    for arrays in found_in(job, "job_in_flight"):
        assert all((x == total((1000 + i,))).all() for i, x in enumerate(arrays))


def test_dependencies(job: Finished) -> None:
    for x, _, summed in found_in(job, "job_dependencies"):
        wanted = [values((4, 3), rank) for rank in range(WORKERS)]
        for _ in range(2):
            both = sum(2 * w for w in wanted)
            wanted = [both + 1, both + 1]
        assert (x == wanted[0]).all() and summed == total((300_000,)).sum()
    for rank, (_, y, _) in enumerate(found_in(job, "job_dependencies")):
        own = values((4, 3), rank)
        own[1:3] = total((4, 3))[1:3]
        assert (y == own).all(), "what is beside the view stays"


def test_arrays_in_a_layout_of_mkl_dnns(job: Finished) -> None:
    results = found_in(job, "job_layouts")
    for _, got in results:
        assert np.allclose(got, sum(alone for alone, _ in results))


def test_one_order_for_one_name(job: Finished) -> None:
    for arrays in found_in(job, "job_one_name"):
        assert [float(x[0]) for x in arrays] == [2.0 * i for i in range(10)]


def test_without_names(job: Finished) -> None:
    for x, y in found_in(job, "job_without_names"):
        assert (x == total((3,)) / 2).all() and (y == total((4,))).all()


def test_broadcast(job: Finished) -> None:
    for arrays, copies in found_in(job, "job_broadcast"):
        for dtype, x in arrays.items():
            assert (x == (values((3, 2), 11) % 2).astype(dtype)).all(), dtype
        assert len(copies) == 2 and all((copy == 1).all() for copy in copies)


def test_arrays_on_another_device_are_copied_here_and_back(job: Finished) -> None:
    for x in found_in(job, "job_another_device"):
        assert (x == 2 * total((4, 3)) + 1).all()


def test_arguments_reach_the_core(job: Finished) -> None:
    for told in found_in(job, "job_arguments_that_reach_the_core"):
        assert sorted(told) == [("rate", 0, False, 0.5), ("told", -7, True, -1.0)]


def test_declared_compression(job: Finished) -> None:
    for ours, again, chosen, x in found_in(job, "job_declared"):
        assert again == ours + 1 and chosen[0] == chosen[1]
        assert (
            "compressor='topk'" in chosen[0]
            and "('k', 2)" in chosen[0]
            and "ef='vanilla'" in chosen[0]
        )
        assert (
            "('k', 4)" in chosen[2]
            and "('partition', 'natural')" in chosen[2]
            and "('normalize', 'max')" in chosen[2]
            and "seed=7" in chosen[2]
        )
        assert "('scaling', True)" in chosen[3] and "momentum='nesterov', mu=0.5" in chosen[3]
        assert "compressor='powersgd', options=(('rank', 3),)" in chosen[4]
        assert np.count_nonzero(x) == 2 and x.max() == 18.0


def test_types_of_compression(job: Finished) -> None:
    for found, untouched in found_in(job, "job_compression_types"):
        assert (
            found
            == [
                ("float32", "float32", [2.0, 2.0**-29, 6.0]),
                ("float16", "float32", [2.0, 0.0, 6.0]),
            ]
            and untouched
        )


def test_refused(job: Finished) -> None:
    expected = [
        "UnsupportedTensor: byteps_push_pull: expected a mxnet.nd.NDArray, not ndarray",
        "stype 'row_sparse' cannot be sent",
        "UnsupportedDType: byteps_push_pull of 'bool': dtype bool cannot",
        "name must be a string",
        "priority=2147483648",
        "is_average must be True or False",
        "a mapping from names",
        "root_rank=2: expected 0 to 1",
        "UnsupportedTensor: broadcast_parameters: 'x'",
        "has no shape yet",
        "name='': expected a string",
        "compressor='zip'",
        "colour='red': there is no such key",
        "expected an optimizer of MXNet, not str",
        "is distributed already",
        "root_rank=-1",
        "rows_weight: sparse Parameters",
        "compression_params: compressor='zip'",
        "needs mu",
        "given twice",
        "ConfigError: DistributedTrainer: optimizer=None",
        "compression_params=FP16Compressor is a class",
        "names parameters that the optimizer does not have: wieght; it has dense",
        "params has the key 1",
        "was not written by save_states()",
        "FileNotFoundError",
    ]
    for told in found_in(job, "job_refused"):
        for text, part in zip(told, expected, strict=True):
            assert part in text


def test_one_name_and_array_from_several_threads(job: Finished) -> None:
    assert found_in(job, "job_threads") == [[1.0] * 3] * WORKERS


def test_a_mismatch_is_raised_where_the_result_is_waited_for(job: Finished) -> None:
    for told, good, again in found_in(job, "job_mismatch"):
        assert "MismatchError: tensor 'bad': " in told and "(3,)" in told and "(4,)" in told
        assert (good == 2).all() and (again == 2).all()


def test_a_process_that_forks_while_operations_wait(job: Finished) -> None:
    for x in found_in(job, "job_forks"):
        assert (x == total((20_000,)) / 2).all()


def test_before_init() -> None:
    script = "import bpsx.mxnet as bps, mxnet as mx\nbps.byteps_push_pull(mx.nd.ones((3,)))"
    status, _, errors = alone(["-c", script])
    assert status == 1 and "NotInitializedError: bpsx is not initialised" in errors
