"""Sums as factors of low rank in whole jobs: the results are those of the oracle in float64, and
their bits depend on nothing but the gradients.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bpsx.compression.spec import mix, stream
from bpsx.kernels.reference_low_rank import LowRank
from support.jobs import TRANSPORTS, Job, run
from support.traces import load

STEPS = 4
#: Name, dtype, shape, compression_params, average.
CASES: list[tuple[str, str, list[int], dict[str, Any], bool]] = [
    ("mean", "float32", [96, 200], {"rank": 2, "ef": "vanilla"}, True),
    ("summed", "float32", [150, 7, 19], {"rank": 3, "ef": "vanilla", "seed": 2**64 - 1}, False),
    ("plain", "float64", [600, 3, 300], {"rank": 1}, True),
    ("half", "float16", [128, 130], {"rank": 2, "ef": "vanilla"}, True),
    ("brain", "bfloat16", [128, 130], {"rank": 2, "ef": "vanilla"}, False),
    ("tall", "float32", [9000, 8], {"rank": 2, "ef": "vanilla"}, True),
]
#: Relative to the largest element.
ROUNDING = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-4, "float64": 1e-9}

TRAINING = """
import bpsx, hashlib, json, ml_dtypes, numpy as np, os, pickle
from bpsx.api.verbs import session

def gradient(name, shape, of, step):
    # Its singular values decay.
    rng = np.random.default_rng([len(name), of, step])
    n, m = shape[0], int(np.prod(shape[1:]))
    r = min(n, m, 12)
    left, right = rng.standard_normal((n, r)), rng.standard_normal((r, m))
    return (left * 2.0 ** -np.arange(r) @ right).reshape(shape)

def typed(made, dtype):
    return made.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

bpsx.init()
rank, cases = bpsx.rank(), json.loads(os.environ["CASES"])
begin, end = json.loads(os.environ["SPAN"])
folder = os.environ["OUT"]
for name, *_, params, _ in cases:
    bpsx.declare(name, compression={"compressor": "powersgd", **params})
if begin:
    session().compressing.restore(pickle.load(open(f"{folder}/{rank}.{begin}.pickle", "rb")))
for step in range(begin, end):
    if rank == 0:
        pass_gate(step)
    handles = [
        bpsx.push_pull_async(typed(gradient(name, shape, rank, step), dtype), name, average=average)
        for name, dtype, shape, _, average in cases
    ]
    report(["step", step])
    for (name, dtype, *_), handle in zip(cases, handles):
        out = bpsx.synchronize(handle)
        report([name, step, hashlib.sha256(out.tobytes()).hexdigest()])
        if os.environ.get("KEEP"):
            np.save(f"{folder}/{name}.{rank}.{step}.npy", out.astype(np.float64))
state = session().compressing.save([name for name, *_ in cases])
pickle.dump(state, open(f"{folder}/{rank}.{end}.pickle", "wb"))
report({name: hashlib.sha256(of["worker"].tobytes()).hexdigest() for name, of in state.items()})
report(session().counters()["bytes_sent"])
bpsx.shutdown()
"""


def environment(out: Path, begin: int = 0, end: int = STEPS, **more: str) -> dict[str, str]:
    return {
        "CASES": json.dumps(CASES),
        "SPAN": json.dumps([begin, end]),
        "OUT": str(out),
        "BYTEPS_MIN_COMPRESS_BYTES": "1000",
        "BYTEPS_PARTITION_BYTES": "4096",
        "BPSX_FIXED_ORDER": "1",
        **more,
    }


def bits(reports: list[list[Any]]) -> list[list[Any]]:
    """The workers' reports without their last one and those of steps: results and state."""
    return [[one for one in report[:-1] if "step" not in one] for report in reports]


def gradient(name: str, shape: list[int], of: int, step: int) -> np.ndarray:
    rng = np.random.default_rng([len(name), of, step])
    n, m = shape[0], math.prod(shape[1:])
    r = min(n, m, 12)
    left, right = rng.standard_normal((n, r)), rng.standard_normal((r, m))
    return (left * 2.0 ** -np.arange(r) @ right).reshape(shape)


def typed(made: np.ndarray, dtype: str) -> np.ndarray:
    import ml_dtypes

    return made.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float64)


@pytest.mark.parametrize(
    ("transport", "workers", "processes"),
    [("zmq", 2, 1), ("tcp", 3, 1), ("shm", 1, 1), ("zmq", 4, 2)],
)
def test_results_are_the_oracles(
    tmp_path: Path, transport: str, workers: int, processes: int
) -> None:
    env = environment(tmp_path, KEEP="1", BYTEPS_FORCE_DISTRIBUTED="1", **TRANSPORTS[transport])
    reports = run(TRAINING, workers, 2, processes=processes, env=env)
    alike = [[one for one in report if len(one) == 3] for report in bits(reports)]
    assert all(report == alike[0] for report in alike)
    sent = sum(report[-1] for report in reports)
    tensors = sum(math.prod(shape) * 4 for _, _, shape, _, _ in CASES) * STEPS * workers / processes
    assert 0 < sent < tensors / 5
    for name, dtype, shape, params, average in CASES:
        seed = mix(params.get("seed", 0), stream(name.encode(), 0))
        rows, columns = shape[0], math.prod(shape[1:])
        oracle = LowRank(workers, rows, columns, params["rank"], seed, "ef" in params)
        for step in range(STEPS):
            pushed = [typed(gradient(name, shape, of, step), dtype) for of in range(workers)]
            wanted = oracle.step(pushed, workers if average else 1).reshape(shape)
            found = np.load(tmp_path / f"{name}.0.{step}.npy")
            assert found.shape == wanted.shape
            most = ROUNDING[dtype] * np.abs(pushed).max() * (1 if average else workers)
            assert np.abs(found - wanted).max() < most, (name, step)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """A job's files, and the bits of its results and of its state."""
    folder = tmp_path_factory.mktemp("undisturbed")
    env = environment(folder, BYTEPS_THREADPOOL_SIZE="3")
    return folder, bits(run(TRAINING, 2, 2, env=env))


@pytest.mark.parametrize(("threads", "partition", "servers"), [(1, 65536, 1), (8, 8192, 3)])
def test_bits_do_not_depend_on_threads_partitions_and_servers(
    tmp_path: Path,
    undisturbed: tuple[Path, list[list[Any]]],
    threads: int,
    partition: int,
    servers: int,
) -> None:
    env = environment(
        tmp_path, BYTEPS_THREADPOOL_SIZE=str(threads), BYTEPS_PARTITION_BYTES=str(partition)
    )
    assert bits(run(TRAINING, 2, servers, env=env)) == undisturbed[1]


def test_a_job_continues_from_saved_state_with_other_servers_and_partitions(
    tmp_path: Path, undisturbed: tuple[Path, list[list[Any]]]
) -> None:
    half = STEPS // 2
    first = bits(run(TRAINING, 2, 2, env=environment(tmp_path, 0, half)))
    env = environment(tmp_path, half, STEPS, BYTEPS_PARTITION_BYTES="16384")
    second = bits(run(TRAINING, 2, 3, env=env))
    assert [a[:-1] + b for a, b in zip(first, second, strict=True)] == undisturbed[1]


def test_timelines_have_the_work_on_matrices_and_the_rounds_of_their_factors(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "traces"
    env = environment(
        tmp_path,
        BYTEPS_TRACE_ON="1",
        BYTEPS_TRACE_START_STEP="1",
        BYTEPS_TRACE_END_STEP="3",
        CASES=json.dumps(CASES[:1]),
    )
    more = {i: {"BYTEPS_TRACE_DIR": str(folder / f"worker-{i}")} for i in range(2)}
    run(TRAINING, 2, 1, env=env, worker_env=more)
    for i in range(2):
        events = load(folder / f"worker-{i}/0/comm.json")
        kinds = Counter(
            "total" if event["tid"] == "total" else event["name"].rpartition(".")[2]
            for event in events
        )
        # Three pieces of work before the second push, two after it, for each of three steps.
        assert kinds == {"total": 3, "COMPRESS": 9, "PUSH": 6, "PULL": 6, "DECOMPRESS": 6}


def test_disagreements_are_errors_that_name_both_sides() -> None:
    found = run(
        """
        import bpsx, numpy as np
        from bpsx.errors import MismatchError
        bpsx.init()
        r = bpsx.rank()
        ones = np.ones((100, 100), np.float32)
        powersgd = {"compressor": "powersgd", "rank": 2, "ef": "vanilla"}
        other = [{"rank": 3}, {"ef": ""}, {"compressor": "onebit", "rank": None}, {"seed": 5}]
        for i, change in enumerate(other):
            bpsx.declare(f"x{i}", compression={**powersgd, **(change if r else {})})
        bpsx.declare("shape", compression=powersgd)
        bpsx.declare("divisor", compression=powersgd)
        def attempt(name, array, **more):
            try:
                bpsx.push_pull(array, name, **more)
            except MismatchError as error:
                report(str(error))
        for i in range(len(other)):
            attempt(f"x{i}", ones)
        attempt("shape", np.ones((50, 200) if r else (200, 50), np.float32))
        attempt("divisor", ones, average=bool(r))
        for name in ("x0", "divisor"):
            bpsx.declare(name, compression=powersgd)
            report(float(bpsx.push_pull(ones, name, average=False)[3, 4]))
        bpsx.shutdown()
        """,
        2,
        1,
        env={"BYTEPS_MIN_COMPRESS_BYTES": "1000"},
    )
    for reports in found:
        *errors, first, second = reports
        words = ['"rank": 3', '"ef": "vanilla"', "onebit", '"seed": 5', "(200, 50)", "same op"]
        assert all(word in error for word, error in zip(words, errors, strict=True)), errors
        assert "'divisor'" in errors[-1]
        assert first == pytest.approx(2) and second == pytest.approx(2)


def test_uneven_workers_overflows_and_tensors_that_are_not_factored() -> None:
    found = run(
        """
        import bpsx, numpy as np
        from bpsx.errors import ConfigError
        bpsx.init()
        r = bpsx.rank()
        for name in ("x", "flat", "small", "wide", "whole"):
            bpsx.declare(name, compression={"compressor": "powersgd", "rank": 2, "ef": "vanilla"})
        ones = np.ones((50, 60), np.float32)
        sum_of = lambda array, name="x": bpsx.push_pull(array, name, average=False)
        for gathering in range(2):
            for step in range(2 + 2 * r):
                want = 3 if step < 2 else 2
                report(bool(np.allclose(sum_of(ones * (r + 1)), want, rtol=1e-5)))
            bpsx.join()
        for what in (np.inf, np.nan):
            bad = ones.copy()
            bad[1, 2] = what if r else 1
            report(bool(np.isnan(sum_of(bad)).all()))
            report(bool(np.allclose(sum_of(ones), 2, rtol=1e-5)))
        noise = np.random.default_rng(r).standard_normal
        for name, shape in (("flat", 4000), ("small", (3, 3)), ("wide", (2, 1000))):
            mine = noise(shape).astype(np.float32)
            got = sum_of(mine, name)
            report(bool((got == sum_of(mine, name)).all()))
        try:
            sum_of(np.ones((50, 60), np.int64), "whole")
        except ConfigError as error:
            report(str(error))
        bpsx.shutdown()
        """,
        2,
        1,
        env={"BYTEPS_MIN_COMPRESS_BYTES": "100"},
    )
    for rank, reports in enumerate(found):
        *good, error = reports
        assert good == [True] * (2 * (2 + 2 * rank) + 4 + 3)
        assert "'whole'" in error and "int64" in error and "bfloat16" in error


def test_a_joined_root_works_for_the_others_of_its_machine() -> None:
    found = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        r = bpsx.rank()
        bpsx.declare("x", compression={"compressor": "powersgd", "rank": 2, "ef": "vanilla"})
        ones = np.ones((50, 60), np.float32)
        counts = [3, 1, 2, 1]       # ranks 1 and 3 are the roots
        for _ in range(2):
            for step in range(counts[r]):
                want = sum(n > step for n in counts)
                got = bpsx.push_pull(ones, "x", average=False)
                report(bool(np.allclose(got, want, rtol=1e-5)))
            bpsx.join()
        bpsx.shutdown()
        """,
        4,
        1,
        processes=2,
        env={"BYTEPS_MIN_COMPRESS_BYTES": "100"},
    )
    assert found == [[True] * 6, [True] * 2, [True] * 4, [True] * 2]


def test_state_survives_a_suspension() -> None:
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        r = bpsx.rank()
        def declare(name):
            bpsx.declare(name, compression={"compressor": "powersgd", "rank": 1, "ef": "vanilla"})
        declare("a"), declare("b")
        def go(name, step):
            g = np.random.default_rng([step, r]).standard_normal((40, 50)).astype(np.float32)
            return bpsx.push_pull(g, name).tolist()
        for step in range(2):
            go("a", step)
        bpsx.suspend()
        report("suspended")
        sys.stdin.readline()
        bpsx.resume(2, 1)
        report(go("a", 2))
        bpsx.shutdown()
        """,
        2,
        1,
        env={"BYTEPS_MIN_COMPRESS_BYTES": "100"},
    ) as job:
        for worker in job.workers:
            worker.wait_for_line('"suspended"')
        job.servers_anew(2)
        for worker in job.workers:
            worker.say("go")
        suspended = [report[-1] for report in job.results()]
    again = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        r = bpsx.rank()
        bpsx.declare("a", compression={"compressor": "powersgd", "rank": 1, "ef": "vanilla"})
        for step in range(3):
            g = np.random.default_rng([step, r]).standard_normal((40, 50)).astype(np.float32)
            got = bpsx.push_pull(g, "a").tolist()
        report(got)
        bpsx.shutdown()
        """,
        2,
        1,
        env={"BYTEPS_MIN_COMPRESS_BYTES": "100"},
    )
    assert [[report] for report in suspended] == again


def test_a_stall_names_the_tensor_and_all_go_on_afterwards() -> None:
    found = run(
        """
        import bpsx, numpy as np
        from bpsx.errors import StallError
        bpsx.init()
        ones = np.ones((50, 60), np.float32)
        for name in ("first", "second"):
            bpsx.declare(name, compression={"compressor": "powersgd", "rank": 2, "ef": "vanilla"})
            bpsx.push_pull(ones, name)
        try:
            bpsx.push_pull(ones, "second" if bpsx.rank() else "first")
        except StallError as error:
            report(str(error))
        report(float(bpsx.push_pull(ones, "first")[1, 2]))
        bpsx.shutdown()
        """,
        2,
        1,
        env={"BYTEPS_MIN_COMPRESS_BYTES": "100", "BPSX_DEADLOCK_SECONDS": "2"},
    )
    for error, after in found:
        assert "'first'" in error and "'second'" in error and "powersgd" in error, error
        assert after == pytest.approx(1)


def test_what_cannot_work_is_refused() -> None:
    found = run(
        """
        import bpsx
        bpsx.init()
        for params in ({"rank": 4}, {"rank": 0}, {}, {"rank": 2, "ef": "corrected"}):
            try:
                bpsx.declare("x", compression={"compressor": "powersgd", **params})
            except ValueError as error:
                report(str(error))
        bpsx.shutdown()
        """,
        1,
        1,
        env={"BYTEPS_ENABLE_ASYNC": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"},
    )
    words = ["BYTEPS_ENABLE_ASYNC=1", "rank=0", "rank is missing", "ef='corrected'"]
    assert all(word in error for word, error in zip(words, found[0], strict=True)), found
