"""Edge cases of whole jobs: leaving with work under way, reused names, the GIL, interpreter exit,
and peers that come and go early.
"""

from __future__ import annotations

import json
import signal
import socket

import pytest

from bpsx.config import Config
from bpsx.scheduler.messages import PROTOCOL
from bpsx.scheduler.sockets import open_socket
from support.jobs import Job, run


def test_after_a_stall_error_abandoned_pushes_are_not_summed():
    """Each worker abandons one push; the next round of either name must not contain it."""
    found = run(
        """
        import bpsx, numpy as np

        bpsx.init()
        mine = "left" if bpsx.rank() == 0 else "right"
        try:
            bpsx.push_pull(np.float32([100]), name=mine, average=False)
        except bpsx.StallError:
            report("stalled")
        values = {}
        for name in ("left", "right"):
            for attempt in range(2):
                try:
                    values[name] = float(
                        bpsx.push_pull(np.float32([bpsx.rank() + 1]), name=name, average=False)[0]
                    )
                    break
                except bpsx.StallError:  # a name dropped before this worker had declared it
                    pass
        report(values)
    """,
        env={"BPSX_DEADLOCK_SECONDS": "2", "BPSX_STALL_WARN_SECONDS": "1"},
    )
    assert found == [["stalled", {"left": 3.0, "right": 3.0}]] * 2


def test_three_workers_continue_together_after_a_mismatch():
    found = run(
        """
        import bpsx, numpy as np

        bpsx.init()
        got = []
        for step in range(6):
            try:
                got.append(
                    float(
                        bpsx.push_pull(
                            np.float32([1]), name="x", average=step % 3 == 0 and bpsx.rank() == 1
                        )[0]
                    )
                )
            except bpsx.MismatchError:
                got.append("mismatch")
        report(got)
    """,
        workers=3,
    )
    assert found == [[["mismatch", 3.0, 3.0, "mismatch", 3.0, 3.0]]] * 3


def test_a_worker_that_ends_with_work_under_way_fails_the_job():
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        if bpsx.rank() == 0:
            bpsx.push_pull_async(np.ones(5), name="nobody else pushes this")
        else:
            bpsx.push_pull(np.ones(5), name="nor this")
    """,
        env={"BPSX_SHUTDOWN_TIMEOUT": "1"},
    ) as job:
        assert job.workers[0].wait() == 1
        assert (
            "1 push_pulls under way" in job.workers[0].text()
            and "exit status 1" in job.workers[0].text()
        )
        assert job.workers[1].wait() == 1 and "PeerLostError" in job.workers[1].text()


def test_a_death_while_leaving_is_not_status_0():
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        bpsx.barrier()
        report("running")
        if bpsx.rank() == 1:
            sys.stdin.read()
        bpsx.push_pull_async(np.ones(5), name="x")
        report("leaving")
    """,
        env={"BPSX_SHUTDOWN_TIMEOUT": "30"},
    ) as job:
        job.workers[0].wait_for_line("leaving")
        job.workers[1].wait_for_line("running")
        job.workers[1].signal(signal.SIGKILL)
        assert job.workers[0].wait() == 1 and "worker 1" in job.workers[0].text()


def test_a_death_during_an_explicit_shutdown_is_not_status_0():
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        bpsx.barrier()
        report("running")
        if bpsx.rank() == 1:
            sys.stdin.read()
        bpsx.push_pull_async(np.ones(5), name="x")
        report("leaving")
        bpsx.shutdown()
        report("after")
    """,
        env={"BPSX_SHUTDOWN_TIMEOUT": "30"},
    ) as job:
        job.workers[0].wait_for_line("leaving")
        job.workers[1].wait_for_line("running")
        job.workers[1].signal(signal.SIGKILL)
        assert (
            job.workers[0].wait() == 1
            and "exit status 1, because the job has failed: worker 1" in job.workers[0].text()
        )
        assert job.workers[0].reports()[-1] == "after"


def _killed_beside(job: Job) -> int:
    """Kill worker 1 while worker 0 waits for a line, then let worker 0 end; return its status."""
    for worker in job.workers:
        worker.wait_for_line("running")
    job.workers[1].signal(signal.SIGKILL)
    job.workers[0].wait_for_line("worker 1")
    job.workers[0].say("go")
    return job.workers[0].wait()


def test_exit_functions_run_once_and_the_status_is_nonzero():
    with Job("""
        import atexit
        atexit.register(lambda: report("before"))
        import bpsx
        bpsx.init()
        atexit.register(lambda: report("after"))
        report("running")
        sys.stdin.readline()
    """) as job:
        assert _killed_beside(job) == 1
        assert job.workers[0].reports() == ["running", "after", "before"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_session_that_lives_to_the_interpreters_end_ends_without_output(processes: int):
    """The session may be destroyed last, when modules have lost their names.

    Here a reference cycle holds it, on a module that C code keeps alive.
    """
    with Job(
        """
        import bpsx, numpy as np
        from bpsx import _core
        from bpsx.api.verbs import session
        bpsx.init()
        bpsx.push_pull(np.ones(5), name="x")
        _core.last = last = [session()]
        last.append(last)
    """,
        workers=2,
        servers=2 - processes,
        processes=processes,
    ) as job:
        job.results()
        assert all(w.text().endswith("stderr") for w in job.workers), [
            w.text() for w in job.workers
        ]


def test_a_caught_error_of_one_tensor_does_not_hide_a_later_death():
    with Job("""
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.push_pull(np.ones(4 + bpsx.rank()), name="x")
        except bpsx.MismatchError:
            report("running")
        sys.stdin.readline()
    """) as job:
        assert _killed_beside(job) == 1


def test_ctrl_c_during_shutdown_still_leaves():
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        bpsx.barrier()
        if bpsx.rank() == 0:
            import threading, time
            from bpsx.api import verbs
            bpsx.push_pull_async(np.ones(5), name="x")
            ours = verbs.session()
            def tell():
                while ours.state.name == "RUNNING":
                    time.sleep(0.001)
                time.sleep(0.1)         # now the main thread waits in shutdown for the push_pull
                report("running")
            teller = threading.Thread(target=tell)
            teller.start()
            try:
                bpsx.shutdown()
            except KeyboardInterrupt:
                teller.join()
                report([t.name for t in threading.enumerate()])
            os._exit(0)
        sys.stdin.read()
    """,
        env={"BPSX_SHUTDOWN_TIMEOUT": "60"},
    ) as job:
        job.workers[0].wait_for_line("running")
        job.workers[0].signal(signal.SIGINT)
        assert job.workers[0].wait() == 0
        assert job.workers[0].reports() == ["running", ["MainThread"]]


def test_a_waiting_thread_without_the_gil_does_not_stop_the_exchange():
    """Worker 0's waiting thread drives the core; then its main thread holds the GIL for good.

    Worker 1 must get its sums.
    """
    with Job("""
        import bpsx, ctypes, numpy as np, pathlib, threading, time

        bpsx.init()
        a = np.ones(10, np.float32)
        bpsx.push_pull(a, name="x")
        bpsx.push_pull(a, name="y")
        bpsx.barrier()
        if bpsx.rank() == 0:
            waiter = threading.Thread(target=lambda: bpsx.push_pull(a, name="x"))
            waiter.start()
            where = pathlib.Path(f"/proc/self/task/{waiter.native_id}/wchan")
            while "poll" not in where.read_text():  # it drives the core; no messages arrive
                time.sleep(0.001)
            y = bpsx.push_pull_async(a, name="y")
            report("holding")
            # PyDLL keeps the GIL
            ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
            waiter.join()
            bpsx.synchronize(y)
        else:
            sys.stdin.readline()
            bpsx.push_pull(a, name="x")
            bpsx.push_pull(a, name="y")
        report("home")
    """) as job:
        job.workers[0].wait_for_line("holding")
        job.workers[1].say("go")
        job.workers[1].wait_for_line("home")
        job.workers[0].say("go")
        job.results()


@pytest.mark.parametrize("name", ["", "x" * 4097, "é" * 2049])
def test_an_invalid_name_is_refused_at_once(name):
    assert run(f"""
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.push_pull(np.ones(3), name={name!r} or chr(0xD800))
        except bpsx.ConfigError as e:
            report("1 to 4096 bytes" in str(e))
    """) == [[True], [True]]


def test_returning_to_an_earlier_shape_declares_nothing():
    assert run("""
        import bpsx, numpy as np
        from bpsx.api.verbs import session

        bpsx.init()
        for step in range(200):
            for n in (4, 7):
                assert (
                    bpsx.push_pull(np.full(n, step, np.float32), name="x", average=False)
                    == 2 * step
                ).all()
        report(len(session()._declared))
    """) == [[2], [2]]


def test_a_handle_of_the_parent_cannot_be_waited_for_in_a_forked_child():
    assert (
        run("""
        import bpsx, numpy as np
        bpsx.init()
        h = bpsx.push_pull_async(np.ones(3), name="x", average=False)
        pid = os.fork()
        if pid == 0:
            try:
                while True:
                    h.wait(1)
            except bpsx.NotInitializedError:
                os._exit(9)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report([status, float(bpsx.synchronize(h)[0])])
    """)
        == [[[9, 2.0]]] * 2
    )


def _hello(port: int, **changes: object) -> None:
    """Introduce a node to the scheduler and disconnect."""
    import zmq

    context = zmq.Context()
    s = open_socket(context, zmq.DEALER, Config({}))
    s.connect(f"tcp://127.0.0.1:{port}")
    config = {
        "DMLC_NUM_WORKER": 2,
        "DMLC_NUM_SERVER": 1,
        "BYTEPS_LOCAL_SIZE": 1,
        "BYTEPS_PARTITION_BYTES": 4096000,
        "BYTEPS_KEY_HASH_FN": "balanced",
        "BYTEPS_BUILT_IN_HASH_COEF": 1,
        "BYTEPS_ENABLE_MIXED_MODE": 0,
        "BPSX_SERVER_WEIGHT": 1,
        "BPSX_ENCRYPT": 0,
        "DMLC_ENABLE_RDMA": "zeromq",
        **changes.pop("config", {}),
    }
    s.send_json(
        {
            "type": "HELLO",
            "protocol": PROTOCOL,
            "role": "worker",
            "rank": 0,
            "host": "127.0.0.1",
            "pid": 1,
            "lanes": [],
            "config": config,
            **changes,
        }
    )
    s.close(2000)
    context.term()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"role": "server", "lanes": ["127.0.0.1:1"]},
        {"role": "server"},
        {"config": {"BYTEPS_LOCAL_SIZE": "x"}},
        {"config": {"BYTEPS_PARTITION_BYTES": None}},
    ],
)
def test_a_node_that_dies_at_once_is_not_counted(changes):
    job = Job(
        "import bpsx, numpy as np\nbpsx.init()\nreport(float(bpsx.push_pull(np.ones(1),"
        " average=False)[0]))",
        env={"BPSX_GATHER_GRACE": "60"},
    )
    try:
        job.start_scheduler()
        for _ in range(5):
            _hello(int(job.port), **json.loads(json.dumps(changes)))
        job.start_server(0)
        job.start_worker(0)
        job.start_worker(1)
        assert job.results() == [[2.0], [2.0]]
    finally:
        job.__exit__()


def test_a_connection_that_breaks_before_the_scheduler_starts_is_retried():
    """Another program, such as a proxy, first accepts and closes connections at the scheduler's
    address.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    job = Job(
        "import bpsx, numpy as np\nbpsx.init()\nreport(float(bpsx.push_pull(np.ones(1),"
        " average=False)[0]))",
        env={"DMLC_PS_ROOT_PORT": str(port)},
    )
    try:
        job.start_worker(0)
        job.start_worker(1)
        job.start_server(0)
        for _ in range(6):
            listener.accept()[0].close()
        listener.close()
        job.start_scheduler(port)
        assert job.results() == [[2.0], [2.0]]
    finally:
        job.__exit__()
