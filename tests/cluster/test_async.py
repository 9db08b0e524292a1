"""Asynchronous training with real processes: no push is lost, no worker waits, training converges,
and the job survives a worker's death.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from support.jobs import DEADLINE, Job, Process, run

ASYNC = {"BYTEPS_ENABLE_ASYNC": "1"}
#: Least squares on this worker's rows; gradient steps push their changes. The rows have a common
#: solution, so the result does not depend on how often each worker steps. `oracle`: NumPy's result.
LEAST_SQUARES = """
    import bpsx, numpy as np
    bpsx.init()
    rng = np.random.default_rng(5)
    X = rng.normal(size=(60, 6))
    y = X @ rng.normal(size=6)
    oracle = np.linalg.lstsq(X, y, rcond=None)[0]
    rows = slice(bpsx.rank(), None, bpsx.size())
    mine, want = X[rows], y[rows]

    def step(w):
        gradient = 2 * mine.T @ (mine @ w - want) / len(want)
        return bpsx.push_pull(-0.05 * gradient, "w", average=False)

    def distance(w):
        return float(np.abs(w - oracle).max())

    w = bpsx.seed(np.full(6, 7.0 + bpsx.rank()), "w")
    assert (w == 7.0).all()
"""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"BPSX_FIXED_ORDER": "1", "BYTEPS_SERVER_ENABLE_SCHEDULE": "1"},
        {"BYTEPS_ENABLE_IPC": "1"},
    ],
    ids=["plain", "ordered", "shared memory"],
)
def test_the_value_is_the_sum_of_all_that_was_pushed(env):
    """Integers in float64, so that the order of additions does not matter.

    Every reply contains at least all of its worker's own pushes.
    """
    found = run(
        """
        import bpsx, numpy as np

        bpsx.init()
        rng = np.random.default_rng(bpsx.rank())
        shapes = {"small": (3,), "odd": (1001,), "large": (70_000,), "scalar": ()}
        total = {n: np.zeros(s) for n, s in shapes.items()}
        grew = True
        for step in range(60):
            names = rng.permutation(list(shapes))
            deltas = {n: rng.integers(0, 1000, shapes[n]).astype(float) for n in names}
            handles = {n: bpsx.push_pull_async(deltas[n], str(n), average=False) for n in names}
            for n in names:
                total[n] = total[n] + deltas[n]
                grew = grew and bool((bpsx.synchronize(handles[n]) >= total[n]).all())
        bpsx.barrier()
        final = {n: bpsx.push_pull(np.zeros(s), n, average=False) for n, s in shapes.items()}
        bpsx.barrier()
        # The sum of all pushes, also kept by the servers, as a value of another name.
        for n, s in shapes.items():
            bpsx.push_pull(total[n], "total " + n, average=False)
        bpsx.barrier()
        exact = all(
            (bpsx.push_pull(np.zeros(s), "total " + n, average=False) == final[n]).all()
            for n, s in shapes.items()
        )
        report([grew, exact, float(final["large"].sum()), float(total["large"].sum())])
    """,
        workers=4,
        servers=2,
        env={**ASYNC, **env, "BYTEPS_SERVER_ENGINE_THREAD": "2", "BYTEPS_PARTITION_BYTES": "65536"},
    )
    finals = {w[0][2] for w in found}
    assert all(w[0][:2] == [True, True] for w in found) and finals == {sum(w[0][3] for w in found)}


def test_it_converges_with_one_worker_ten_times_slower():
    """Worker 1 takes one step while worker 0 takes ten, so its gradients belong to weights that are
    ten or more steps old.

    The test enforces this pace. Otherwise, on a busy machine, worker 1 could push gradients of
    weights that are hundreds of steps old at the very end, and no bound would hold.
    """
    with Job(
        LEAST_SQUARES
        + """
    steps, each = 0, 10 if bpsx.rank() == 0 else 1
    for line in sys.stdin:
        if line == "end\\n":
            break
        for _ in range(each):
            w = step(w)
        steps += each
        report(f"{steps} taken")
    before = distance(w)
    bpsx.barrier()
    report(
        {
            "steps": steps,
            "distance": distance(bpsx.push_pull(np.zeros(6), "w", average=False)),
            "before": before,
        }
    )
    """,
        env=ASYNC,
    ) as job:
        fast, slow = job.workers
        for n in range(1, 61):
            fast.say("go")
            slow.say("go")
            fast.wait_for_line(f'"{10 * n} taken"')
            slow.wait_for_line(f'"{n} taken"')
        for worker in job.workers:
            worker.say("end")
        ends = [w[-1] for w in job.results()]
    assert [e["steps"] for e in ends] == [600, 60]
    assert all(e["distance"] < 1e-9 and e["before"] < 1e-6 for e in ends), ends


def test_no_worker_waits_for_an_idle_worker():
    with Job(
        LEAST_SQUARES
        + """
    if bpsx.rank() == 1:
        sys.stdin.readline()
    else:
        for _ in range(1500):
            w = step(w)
        report(distance(w))
    """,
        env=ASYNC,
    ) as job:
        # Worker 0 leaves in good order before worker 1 has pushed anything.
        assert job.workers[0].wait() == 0 and job.workers[0].reports()[0] < 1e-6
        job.workers[1].say("go")
        job.results()


@pytest.mark.parametrize("end", ["kill", "exception"])
def test_the_servers_state_survives_a_worker(end):
    with Job(
        LEAST_SQUARES
        + """
    for _ in range(20):
        w = step(w)
    bpsx.barrier()
    state = bpsx.push_pull(np.zeros(6), "w", average=False)
    bpsx.barrier()


    # each step of a single worker decreases this, if the step starts from the servers' value
    def far(w):
        return float(np.linalg.norm(w - oracle))


    report(far(state))
    if bpsx.rank() == 1:
        line, w = sys.stdin.readline(), state
        while line == "kill\\n":
            w = step(w)  # until the process is killed in the middle of one
        raise ValueError("out of luck")
    sys.stdin.readline()
    try:
        bpsx.barrier()
    except bpsx.PeerLeftError as e:
        report(str(e))
    kept = bpsx.push_pull(np.zeros(6), "w", average=False)
    report([far(kept), bool((kept == state).all())])
    w = kept
    for _ in range(3000):
        w = step(w)
    report(distance(w))
    """,
        env=ASYNC,
    ) as job:
        one, two = job.workers
        two.wait_for_line(".")
        two.say(end)
        if end == "kill":
            two.signal(signal.SIGKILL)
        one.wait_for_line("worker 1 (")
        one.say("go")
        assert (one.wait(), two.wait()) == (0, -9 if end == "kill" else 1), one.text()
        start, error, kept, final = one.reports()
        assert "worker 1" in error and final < 1e-9, one.text()
        # the killed worker had continued for a while
        assert kept[0] <= start and (kept[1] or end == "kill"), one.text()
        assert "continue without it" in one.text() and ("out of luck" in one.text()) == (
            end == "exception"
        )
        assert [s.wait() for s in job.servers] == [0]
        assert job.scheduler.wait() == 1 and "worker 1" in job.scheduler.text()


def test_the_death_of_the_only_server_ends_the_job():
    with Job(
        LEAST_SQUARES
        + """
    report("begun")
    while True:
        w = step(w)
    """,
        env={**ASYNC, "BPSX_ELASTIC": "shrink"},
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("begun")
        assert job.scheduler is not None
        job.scheduler.wait_for_line("no worker can join it while it runs")
        job.servers[0].signal(signal.SIGKILL)
        assert all(w.wait() == 1 and "server 0" in w.text() for w in job.workers)


def test_a_single_worker_has_a_server_too():
    found = run(
        LEAST_SQUARES
        + """
    for _ in range(1500):
        w = step(w)
    report(distance(w))
    """,
        workers=1,
        env=ASYNC,
    )
    assert found[0][0] < 1e-9


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_add_in_float32_and_round_once_per_push(dtype):
    found = run(
        f"""
        import bpsx, ml_dtypes, numpy as np
        bpsx.init()
        kind = np.dtype("{dtype}") if "{dtype}" == "float16" else np.dtype(ml_dtypes.bfloat16)
        for n in (3, 50_000):
            w = bpsx.seed(np.full(n, 1.5, kind), f"w{{n}}")
            for i in range(16):
                w = bpsx.push_pull(np.full(n, 0.25, kind), f"w{{n}}", average=False)
            bpsx.barrier()
            report(float(bpsx.push_pull(np.zeros(n, kind), f"w{{n}}")[n // 2]))
    """,
        workers=3,
        env=ASYNC,
    )
    assert found == [[13.5, 13.5]] * 3


def test_average_divides_the_push():
    found = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        for n in (2, 40_000):
            for _ in range(5):
                bpsx.push_pull(np.full(n, 8.0), f"w{n}")
            bpsx.barrier()
            report(float(bpsx.push_pull(np.zeros(n), f"w{n}")[0]))
    """,
        env=ASYNC,
    )
    assert found == [[40.0, 40.0]] * 2


def refused(job: Job, processes: list[Process]) -> Process:
    """Return the one of ``processes`` that came second, after it was refused and has ended.

    The other one waits for a process with the right options.
    """
    end = time.monotonic() + DEADLINE
    while all(p.popen.poll() is None for p in processes):
        assert time.monotonic() < end, "\n".join(p.text() for p in job.processes)
        time.sleep(0.05)
    found = next(p for p in processes if p.popen.poll() is not None)
    assert found.wait() == 1
    return found


@pytest.mark.parametrize(("everybody", "worker_1"), [("0", "1"), ("1", "0")])
def test_workers_that_differ_are_refused(everybody, worker_1):
    with Job(
        "import bpsx; bpsx.init()",
        servers=0,
        env={"BYTEPS_ENABLE_ASYNC": everybody, "DMLC_NUM_SERVER": "1"},
        worker_env={1: {"BYTEPS_ENABLE_ASYNC": worker_1}},
    ) as job:
        text = refused(job, job.workers).text()
        assert (
            "BYTEPS_ENABLE_ASYNC" in text and "must be the same on all workers and servers" in text
        )


def test_a_server_with_other_options_is_refused():
    with Job(
        "import bpsx; bpsx.init()", servers=0, workers=1, env={**ASYNC, "DMLC_NUM_SERVER": "1"}
    ) as job:
        job._env["BYTEPS_ENABLE_ASYNC"] = "0"
        job.start_server(0)
        text = refused(job, job.workers + job.servers).text()
        # depends on which one comes last
        assert "BYTEPS_ENABLE_ASYNC" in text and (
            "0 on a server" in text or "0 on this server" in text
        )


def test_seed_and_a_job_without_servers_are_refused_by_name():
    found = run("""
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.seed(np.ones(3), "w")
        except bpsx.ConfigError as e:
            report(str(e))
    """)
    assert all("BYTEPS_ENABLE_ASYNC=1" in w[0] for w in found)
    done = subprocess.run(
        [sys.executable, "-c", "import bpsx; bpsx.init()"],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            **ASYNC,
            "DMLC_NUM_SERVER": "0",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": "1",
            "DMLC_WORKER_ID": "0",
        },
    )
    assert done.returncode == 1 and "at least one server is needed" in done.stderr


def test_a_local_asynchronous_job_continues_without_a_dead_worker(tmp_path):
    """The launcher's grace time is over long before worker 0 ends; its status is still the dead
    worker's.
    """
    script = tmp_path / "train.py"
    script.write_text("""
import os, time
import bpsx, numpy as np
bpsx.init()
if bpsx.rank() == 1:
    os._exit(3)
end = time.monotonic() + 4
while time.monotonic() < end:
    w = bpsx.push_pull(np.ones(4), "w", average=False)
print("trained to the end", bool(w[0] > 10), flush=True)
""")
    begun = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bpsx.launch",
            "--local",
            "--workers",
            "2",
            "--grace",
            "1",
            sys.executable,
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **ASYNC},
    )
    assert done.returncode == 3 and "trained to the end True" in done.stdout, (
        done.stdout + done.stderr
    )
    assert (
        "the job has failed" not in done.stderr and "the job is over: worker 1 (" in done.stderr
    ), done.stderr
    assert "; the other workers continued and left in good order" in done.stderr
    assert time.monotonic() - begun > 4
