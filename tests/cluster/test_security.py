"""A process without the job secret learns nothing, changes nothing, and costs next to nothing."""

from __future__ import annotations

import re
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cluster.strangers import cpu_seconds, descriptors, half_open, memory, scan
from support.jobs import Job, run

SECRET = "a secret for these tests"
_SUM = (
    "import bpsx, numpy as np\nbpsx.init()\nreport(float(bpsx.push_pull(np.ones(1),"
    " average=False)[0]))"
)
_UNTIL_TOLD = """
    import bpsx, numpy as np, select
    bpsx.init()
    report("running")
    big, stop, rounds = np.arange(100_000, dtype=np.float32), 0.0, 0
    while not stop:
        mine = 1.0 if bpsx.rank() == 0 and select.select([sys.stdin], [], [], 0.005)[0] else 0.0
        stop = float(bpsx.push_pull(np.full(1, mine), name="stop", average=False)[0])
        assert (bpsx.push_pull(big * (bpsx.rank() + 1), name="big", average=False) == big * 3).all()
        rounds += 1
    report(rounds)
"""


def ports_of(job: Job) -> list[int]:
    """Return the ports on which the scheduler and the lanes listen."""
    lanes = job.servers[0].wait_for_line("server 0: ").split("server 0: ")[1].split(", ")
    return [int(job.port), *(int(lane.rsplit(":", 1)[1]) for lane in lanes)]


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_a_job_with_a_secret_sums(encrypt):
    assert run(_SUM, env={"BPSX_SECRET": SECRET, "BPSX_ENCRYPT": encrypt}) == [[2.0], [2.0]]


@pytest.mark.parametrize("theirs", ["another secret, long enough", ""])
def test_a_different_secret_is_reported_soon_and_never_shown(theirs):
    with Job(_SUM, env={"BPSX_SECRET": SECRET}, worker_env={1: {"BPSX_SECRET": theirs}}) as job:
        begun = time.monotonic()
        assert job.workers[1].wait(30) == 1
        assert time.monotonic() - begun < 25, "the deadline of the rendezvous is 150 s"
        said = job.workers[1].text()
        assert (
            "RendezvousError: worker 1: the scheduler at 127.0.0.1:" in said
            and "does not share our job secret" in said
            and "BPSX_SECRET" in said
        )
        job.scheduler.wait_for_line("refused a connection from ")
        assert all(
            SECRET not in p.text() and (not theirs or theirs not in p.text()) for p in job.processes
        )
        assert "arrived: worker 1" not in job.scheduler.text()  # it was not admitted


@pytest.mark.parametrize("theirs", [{"BPSX_SECRET": "another secret, long enough"}, {}])
def test_an_observer_without_the_secret_gets_an_error(theirs):
    with Job(_UNTIL_TOLD, env={"BPSX_SECRET": SECRET}) as job:
        job.workers[0].wait_for_line("running")
        env = {k: v for k, v in job._env.items() if k != "BPSX_SECRET"} | theirs
        for words in (["top", "--once"], ["trace", "--seconds", "1"]):
            found = subprocess.run(
                [sys.executable, "-m", "bpsx.launch", *words],
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert found.returncode == 1 and "does not share our job secret" in found.stderr, (
                found.stderr
            )
            assert ("we have none" in found.stderr) != bool(theirs)
        job.workers[0].say("stop")
        job.results()


def test_encryption_on_one_side_only_is_refused():
    with Job(_SUM, env={"BPSX_SECRET": SECRET}, worker_env={1: {"BPSX_ENCRYPT": "1"}}) as job:
        assert job.workers[1].wait(60) == 1
        # The worker is refused, or, if it came first, learns that the others were.
        differs = "BPSX_ENCRYPT=(1 on this worker, 0|0 on this (worker|server), 1) on a"
        assert re.search(differs, job.workers[1].text())


def _other_address() -> str:
    """Return an address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))
            return str(s.getsockname()[0])
        except OSError:
            pytest.skip("this machine has no address but loopback")


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_beyond_loopback_no_process_starts_without_a_secret(role):
    where = (
        {"DMLC_PS_ROOT_URI": _other_address()}
        if role != "server"
        else {"DMLC_NODE_HOST": _other_address()}
    )
    job = Job(
        _SUM, workers=1, env={**where, "BYTEPS_FORCE_DISTRIBUTED": "1", "DMLC_PS_ROOT_PORT": "1"}
    )
    try:
        if role == "scheduler":
            with pytest.raises(AssertionError, match="never said"):
                job.start_scheduler()
            process = job.scheduler
        else:
            getattr(job, f"start_{role}")(0)
            process = (job.servers + job.workers)[0]
        assert process.wait() != 0
        said = process.text()
        assert (
            f"this {role} uses {_other_address()}" in said
            and "BPSX_SECRET" in said
            and "BPSX_INSECURE=1" in said
        )
    finally:
        job.__exit__()


@pytest.mark.parametrize("env", [{"BPSX_INSECURE": "1"}, {"BPSX_SECRET": SECRET}])
def test_beyond_loopback_a_job_runs_with_a_secret_or_bpsx_insecure(env):
    with Job(_SUM, env=env, host=_other_address()) as job:
        assert job.results() == [[2.0], [2.0]]
        assert ("without a job secret (BPSX_INSECURE=1)" in job.servers[0].text()) is (
            "BPSX_INSECURE" in env
        )


def test_a_port_scan_does_not_disturb_a_job():
    with Job(_UNTIL_TOLD, env={"BPSX_SECRET": SECRET, "BYTEPS_LOG_LEVEL": "info"}) as job:
        for worker in job.workers:
            worker.wait_for_line("running")
        pids = [job.scheduler.popen.pid, job.servers[0].popen.pid]
        ports = ports_of(job)
        before = [memory(pid) for pid in pids]
        for _ in range(3):
            for port in ports:
                scan(port)
        after = [memory(pid) for pid in pids]
        job.workers[0].say("stop")
        rounds = job.results()
        assert rounds[0] == rounds[1] and rounds[0][1] > 0
        assert all(b - a < 32 << 20 for a, b in zip(before, after)), (before, after)
        assert "malformed 0" in job.servers[0].text()  # no message of it reached a lane


@pytest.mark.timeout(300)
def test_ten_thousand_half_open_connections_do_not_disturb_a_job():
    with Job(_UNTIL_TOLD, env={"BPSX_SECRET": SECRET, "BYTEPS_LOG_LEVEL": "info"}) as job:
        for worker in job.workers:
            worker.wait_for_line("running")
        pids = [job.scheduler.popen.pid, job.servers[0].popen.pid]
        ports = ports_of(job)
        at_rest = [descriptors(pid) for pid in pids]
        before, spent = [memory(pid) for pid in pids], [cpu_seconds(pid) for pid in pids]
        begun = time.monotonic()
        with half_open([ports[0], ports[1]], 10_000):
            held = [memory(pid) for pid in pids]
            seconds = time.monotonic() - begun
            most = [descriptors(pid) for pid in pids]
            end = time.monotonic() + 60
            while (
                any(descriptors(pid) > n + 10 for pid, n in zip(pids, at_rest))
                and time.monotonic() < end
            ):
                time.sleep(0.2)  # waits for what the processes do by themselves
            print(
                f"opened in {seconds:.1f} s; descriptors {at_rest} -> {most}; bytes each"
                f" {[(h - b) // 5000 for h, b in zip(held, before)]}; gone after"
                f" {time.monotonic() - begun:.1f} s; cpu s"
                f" {[round(cpu_seconds(p) - s, 2) for p, s in zip(pids, spent)]}"
            )
            assert all(descriptors(pid) <= n + 10 for pid, n in zip(pids, at_rest)), (
                "half-open connections are kept"
            )
        assert max(most) > 1000, "the connections were never there"
        assert all(h - b < 256 << 20 for h, b in zip(held, before)), (before, held)
        job.workers[0].say("stop")
        rounds = job.results()
        assert rounds[0] == rounds[1] and rounds[0][1] > 0


def test_files_are_private(tmp_path):
    """Only this user can read what the roles write, whatever the umask allows."""
    job = Job(
        _SUM, env={"BPSX_CACHE_DIR": str(tmp_path / "cache"), "BYTEPS_SOCKET_PATH": str(tmp_path)}
    )
    with job:
        (port_file,) = Path(job._folder.name).glob("port-*")
        assert stat.S_IMODE(port_file.stat().st_mode) == 0o600
        assert job.results() == [[2.0], [2.0]]
    for path in tmp_path.rglob("*"):
        top = path.relative_to(tmp_path).parts[0]
        assert not (tmp_path / top).stat().st_mode & 0o077, f"others may enter {top}"


class _SlowServers(Job):
    """Servers that still compile when the job is complete, for longer than a handshake may take."""

    def command(self, name: str, words: list[str]) -> list[str]:
        source = """
            import sys, time
            from bpsx import kernels
            from bpsx.transports import refusals

            refusals.HANDSHAKE_MS = 2000
            # the workers' own loading is not slowed down
            from bpsx.server import __main__ as server

            load = kernels.load
            kernels.load = lambda code: (time.sleep(0.75), load(code))  # 6 s for all
            sys.exit(server.main())
        """
        return (
            [sys.executable, "-c", textwrap.dedent(source)] if name.startswith("server") else words
        )


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_workers_are_let_in_while_a_server_still_compiles(encrypt):
    with _SlowServers(_SUM, env={"BPSX_SECRET": SECRET, "BPSX_ENCRYPT": encrypt}) as job:
        assert job.results() == [[2.0], [2.0]]
