"""Whole jobs return right sums for every dtype, size, number of workers and servers, and partition
size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.jobs import TRANSPORTS, Job, run

# Each worker draws its values from a generator seeded by (case, rank), so every worker can compute
# what all have pushed.
SUMS = """
import bpsx, json, ml_dtypes, numpy as np, os
from bpsx.dtypes import BY_NAME


def draw(dtype, n, rank, seed):
    rng = np.random.default_rng([seed, rank])
    if "int" in dtype:
        return rng.integers(-100 if dtype[0] == "i" else 0, 100, n).astype(dtype)
    return rng.normal(size=n).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


bpsx.init()
for seed, (dtype, n, average) in enumerate(json.loads(os.environ["CASES"])):
    all_ = [draw(dtype, n, r, seed) for r in range(bpsx.size())]
    got = bpsx.push_pull(all_[bpsx.rank()], name=f"case{seed}", average=average)
    assert got.dtype == all_[0].dtype and got.shape == (n,)
    exact = sum(a.astype(np.float64) for a in all_)
    if average:
        exact = np.floor(exact / bpsx.size()) if "int" in dtype else exact / bpsx.size()
    if "int" in dtype:
        bits = 8 * BY_NAME[dtype].itemsize
        want = (
            (exact.astype(np.int64) % (1 << bits) if bits < 64 else exact.astype(np.int64))
            .astype(np.uint64)
            .astype(got.dtype)
        )
        assert (got == want).all(), (dtype, n, average)
    else:
        # one rounding to the dtype, plus the accumulator's: sums of n terms in float32 (halves) or
        # the type itself
        eps = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}[dtype]
        wide = 2**-24 if dtype in ("float16", "bfloat16", "float32") else 2**-53
        magnitude = sum(abs(a.astype(np.float64)) for a in all_)
        # ... and one more if the sum of a machine is sent in the dtype
        between = eps * magnitude / (bpsx.size() if average else 1) if bpsx.local_size() > 1 else 0
        bound = (
            eps * abs(exact)
            + between
            + (bpsx.size() + 1) * wide * magnitude
            + (6e-8 if dtype == "float16" else 1e-40)
        )
        assert (abs(got.astype(np.float64) - exact) <= bound).all(), (dtype, n, average)
    import hashlib

    report(hashlib.sha256(got.tobytes()).hexdigest())
"""

DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64"]
sizes = st.one_of(
    st.sampled_from([0, 1, 2, 3, 1023, 1024, 1025, 8192, 8193]), st.integers(0, 200_000)
)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    workers=st.integers(1, 4),
    servers=st.integers(1, 3),
    partition_bytes=st.sampled_from([4096, 4097, 20_000, 4_096_000]),
    lanes=st.integers(1, 2),
    fixed_order=st.booleans(),
    scheduled=st.booleans(),
    credit=st.sampled_from([0, 1, 4]),
    hash_fn=st.sampled_from(["balanced", "naive", "built_in", "djb2", "sdbm"]),
    transport=st.sampled_from(sorted(TRANSPORTS)),
    cases=st.lists(
        st.tuples(st.sampled_from(DTYPES), sizes, st.booleans()), min_size=20, max_size=40
    ),
)
def test_sums_match_float64_and_are_the_same_bits_everywhere(
    workers,
    servers,
    partition_bytes,
    lanes,
    fixed_order,
    scheduled,
    credit,
    hash_fn,
    transport,
    cases,
):
    found = run(
        SUMS,
        workers,
        servers,
        env={
            "CASES": json.dumps(cases),
            "BYTEPS_PARTITION_BYTES": str(partition_bytes),
            "BYTEPS_SERVER_ENGINE_THREAD": str(lanes),
            "BPSX_FIXED_ORDER": str(int(fixed_order)),
            "BYTEPS_SERVER_ENABLE_SCHEDULE": str(int(scheduled)),
            "BYTEPS_SCHEDULING_CREDIT": str(credit),
            "BYTEPS_KEY_HASH_FN": hash_fn,
            "BYTEPS_FORCE_DISTRIBUTED": "1",
            **TRANSPORTS[transport],
        },
    )
    assert all(f == found[0] and len(f) == len(cases) for f in found)


def test_a_tensor_larger_than_all_credit():
    assert run("""
        import bpsx, numpy as np
        bpsx.init()
        base = (np.arange(30_000_000) % 1000).astype(np.float32)
        a = base + bpsx.rank()
        bpsx.push_pull(a, name="x", average=False, output=a)
        report(bool((a == 2 * base + 1).all()))
    """) == [[True], [True]]


def test_order_names_and_priorities_may_differ_between_workers():
    """Workers that push in different orders, with little credit, must not wait for each other."""
    assert run(
        """
        import bpsx, numpy as np

        bpsx.init()
        order = np.random.default_rng(bpsx.rank()).permutation(200)
        for _ in range(3):
            handles = {
                i: bpsx.push_pull_async(
                    np.full(20_000, i, np.float32),
                    name=f"t{i}",
                    average=False,
                    priority=int(i) * (-1) ** bpsx.rank(),
                )
                for i in order
            }
            assert all((bpsx.synchronize(h) == 2 * i).all() for i, h in handles.items())
        report("good")
    """,
        env={"BYTEPS_SCHEDULING_CREDIT": "1", "BYTEPS_PARTITION_BYTES": "4096"},
    ) == [["good"], ["good"]]


def test_numpy_verbs():
    assert run("""
        import bpsx, numpy as np

        bpsx.init()
        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        assert (bpsx.local_rank(), bpsx.local_size(), n) == (0, 1, 2)
        # unnamed, not contiguous, 0-d, output given, in place
        a = np.arange(12, dtype=np.float64).reshape(3, 4) + r
        assert (bpsx.push_pull(a.T, average=False) == (2 * np.arange(12).reshape(3, 4) + 1).T).all()
        assert bpsx.push_pull(np.float32(r), average=False) == 1
        out = np.empty_like(a)
        assert (
            bpsx.push_pull(a, output=out) is out
            and (out == np.arange(12).reshape(3, 4) + 0.5).all()
        )
        assert bpsx.push_pull(a, output=a) is a
        # handles
        h = bpsx.push_pull_async(np.ones(10, np.int32), name="h", average=False)
        assert (
            (bpsx.synchronize(h) == 2).all() and bpsx.poll(h) and (bpsx.synchronize(h) == 2).all()
        )
        # one name with another shape: declared again, on all workers
        for n in (5, 7, 5):
            assert (bpsx.push_pull(np.ones(n, np.float32), name="varies", average=False) == 2).all()
        # broadcast keeps bits of any dtype
        for value in (
            np.array([True, False]),
            np.array([1 + 2j]),
            np.array(["2026"], "datetime64[Y]"),
            np.float32([np.nan, -0.0]),
        ):
            mine = value if r == 1 else np.zeros_like(value)
            assert (
                bpsx.broadcast(mine, root_rank=1, name=f"b{value.dtype}").tobytes()
                == value.tobytes()
            )
        assert [bpsx.declare(x) for x in ("p", "q", "p")] == [
            bpsx.declare("p"),
            bpsx.declare("q"),
            bpsx.declare("p"),
        ]
        bpsx.barrier()
        ms, speed = bpsx.get_pushpull_speed()
        assert ms > 1e12 and speed > 0
        # errors name the problem
        for bad, text in (
            (lambda: bpsx.push_pull(np.array([1j])), "complex128"),
            (lambda: bpsx.push_pull(np.array(["x"])), "str"),
            (lambda: bpsx.push_pull(a, output=np.empty(3)), "must be equal"),
            (lambda: bpsx.broadcast(a, root_rank=2), "0 to 1"),
            (lambda: bpsx.broadcast(np.array([object()])), "object"),
            (lambda: bpsx.push_pull(a, output=a.T[::2]), "must be equal"),
        ):
            try:
                bad()
            except bpsx.BpsxError as e:
                assert text in str(e), (text, e)
            else:
                raise AssertionError(f"nothing was raised: {text}")
        report("good")
    """) == [["good"], ["good"]]


def test_one_worker_needs_no_other_process():
    code = """
import bpsx, numpy as np
bpsx.init()
a = np.arange(5, dtype=np.float32)
assert (bpsx.push_pull(a) == a).all() and (bpsx.broadcast(a) == a).all() and bpsx.size() == 1
out = np.zeros(5, np.float32)
h = bpsx.push_pull_async(a, output=out)
assert bpsx.poll(h) and bpsx.synchronize(h) is out and (out == a).all()
bpsx.barrier()
print("alone")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_"))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "alone\n"), done.stderr


@pytest.mark.parametrize(
    "verb", ["rank()", "size()", "barrier()", "push_pull(None)", "declare('x')"]
)
def test_before_init_the_error_says_so(verb):
    import bpsx

    with pytest.raises(bpsx.NotInitializedError, match="init"):
        eval(f"bpsx.{verb}")


def test_several_processes_of_one_machine_are_workers_of_their_own():
    assert (
        run(
            """
        import bpsx, numpy as np
        bpsx.init()
        assert bpsx.rank() == 2 * int(os.environ["DMLC_WORKER_ID"]) + bpsx.local_rank()
        report(float(bpsx.push_pull(np.float32([bpsx.rank()]), average=False)[0]))
        report(bpsx.size())
    """,
            workers=4,
            processes=2,
            env={"BPSX_LOCAL_REDUCE": "0"},
        )
        == [[6.0, 4]] * 4
    )


def test_again_after_shutdown():
    """Call init and shutdown repeatedly in one process; the second job has its own scheduler."""
    source = """
        import bpsx, numpy as np

        for i in range(3):
            bpsx.init()
            assert (
                bpsx.push_pull(np.ones(10, np.float32), name="x", average=False) == bpsx.size()
            ).all()
            bpsx.shutdown()
            bpsx.shutdown()
            try:
                bpsx.rank()
            except bpsx.NotInitializedError:
                report("ended")
            if i < 2:
                os.environ["DMLC_PS_ROOT_PORT"] = sys.stdin.readline().strip()
    """
    with (
        Job(source) as first,
        Job(source, workers=0, env={"DMLC_NUM_WORKER": "2"}) as second,
        Job(source, workers=0, env={"DMLC_NUM_WORKER": "2"}) as third,
    ):
        for following in (second, third):
            for worker in first.workers:
                worker.say(following.port)
        assert first.results() == [["ended"] * 3] * 2
        second.results(), third.results()


def test_a_script_that_holds_the_gil_does_not_stop_the_exchange():
    """Worker 0 submits, then stays in one long C call; worker 1 must get its sums meanwhile."""
    source = """
        import bpsx, numpy as np, ctypes
        bpsx.init()
        a = np.ones(1_000_000, np.float32)
        bpsx.push_pull(a, name="warm")
        handles = [bpsx.push_pull_async(a, name=f"x{i}") for i in range(20)]
        for h in handles: bpsx.synchronize(h)
        bpsx.barrier()
        handles = [bpsx.push_pull_async(a, name=f"x{i}") for i in range(20)]
        if bpsx.rank() == 0:
            report("holding")
            libc = ctypes.PyDLL(None)       # PyDLL keeps the GIL during the call
            libc.read(0, ctypes.create_string_buffer(1), 1)
        for h in handles: bpsx.synchronize(h)
        report("home")
    """
    with Job(source) as job:
        job.workers[0].wait_for_line("holding")
        job.workers[1].wait_for_line("home")
        assert '"home"' not in job.workers[0].lines
        job.workers[0].say("go")
        assert job.results() == [["holding", "home"], ["home"]]
