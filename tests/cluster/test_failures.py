"""Whole jobs that fail: every process concerned raises an exception that names the cause, and ends
with the right status.
"""

from __future__ import annotations

import re
import signal
import socket

import pytest

from bpsx.config import Config
from bpsx.scheduler.sockets import open_socket
from support.jobs import TRANSPORTS, Job

# Push until something happens, then report it.
_STEPPING = """
    import bpsx, numpy as np
    bpsx.init()
    a = np.ones(200_000, np.float32)
    report("running")
    try:
        while True:
            bpsx.push_pull(a, name="x")
    except bpsx.BpsxError as e:
        report([type(e).__name__, str(e)])
        sys.exit(7)
"""


each_transport = pytest.mark.parametrize("transport", sorted(TRANSPORTS))


def started(job: Job) -> None:
    for worker in job.workers:
        worker.wait_for_line("running")


def caught(process) -> tuple[str, str]:
    (found,) = [r for r in process.reports() if isinstance(r, list)]
    return tuple(found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("who", ["worker", "server", "scheduler"])
@each_transport
def test_a_death_is_named_everywhere(transport, who, number):
    env = {**TRANSPORTS[transport], "BPSX_TERM_GRACE": "0.5", "BPSX_ELASTIC": "off"}
    with Job(_STEPPING, workers=3, servers=2, env=env) as job:
        started(job)
        victim = {"worker": job.workers[1], "server": job.servers[0], "scheduler": job.scheduler}[
            who
        ]
        pid = victim.popen.pid
        victim.signal(number)
        for worker in job.workers:
            if worker is victim:
                continue
            assert worker.wait() == 7
            kind, text = caught(worker)
            assert kind == "PeerLostError" and who in text, text
            assert who == "scheduler" or f"pid {pid}" in text, text
        for p in [*job.servers, job.scheduler]:
            assert p.wait() != 0, p.text()


_COMPRESSING = _STEPPING.replace(
    "    bpsx.init()\n",
    """    bpsx.init()
    bpsx.declare("x", compression={"compressor": "topk", "k": 0.2, "ef": "vanilla"})
""",
).replace("200_000", "20_000_000")


@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_death_while_gradients_are_compressed_is_named_everywhere(who):
    """20 partitions of 4 MB keep the compression pool busy all the time."""
    with Job(_COMPRESSING, workers=2, servers=2, env={"BPSX_ELASTIC": "off"}) as job:
        started(job)
        job.workers[0].wait_for_line("running")
        victim = job.workers[1] if who == "worker" else job.servers[1]
        pid = victim.popen.pid
        victim.signal(signal.SIGKILL)
        for worker in job.workers:
            if worker is not victim:
                assert worker.wait() == 7
                kind, text = caught(worker)
                assert kind == "PeerLostError" and who in text and f"pid {pid}" in text, text
        for p in [*job.servers, job.scheduler]:
            assert p.wait() != 0, p.text()


@each_transport
def test_a_server_that_stops_replying_is_detected_by_its_silence(transport):
    with Job(
        _STEPPING,
        env={
            **TRANSPORTS[transport],
            "PS_HEARTBEAT_INTERVAL": "0.3",
            "PS_HEARTBEAT_TIMEOUT": "1.5",
        },
    ) as job:
        started(job)
        job.servers[0].signal(signal.SIGSTOP)
        for worker in job.workers:
            assert worker.wait() == 7
            assert caught(worker)[0] == "PeerLostError" and "server 0" in caught(worker)[1]
        assert job.scheduler.wait() == 1


def test_a_short_stop_is_survived():
    with Job("""
        import bpsx, numpy as np
        bpsx.init()
        a = np.ones(200_000, np.float32)
        report("running")
        for i in range(400):
            bpsx.push_pull(a, name="x")
        report("done")
    """) as job:
        started(job)
        job.servers[0].signal(signal.SIGSTOP)
        job.workers[0].wait_for_line("running")
        job.servers[0].signal(signal.SIGCONT)
        assert [r[-1] for r in job.results()] == ["done", "done"]


def test_an_exception_in_one_worker_reaches_the_others():
    with Job("""
        import bpsx, numpy as np
        bpsx.init()
        bpsx.push_pull(np.ones(5), name="x")
        if bpsx.rank() == 1:
            raise RuntimeError("the data is gone")
        bpsx.push_pull(np.ones(5), name="y")
    """) as job:
        assert job.workers[0].wait() == 1
        assert (
            "PeerLostError" in job.workers[0].text()
            and "RuntimeError: the data is gone" in job.workers[0].text()
        )
        assert job.workers[1].wait() == 1
        assert job.servers[0].wait() == 1 and job.scheduler.wait() == 1


@pytest.mark.parametrize("name", ["'known'", "'new'"])
def test_a_worker_that_leaves_early_in_good_order_is_named(name):
    with Job(f"""
        import bpsx, numpy as np
        bpsx.init()
        bpsx.push_pull(np.ones(5), name='known')
        if bpsx.rank() == 1:
            sys.exit(3)
        try:
            bpsx.push_pull(np.ones(5), name={name})
        except bpsx.PeerLeftError as e:
            report(str(e))
    """) as job:
        assert job.workers[0].wait() == 0
        assert "worker 1 has left the job" in job.workers[0].reports()[0]
        assert job.workers[1].wait() == 3
        assert job.servers[0].wait() == 0 and job.scheduler.wait() == 0


def test_a_failed_job_is_never_status_0():
    """The script ends before an exception could reach it; its exit status must still be nonzero."""
    with Job("""
        import bpsx, numpy as np
        bpsx.init()
        report("running")
        sys.stdin.readline()
    """) as job:
        started(job)
        job.workers[1].signal(signal.SIGKILL)
        job.workers[0].wait_for_line("worker 1")
        job.workers[0].say("go")
        assert job.workers[0].wait() == 1
        assert "exit status 1" in job.workers[0].text()


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            "np.ones(4, np.float32)",
            "np.ones(5, np.float32)",
            ["float32 of shape (4,)", "float32 of shape (5,)"],
        ),
        ("np.ones((2, 3), np.float32)", "np.ones((3, 2), np.float32)", ["(2, 3)", "(3, 2)"]),
        ("np.ones(4, np.float32)", "np.ones(4, np.int32)", ["float32", "int32"]),
    ],
)
def test_a_mismatch_names_both_workers_and_the_job_continues(first, second, text):
    with Job(f"""
        import bpsx, numpy as np
        bpsx.init()
        a = {first} if bpsx.rank() == 0 else {second}
        try:
            bpsx.push_pull(a, name="odd")
        except bpsx.MismatchError as e:
            report(str(e))
        assert (bpsx.push_pull(np.ones(3), name="even", average=False) == 2).all()
        # the name still works, too
        assert (bpsx.push_pull(np.ones(3), name="odd", average=False) == 2).all()
    """) as job:
        for (message,) in job.results():
            assert all(t in message for t in ["'odd'", "worker 0", "worker 1", *text]), message


@pytest.mark.parametrize("size", [4, 100_000])
def test_different_operations_name_both(size):
    with Job(f"""
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.push_pull(np.ones({size}, np.float32), name="op", average=bpsx.rank() == 0)
        except bpsx.MismatchError as e:
            report(str(e))
        assert (bpsx.push_pull(np.ones({size}, np.float32), name="op", average=False) == 2).all()
    """) as job:
        for (message,) in job.results():
            assert "'op'" in message and "workers" in message


def test_different_names_end_as_an_error_that_names_both():
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        bpsx.push_pull(np.ones(5), name="same")
        try:
            bpsx.push_pull(np.ones(5), name="left" if bpsx.rank() == 0 else "right")
        except bpsx.StallError as e:
            report(str(e))
        bpsx.push_pull(np.ones(5), name="same")
    """,
        env={"BPSX_DEADLOCK_SECONDS": "2", "BPSX_STALL_WARN_SECONDS": "1"},
    ) as job:
        for (message,) in job.results():
            assert (
                "worker 0 waits for 'left'" in message and "worker 1 waits for 'right'" in message
            )


def test_a_slow_worker_is_reported_not_ended():
    with Job(
        """
        import bpsx, numpy as np
        bpsx.init()
        bpsx.push_pull(np.ones(5), name="x")
        if bpsx.rank() == 1:
            sys.stdin.readline()
        bpsx.push_pull(np.ones(5), name="x")
        report("done")
    """,
        env={"BPSX_STALL_WARN_SECONDS": "1", "BPSX_DEADLOCK_SECONDS": "1"},
    ) as job:
        line = job.workers[0].wait_for_line("not pushed by")
        assert re.search(
            r"tensor 'x' round 1: pushed \d+ s ago by worker 0, not pushed by worker 1", line
        )
        job.workers[1].say("go")
        job.results()


def test_missing_processes_are_named_at_the_deadline():
    with Job(
        """
        import bpsx
        try:
            bpsx.init()
        except bpsx.RendezvousError as e:
            report(str(e))
            sys.exit(5)
    """,
        workers=1,
        servers=1,
        env={"DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "2", "BPSX_RENDEZVOUS_TIMEOUT": "2"},
    ) as job:
        assert job.workers[0].wait() == 5
        (text,) = job.workers[0].reports()
        # Worker 0 and its server may be late, too; then they are refused because the job has
        # failed.
        assert re.search(r"missing: (worker 0, )?worker 1, worker 2.* [12] of 2 servers", text)
        assert job.servers[0].wait() == 1 and job.scheduler.wait() == 1


def test_no_scheduler_at_all_is_named():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        job = Job(
            """
            import bpsx
            try:
                bpsx.init()
            except bpsx.RendezvousError as e:
                report(str(e))
        """,
            workers=1,
            env={
                "BPSX_RENDEZVOUS_TIMEOUT": "1",
                "DMLC_PS_ROOT_PORT": str(s.getsockname()[1]),
                "BYTEPS_FORCE_DISTRIBUTED": "1",
            },
        )
        job.start_worker(0)
        job.workers[0].wait()
        (text,) = job.workers[0].reports()
        job.__exit__()
        assert "no reply from the scheduler at 127.0.0.1:" in text


def test_two_processes_with_the_same_id_are_refused():
    with Job(
        _STEPPING,
        workers=2,
        worker_env={1: {"DMLC_WORKER_ID": "0"}},
        env={"BPSX_RENDEZVOUS_TIMEOUT": "8"},
    ) as job:
        statuses = [w.wait() for w in job.workers]
        assert all(statuses)
        assert any(
            ") is already in the job: " in w.text() and "same DMLC_WORKER_ID" in w.text()
            for w in job.workers
        )


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"BYTEPS_PARTITION_BYTES": "8192"}, "BYTEPS_PARTITION_BYTES"),
        ({"BYTEPS_KEY_HASH_FN": "djb2"}, "BYTEPS_KEY_HASH_FN"),
        ({"DMLC_NUM_WORKER": "3"}, "DMLC_NUM_WORKER"),
    ],
)
def test_workers_with_different_options_are_refused(env, text):
    with Job(
        _STEPPING, workers=2, worker_env={1: env}, env={"BPSX_RENDEZVOUS_TIMEOUT": "8"}
    ) as job:
        assert all(w.wait() for w in job.workers)
        assert any("refused" in w.text() and text in w.text() for w in job.workers)


@pytest.mark.parametrize(("workers", "servers", "processes"), [(2, 1, 1), (2, 0, 2)])
def test_a_process_that_cannot_compile_gives_the_reason_and_the_others_name_it(
    workers, servers, processes, tmp_path
):
    """The folder for compiled kernels is a file."""
    (tmp_path / "file").touch()
    with Job(
        "import bpsx\nbpsx.init()",
        workers,
        servers,
        processes=processes,
        env={"BPSX_CACHE_DIR": str(tmp_path / "file")},
    ) as job:
        sums, others = (
            (job.servers[0], job.workers) if servers else (job.workers[1], job.workers[:1])
        )
        assert sums.wait() != 0
        assert "BPSX_CACHE_DIR" in sums.text() and str(tmp_path / "file") in sums.text()
        for other in others:
            assert other.wait() == 1
            assert (
                f"{'server 0' if servers else 'worker 1'} (127.0.0.1, pid {sums.popen.pid})"
                in other.text()
            )


@pytest.mark.parametrize(
    "order",
    [
        ("worker", "server", "scheduler"),
        ("scheduler", "worker", "server"),
        ("server", "scheduler", "worker"),
    ],
)
def test_roles_may_start_in_any_order(order):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    job = Job(
        "import bpsx, numpy as np\nbpsx.init()\nreport(float(bpsx.push_pull(np.ones(1),"
        " average=False)[0]))",
        env={"DMLC_PS_ROOT_PORT": str(port)},
    )
    try:
        for role in order:
            if role == "scheduler":
                job.start_scheduler(port)
            for i in range({"worker": 2, "server": 1}.get(role, 0)):
                getattr(job, f"start_{role}")(i)
        assert job.results() == [[2.0], [2.0]]
    finally:
        job.__exit__()


@each_transport
def test_garbage_on_every_port_does_not_disturb_a_job(transport):
    with Job(_STEPPING, env={"BYTEPS_LOG_LEVEL": "info", **TRANSPORTS[transport]}) as job:
        started(job)
        lane = job.servers[0].wait_for_line("server 0: ").rsplit(" ", 1)[1]
        ports = [int(lane.rsplit(":", 1)[1]), int(job.port)]
        for port in ports:
            for garbage in (
                b"",
                b"GET / HTTP/1.0\r\n\r\n",
                b"\xff" * 10_000,
                bytes(range(256)) * 50,
            ):
                with socket.create_connection(("127.0.0.1", port)) as s:
                    s.sendall(garbage)
        _speak_zeromq_nonsense(ports)
        assert all(w.popen.poll() is None for w in job.processes)
        job.workers[0].signal(signal.SIGKILL)
        assert job.workers[1].wait() == 7 and "worker 0" in caught(job.workers[1])[1]


def _speak_zeromq_nonsense(ports: list[int]) -> None:
    import zmq

    context = zmq.Context()
    for port in ports:
        # A socket set up for the control link: the scheduler accepts it and gets its malformed
        # messages; a lane refuses it.
        socket_ = open_socket(context, zmq.DEALER, Config({}))
        socket_.connect(f"tcp://127.0.0.1:{port}")
        for data in (
            b"",
            b"{}",
            b'{"type":"HELLO"}',
            b'{"type":"BYE","failure":""}',
            b"[" * 5000,
            b'{"type":"DECLARE","name":"x"}',
            b"\xff\xfe",
            b'{"type":"HELLO","protocol":2,"role":"worker","rank":0,"host":"x","pid":1,"lanes":[],"config":{}}',
        ):
            socket_.send(data)
            socket_.send_multipart([data, data])
        socket_.close(2000)
    context.term()


def test_ctrl_c_ends_a_wait():
    with Job("""
        import bpsx, numpy as np
        bpsx.init()
        bpsx.barrier()
        if bpsx.rank() == 1:
            report("running")
            sys.stdin.read()
        else:
            try:
                report("running")
                bpsx.push_pull(np.ones(5), name="never")
            except KeyboardInterrupt:
                report("interrupted")
                os._exit(0)
    """) as job:
        started(job)
        job.workers[0].signal(signal.SIGINT)
        job.workers[0].wait()
        assert job.workers[0].reports()[-1] == "interrupted"


def test_verbs_fail_in_a_forked_child_without_harm_to_the_job():
    assert_good = """
        import bpsx, numpy as np, os
        bpsx.init()
        pid = os.fork()
        if pid == 0:
            try:
                bpsx.push_pull(np.ones(1))
            except bpsx.NotInitializedError as e:
                sys.exit(9 if "fork" in str(e) else 1)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        report(float(bpsx.push_pull(np.ones(1), average=False)[0]))
    """
    with Job(assert_good) as job:
        assert job.results() == [[2.0], [2.0]]
