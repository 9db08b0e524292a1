"""Several worker processes on one machine sum in shared memory first; one of them communicates with
the servers.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.test_sums import DTYPES, SUMS, sizes
from support.jobs import Job, run


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.sampled_from([(1, 2, 0), (1, 3, 0), (1, 2, 1), (2, 2, 1), (2, 3, 2), (3, 2, 1)]),
    partition_bytes=st.sampled_from([4096, 20_000, 4_096_000]),
    lanes=st.integers(1, 2),
    fixed_order=st.booleans(),
    credit=st.sampled_from([0, 1, 4]),
    cases=st.lists(
        st.tuples(st.sampled_from(DTYPES), sizes, st.booleans()), min_size=20, max_size=40
    ),
)
def test_sums_match_float64_and_are_the_same_bits_everywhere(
    shape, partition_bytes, lanes, fixed_order, credit, cases
):
    machines, processes, servers = shape
    if servers:
        cases = [
            (dtype, n, average and dtype not in ("uint8", "int8")) for dtype, n, average in cases
        ]
    found = run(
        SUMS,
        machines * processes,
        servers,
        processes=processes,
        env={
            "CASES": json.dumps(cases),
            "BYTEPS_PARTITION_BYTES": str(partition_bytes),
            "BYTEPS_SERVER_ENGINE_THREAD": str(lanes),
            "BPSX_FIXED_ORDER": str(int(fixed_order)),
            "BYTEPS_SCHEDULING_CREDIT": str(credit),
            "BYTEPS_FORCE_DISTRIBUTED": str(int(servers > 0)),
        },
    )
    assert all(f == found[0] and len(f) == len(cases) for f in found)


SHAPES = pytest.mark.parametrize("workers, servers", [(2, 0), (4, 1)])


@SHAPES
def test_only_the_root_speaks_to_the_servers(workers, servers):
    found = run(
        """
        import bpsx, numpy as np
        from bpsx.api.verbs import session
        bpsx.init()
        x = bpsx.push_pull(np.full(5_000_000, bpsx.rank(), np.float32), "x", average=False)
        assert (x == sum(range(bpsx.size()))).all()
        counters = session().counters()
        report([counters["bytes_sent"], counters["bytes_received"]])
    """,
        workers,
        servers,
        processes=2,
    )
    sent = [f[0][0] for f in found]
    assert all(
        (s >= 20_000_000) == bool(servers and i % 2) and (s == 0 or i % 2)
        for i, s in enumerate(sent)
    ), sent


@SHAPES
def test_broadcasts_barriers_and_empty_tensors(workers, servers):
    run(
        """
        import bpsx, numpy as np
        bpsx.init()
        for n in (0, 1, 1000, 300_000):
            for root in range(bpsx.size()):
                given = np.full(n, bpsx.rank() + 0.5)
                got = bpsx.broadcast(given, root, name=f"b{n}")
                assert (got == root + 0.5).all() and (given == bpsx.rank() + 0.5).all()
                here = np.full(n, bpsx.rank(), np.int64)
                bpsx.broadcast(here, root, name=f"in place {n}", output=here)
                assert (here == root).all()
            bpsx.barrier()
            assert bpsx.push_pull(np.zeros(0, np.float32), "empty").shape == (0,)
    """,
        workers,
        servers,
        processes=2,
    )


@SHAPES
def test_thousands_under_way_in_another_order_on_each(workers, servers):
    """More exchanges are under way than the ring between two processes holds."""
    run(
        """
        import bpsx, numpy as np

        bpsx.init()
        n, size = 6000, bpsx.size()
        order = np.random.default_rng(bpsx.rank()).permutation(n)
        for round in range(2):
            handles = {
                int(i): bpsx.push_pull_async(
                    np.full(3, i + bpsx.rank() + round, np.float32),
                    f"t{i}",
                    average=False,
                    priority=int(i % 7),
                )
                for i in order
            }
            for i, handle in handles.items():
                assert (bpsx.synchronize(handle) == size * (i + round) + sum(range(size))).all()
    """,
        workers,
        servers,
        processes=2,
        env={"BPSX_DEADLOCK_SECONDS": "60"},
    )


def test_an_average_of_halves_does_not_overflow_on_its_way():
    run(
        """
        import bpsx, numpy as np
        bpsx.init()
        assert (bpsx.push_pull(np.full(1000, 60000, np.float16), "x") == 60000).all()
        assert (bpsx.push_pull(np.full(100_000, 60000, np.float16), "y") == 60000).all()
    """,
        4,
        1,
        processes=2,
    )


def test_an_average_of_bytes_is_refused_where_it_would_be_wrong():
    run(
        """
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.push_pull(np.full(1000, 200, np.uint8), "x")
            assert False
        except bpsx.ConfigError as e:
            assert "uint8" in str(e) and "BPSX_LOCAL_REDUCE=0" in str(e), e
        assert (bpsx.push_pull(np.full(1000, 50, np.uint8), "y", average=False) == 200).all()
    """,
        4,
        1,
        processes=2,
    )
    run(
        """
        import bpsx, numpy as np
        bpsx.init()
        assert (bpsx.push_pull(np.full(1000, 200, np.uint8), "x") == 200).all()
    """,
        4,
        1,
        processes=2,
        env={"BPSX_LOCAL_REDUCE": "0"},
    )


@SHAPES
@pytest.mark.parametrize("odd", [0, 1])
def test_another_operation_on_one_process_is_an_error_on_all(workers, servers, odd):
    found = run(
        f"""
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.push_pull(np.ones(300_000, np.float32), "x", average=bpsx.rank() == {odd})
            report("no error")
        except bpsx.MismatchError as e:
            report(str(e))
        found = bpsx.push_pull(np.ones(300_000, np.float32), "y", average=False)
        assert (found == bpsx.size()).all()
        found = bpsx.push_pull(np.ones(300_000, np.float32), "x", average=False)
        assert (found == bpsx.size()).all()
    """,
        workers,
        servers,
        processes=2,
    )
    assert all("'x'" in f[0] and "workers 1 and 0" in f[0] for f in found), found


def test_another_operation_on_one_machine_is_an_error_on_all():
    found = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.push_pull(np.ones(300_000, np.float32), "x", average=bpsx.rank() >= 2)
            report("no error")
        except bpsx.MismatchError as e:
            report(str(e))
        assert (bpsx.push_pull(np.ones(10, np.float32), "y", average=False) == 4).all()
    """,
        4,
        1,
        processes=2,
    )
    assert all(
        "'x'" in f[0] and ("workers 1 and 3" in f[0] or "workers 3 and 1" in f[0]) for f in found
    ), found


@SHAPES
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_process_that_leaves_in_good_order_is_named_to_waiting_ones(workers, servers, leaver):
    source = f"""
        import bpsx, numpy as np, sys
        bpsx.init()
        bpsx.push_pull(np.ones(10, np.float32), "a")
        if bpsx.rank() == {leaver}:
            bpsx.shutdown()
        else:
            for attempt in range(2):        # one exchange under way, and one begun afterwards
                try:
                    bpsx.push_pull(np.ones(300_000, np.float32), "a" if attempt else "b")
                    report("no error")
                except bpsx.PeerLeftError as e:
                    report(str(e))
            report("done")
            sys.stdin.readline()        # otherwise the next leaver would be named, too
    """
    with Job(source, workers, servers, processes=2) as job:
        others = [w for i, w in enumerate(job.workers) if i != leaver]
        for worker in others:
            worker.wait_for_line("done")
        for worker in others:
            worker.say("")
        found = job.results()
    assert all(
        len(f) == 3 and all(f"worker {leaver} has left the job" in text for text in f[:2])
        for i, f in enumerate(found)
        if i != leaver
    ), found


@pytest.mark.parametrize("workers, servers", [(3, 0), (6, 1)])
def test_a_round_begun_after_a_neighbour_has_left_fails_though_the_root_is_idle(workers, servers):
    source = """
        import bpsx, numpy as np, sys
        bpsx.init()
        bpsx.push_pull(np.ones(10, np.float32), "a")
        report("ready")
        if bpsx.rank() == 0:
            sys.exit(0)
        sys.stdin.readline()
        if bpsx.rank() == 1:
            try:
                bpsx.push_pull(np.ones(10, np.float32), "a")
                report("no error")
            except bpsx.PeerLeftError as e:
                report(str(e))
    """
    with Job(source, workers, servers, processes=3) as job:
        assert job.workers[0].wait() == 0
        job.workers[1].say("")
        assert "worker 0 has left the job" in job.workers[1].wait_for_line("tensor 'a'")
        for worker in job.workers[2:]:
            worker.say("")
        job.results()


def test_rounds_do_not_overtake_each_other():
    """Results are in one process's share of the memory.

    That process may have begun the next round while others still copy.
    """
    run(
        """
        import bpsx, numpy as np
        bpsx.init()
        x, out = np.empty(1_000_000, np.float32), np.empty(1_000_000, np.float32)
        for round in range(200):
            x.fill(round)
            bpsx.push_pull(x, "x", average=False, output=out)
            assert (out == 4 * round).all(), round
    """,
        4,
        0,
        processes=4,
    )


@SHAPES
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_a_death_on_the_machine_is_an_error_on_all(workers, servers, victim, way, tmp_path):
    source = """
        import bpsx, numpy as np, sys
        bpsx.init()
        bpsx.push_pull(np.ones(10, np.float32), "a")
        report("ready")
        if bpsx.rank() == VICTIM:
            sys.stdin.readline()
        try:
            while True:
                bpsx.push_pull(np.ones(3_000_000, np.float32), "b")
        except bpsx.PeerLostError as e:
            report(str(e))
            sys.exit(5)
    """.replace("VICTIM", str(victim))
    with Job(
        source, workers, servers, processes=2, env={"BYTEPS_SOCKET_PATH": str(tmp_path)}
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("ready")
        job.workers[victim].signal(way)
        for i, worker in enumerate(job.workers):
            if i != victim:
                assert worker.wait() == 5, worker.text()
                assert f"worker {victim} " in worker.reports()[1], worker.text()
        assert job.scheduler is not None and job.scheduler.wait() == 1
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == []
    assert not [name for name in os.listdir("/dev/shm") if "bpsx" in name]


def test_processes_that_cannot_connect_to_each_other_are_named(tmp_path):
    elsewhere, occupied = tmp_path / "elsewhere", tmp_path / "file"
    elsewhere.mkdir()
    occupied.touch()
    for path, said in (
        (elsewhere, r"local rank 1 does not listen at|local rank 0 did not connect"),
        (occupied / "below", "BYTEPS_SOCKET_PATH: cannot create"),
    ):
        with Job(
            "import bpsx; bpsx.init()",
            2,
            0,
            processes=2,
            env={"BPSX_RENDEZVOUS_TIMEOUT": "3"},
            worker_env={0: {"BYTEPS_SOCKET_PATH": str(path)}},
        ) as job:
            assert [w.wait() for w in job.workers] == [1, 1]
            text = job.workers[0].text() + job.workers[1].text()
            assert re.search(said, text), text


def test_a_root_killed_at_the_meeting_leaves_no_socket(tmp_path):
    source = """
        import bpsx, bpsx.session.session, sys
        meet = bpsx.local.neighbourhood.meet
        def meet_later(*given):
            report("here")
            sys.stdin.readline()
            return meet(*given)
        bpsx.local.neighbourhood.meet = meet_later
        bpsx.init()
    """
    with Job(
        source, 0, 0, processes=2, env={"BYTEPS_SOCKET_PATH": str(tmp_path), "DMLC_NUM_WORKER": "1"}
    ) as job:
        job.start_worker(0)
        job.start_worker(1, "import bpsx; bpsx.init()")
        member, root = job.workers
        member.wait_for_line("here")
        end = time.monotonic() + 60
        while not list(tmp_path.rglob("*.sock")):
            assert time.monotonic() < end
            time.sleep(0.01)
        root.signal(signal.SIGKILL)
        root.wait()
        member.say("")
        assert member.wait() == 1 and "worker 1 " in member.text()
    assert not list(tmp_path.rglob("*.sock"))


def test_limits_that_leave_no_room_for_shares_are_named():
    for limit, said in (("RLIMIT_FSIZE", "ulimit -f"), ("RLIMIT_AS", "ulimit -v")):
        source = f"""
            import bpsx, bpsx.session.session, resource
            meet = bpsx.local.neighbourhood.meet
            def meet_with_less(*given):
                most = 1 << 32 if "{limit}" == "RLIMIT_AS" else 1 << 20
                resource.setrlimit(resource.{limit}, (most, most))
                return meet(*given)
            bpsx.local.neighbourhood.meet = meet_with_less
            bpsx.init()
        """
        with Job(source, 2, 0, processes=2) as job:
            assert [w.wait() for w in job.workers] == [1, 1]
            text = job.workers[0].text() + job.workers[1].text()
            assert said in text and "BPSX_LOCAL_REDUCE=0" in text, text


class _Cramped(Job):
    """Limit the descriptors that may be open in a process, and so also those in transit between
    processes.

    Not even root may exceed the limit.
    """

    def command(self, name: str, words: list[str]) -> list[str]:
        powerless = [
            "setpriv",
            "--bounding-set",
            "-sys_resource,-sys_admin",
            "--inh-caps",
            "-sys_resource,-sys_admin",
        ]
        return [*(powerless if os.geteuid() == 0 else []), "prlimit", "--nofile=90:90", *words]


def test_many_processes_meet_with_few_descriptors():
    """16 processes pass 480 descriptors to each other.

    Linux limits a user's descriptors in transit to the number that one process may have open.
    """
    if (
        os.geteuid() == 0
        and subprocess.run(
            ["setpriv", "--bounding-set", "-sys_resource", "true"], capture_output=True
        ).returncode
    ):
        pytest.skip("root without the right to give up rights (setpriv)")
    with _Cramped(
        """
        import bpsx, numpy as np
        bpsx.init()
        report(float(bpsx.push_pull(np.ones(3), average=False, name="x")[0]))
        bpsx.shutdown()
    """,
        16,
        0,
        processes=16,
    ) as job:
        assert job.results() == [[16.0]] * 16


def test_the_number_of_processes_must_agree():
    with Job(
        "import bpsx; bpsx.init()",
        2,
        0,
        processes=2,
        env={"BPSX_RENDEZVOUS_TIMEOUT": "3"},
        worker_env={0: {"BYTEPS_LOCAL_SIZE": "3"}},
    ) as job:
        assert [w.wait() for w in job.workers] == [1, 1]
        assert "BYTEPS_LOCAL_SIZE" in job.workers[0].text() + job.workers[1].text()


_UNEVEN = """
    import bpsx, json, numpy as np, os

    bpsx.init()
    rank, size = bpsx.rank(), bpsx.size()
    for counts in json.loads(os.environ["COUNTS"]):
        for step in range(counts[rank]):
            here = [r for r in range(size) if counts[r] > step]
            for dtype in ("float32", "float16", "int64"):
                for n in (3, 50_000):
                    # A separate name per step: a joined worker has never seen the later ones.
                    for name in (f"{dtype}.{n}", f"{dtype}.{n}.{step}"):
                        got = bpsx.push_pull(np.full(n, 4 * rank + 4, dtype), name, average=False)
                        assert (got == sum(4 * r + 4 for r in here)).all(), (
                            counts,
                            step,
                            name,
                            got[:3],
                            here,
                        )
                        got = bpsx.push_pull(np.full(n, 4 * rank + 4, dtype), name + ".average")
                        want = sum(4 * r + 4 for r in here) / size
                        np.testing.assert_allclose(
                            got.astype(float),
                            np.floor(want) if dtype == "int64" else want,
                            rtol=1e-3,
                        )
            bpsx.barrier()
            root = here[step % len(here)]
            assert (bpsx.broadcast(np.full(50_000, rank), root, "b") == root).all()
        last = bpsx.join()
        assert counts[last] == max(counts), (last, counts)
        report(last)
        assert (bpsx.push_pull(np.ones(1000, np.float32), "after", average=False) == size).all()
"""


@pytest.mark.parametrize(
    "workers, processes, servers", [(2, 2, 0), (3, 3, 0), (4, 2, 1), (6, 3, 2)]
)
def test_uneven_numbers_of_steps_with_join(workers, processes, servers):
    rng = random.Random(workers)
    rounds = [rng.sample(range(workers + 2), workers) for _ in range(2)]
    # A root that joins first, and one that continues alone.
    rounds += [[5] * (workers - 1) + [0], [0] * (workers - 1) + [3]]
    found = run(
        _UNEVEN,
        workers,
        servers,
        processes=processes,
        env={"COUNTS": json.dumps(rounds), "BPSX_DEADLOCK_SECONDS": "20"},
    )
    assert all(f == found[0] for f in found)


@pytest.mark.parametrize("absent", [0, 1, 3])
def test_a_broadcast_from_a_joined_worker_is_an_error_on_all(absent):
    found = run(
        f"""
        import bpsx, numpy as np
        bpsx.init()
        bpsx.barrier()
        if bpsx.rank() != {absent}:
            try:
                bpsx.broadcast(np.zeros(50_000), {absent}, "x")
                report("no error")
            except bpsx.JoinedError as e:
                report(str(e))
        bpsx.join()
        assert (bpsx.push_pull(np.ones(1000, np.float32), "after", average=False) == 4).all()
    """,
        4,
        1,
        processes=2,
    )
    assert all(
        f"worker {absent}, has called join()" in f[0] for i, f in enumerate(found) if i != absent
    ), found
