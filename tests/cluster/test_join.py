"""join() with real processes: uneven data, and failures in the meantime."""

from __future__ import annotations

import signal

import pytest

from support.jobs import Job, run

LANES = {"BYTEPS_SERVER_ENGINE_THREAD": "2", "BYTEPS_PARTITION_BYTES": "65536"}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"BPSX_FIXED_ORDER": "1"},
        {"BYTEPS_SERVER_ENABLE_SCHEDULE": "1"},
        {"BYTEPS_ENABLE_IPC": "1"},
    ],
    ids=["plain", "fixed", "scheduled", "shared memory"],
)
def test_uneven_steps_with_repeated_joins(env):
    """Each worker knows how many steps the others take, and so every expected sum.

    Joins follow each other at once: a stale mark of an earlier one would leave a worker out of a
    sum. Some names are first used after another worker has joined.
    """
    found = run(
        """
        import bpsx, ml_dtypes, numpy as np

        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        kinds = ["float32", "float16", "int64", np.dtype(ml_dtypes.bfloat16)]
        sizes = [1, 1001, 40_000]
        wrong, lasts = [], []
        for gathering in range(8):
            counts = np.random.default_rng(gathering).integers(0, 6, n)
            for step in range(counts[r]):
                here = [w for w in range(n) if counts[w] > step]
                handles = []
                for i, size in enumerate(sizes):
                    kind = kinds[(step + i) % 4]
                    name = f"{gathering % 3}.{size}.{kind}"
                    handles.append(
                        (
                            name,
                            bpsx.push_pull_async(np.full(size, r + 1, kind), name, average=False),
                            sum(w + 1 for w in here),
                        )
                    )
                    handles.append(
                        (
                            name,
                            bpsx.push_pull_async(np.full(size, 4 * n, kind), name, average=True),
                            4 * len(here),
                        )
                    )
                for name, handle, want in handles:
                    got = bpsx.synchronize(handle)
                    if not (got.astype(float) == want).all():
                        wrong.append([name, gathering, step, float(got[0]), want])
            lasts.append(bpsx.join())
        report([wrong[:5], lasts])
    """,
        workers=4,
        servers=2,
        env={**LANES, **env},
    )
    assert [w[0][0] for w in found] == [[]] * 4
    assert len({str(w[0][1]) for w in found}) == 1 and {0, 1, 2, 3} >= set(found[0][0][1])


def test_join_returns_the_last_rank_on_all_workers_after_exchanges_under_way():
    with Job(
        """
        import bpsx, numpy as np

        bpsx.init()
        if bpsx.rank() == 1:
            sys.stdin.readline()
        handles = [
            bpsx.push_pull_async(np.full(50_000, 1.0), f"x{i}", average=False) for i in range(20)
        ]
        report("pushed")
        last = bpsx.join()
        report(
            [
                last,
                all(bpsx.poll(h) for h in handles),
                {float(bpsx.synchronize(h)[-1]) for h in handles} == {3.0},
            ]
        )
    """,
        workers=3,
        env=LANES,
    ) as job:
        for rank in (0, 2):
            job.workers[rank].wait_for_line("pushed")
        job.workers[1].say("go")
        assert [w[1] for w in job.results()] in ([[r, True, True]] * 3 for r in range(3))


def test_the_remaining_workers_use_barriers_and_broadcasts_but_a_joined_root_is_an_error():
    found = run(
        """
        import bpsx, numpy as np

        bpsx.init()
        if bpsx.rank() != 2:
            for _ in range(3):
                bpsx.barrier()
            report(bpsx.broadcast(np.full(3, bpsx.rank() + 5), root_rank=1, name="b").tolist())
            # This waits for worker 2 until its join has reached the server; a sum of two shows that
            # it has.
            assert bpsx.push_pull(np.ones(1), "ping", average=False)[0] == 2
            try:
                bpsx.broadcast(np.zeros(3), root_rank=2, name="c")
            except bpsx.JoinedError as e:
                report(str(e))
        bpsx.join()
        report(bpsx.broadcast(np.full(3, bpsx.rank()), root_rank=2, name="c2").tolist())
    """,
        workers=3,
    )
    assert found[2] == [[2, 2, 2]]
    for worker in found[:2]:
        assert (
            worker[0] == [6, 6, 6]
            and "worker 2, has called join()" in worker[1]
            and worker[2] == [2, 2, 2]
        )


def test_a_joined_worker_cannot_push_until_all_have_joined():
    with Job("""
        import bpsx, numpy as np, threading
        bpsx.init()
        from bpsx.api.verbs import session
        if bpsx.rank() == 0:
            joiner = threading.Thread(target=bpsx.join)
            joiner.start()
            while session().state.name != "JOINED":
                joiner.join(0.01)
            try:
                bpsx.push_pull(np.ones(1), "x")
            except bpsx.JoinedError as e:
                report(str(e))
            joiner.join()
        else:
            bpsx.push_pull(np.ones(1), "x")     # complete only once worker 0 has joined
            sys.stdin.readline()
            bpsx.join()
        report(float(bpsx.push_pull(np.ones(1), "x")[0]))
    """) as job:
        job.workers[0].wait_for_line("has called join()")
        job.workers[1].say("join")
        found = job.results()
    assert "'x': this worker has called join()" in found[0][0]
    assert [w[-1] for w in found] == [1.0, 1.0]


def test_a_joined_worker_is_not_blamed_for_a_stall():
    with Job(
        """
        import bpsx, numpy as np

        bpsx.init()
        bpsx.barrier()
        if bpsx.rank() > 0:
            try:
                bpsx.push_pull(np.ones(1), "left" if bpsx.rank() == 1 else "right")
            except bpsx.StallError as e:
                report(str(e))
            # joining at once could complete the other worker's sum before it knows of the error
            bpsx.barrier()
        bpsx.join()
    """,
        workers=3,
        env={"BPSX_DEADLOCK_SECONDS": "6", "BPSX_STALL_WARN_SECONDS": "3"},
    ) as job:
        _, one, two = job.results()
        assert (
            one == two
            and "worker 1 waits for 'left'" in one[0]
            and "worker 2 waits for 'right'" in one[0]
            and "worker 0" not in one[0]
        )
        assert (
            "not pushed by worker 2" in job.workers[1].text()
            and "by worker 0" not in job.workers[1].text() + job.workers[2].text()
        )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_ends_a_join(victim):
    """Worker 0 has joined, worker 1 has not; one of them dies."""
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        if bpsx.rank() == 1:
            report("running")
            while True:
                bpsx.push_pull(np.ones(5), "x")
        report("joining")
        bpsx.join()
    """,
        workers=3,
    ) as job:
        job.workers[0].wait_for_line("joining"), job.workers[1].wait_for_line("running")
        job.workers[victim].signal(signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            assert job.workers[rank].wait() == 1
            assert (
                "PeerLostError" in job.workers[rank].text()
                and f"worker {victim} (" in job.workers[rank].text()
            )


def test_leaving_without_joining_ends_the_others_join():
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        if bpsx.rank() == 0:
            sys.stdin.readline()
        else:
            report("joining")
            try:
                bpsx.join()
            except bpsx.PeerLeftError as e:
                report(str(e))
    """,
        workers=3,
    ) as job:
        for rank in (1, 2):
            job.workers[rank].wait_for_line("joining")
        job.workers[0].say("go")
        assert all(
            "worker 0" in w[1] and "without calling join()" in w[1] for w in job.results()[1:]
        )


def test_ctrl_c_ends_a_join_and_the_job_gets_the_reason():
    with Job("""
        import bpsx, numpy as np
        bpsx.init()
        from bpsx.api.verbs import session
        if bpsx.rank() == 0:
            import threading, time
            def tell():
                while session().state.name != "JOINED":
                    time.sleep(0.01)
                report("joined")
            threading.Thread(target=tell, daemon=True).start()
            bpsx.join()
        bpsx.push_pull(np.ones(1), "x")     # complete without worker 0, which has joined
        report("alone")
        sys.stdin.readline()
        bpsx.push_pull(np.ones(1), "x")
    """) as job:
        job.workers[0].wait_for_line("joined"), job.workers[1].wait_for_line("alone")
        job.workers[0].signal(signal.SIGINT)
        assert job.workers[0].wait() != 0 and "KeyboardInterrupt" in job.workers[0].text()
        job.workers[1].say("go")
        assert job.workers[1].wait() == 1 and "KeyboardInterrupt" in job.workers[1].text()


def test_a_single_worker_and_an_asynchronous_job():
    assert run(
        """
        import bpsx
        bpsx.init()
        report(bpsx.join())
    """,
        workers=1,
        env={"BYTEPS_FORCE_DISTRIBUTED": "1"},
    ) == [[0]]
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        if bpsx.rank() == 2:
            report("here")
            sys.stdin.readline()
        bpsx.push_pull(np.ones(3), "w")
        report(bpsx.join() in (0, 1))
    """,
        workers=3,
        env={"BYTEPS_ENABLE_ASYNC": "1"},
    ) as job:
        job.workers[2].wait_for_line("here")
        # The survivors' join is complete without it.
        job.workers[2].signal(signal.SIGKILL)
        assert [w.wait() for w in job.workers[:2]] == [0, 0] and [
            w.reports() for w in job.workers[:2]
        ] == [[True], [True]]


@pytest.mark.parametrize("processes, servers", [(1, 1), (3, 0)])
def test_a_joined_worker_also_drops_a_declaration_that_the_others_have_dropped(processes, servers):
    """Otherwise the joined worker would later push with the old declaration, and the others with
    the new one.

    With ``processes``, the joined worker also sums for others on its machine.
    """
    found = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        one, rank = np.ones(100, np.float32), bpsx.rank()
        for name in "ab":
            bpsx.push_pull(one, name)
        if rank < 2:
            try:
                bpsx.push_pull(one, "ab"[rank])     # the other worker does not push this name
            except bpsx.StallError:
                report("stalled")
        bpsx.join()
        handles = [bpsx.push_pull_async(one, name, average=False) for name in "ab"]
        report([float(bpsx.synchronize(h)[-1]) for h in handles])
    """,
        3,
        servers,
        processes=processes,
        env={"BPSX_DEADLOCK_SECONDS": "2", "BPSX_STALL_WARN_SECONDS": "1"},
    )
    assert [w[-1] for w in found] == [[3.0, 3.0]] * 3
    assert sum(len(w) for w in found) > 3, "nobody was stuck"
