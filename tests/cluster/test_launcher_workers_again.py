"""bpsx-run starts workers again that have died, and they join the running job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from support.jobs import TRANSPORTS

WORKER = """
    import os, time
    import bpsx, numpy as np

    bpsx.init()
    first = not os.path.exists({flag!r})  # of the worker that is to die

    @bpsx.elastic.run
    def train(state):
        print("train", bpsx.rank(), bpsx.size(), state.step, flush=True)
        while state.step < 60:
            while state.step == 50 and first and sizes[-1:] != [3]:  # until another has joined
                time.sleep(0.01)
                state.check_host_updates()
            state.total += float(bpsx.push_pull(np.ones(1000), name="x", average=True)[0])
            state.step += 1
            if state.step == 20 and os.environ["DMLC_WORKER_ID"] == "1" and first:
                open({flag!r}, "w").close()
                {end}
            state.check_host_updates()

    state, sizes = bpsx.State(step=0, total=0.0), []
    state.register_reset_callbacks([lambda: sizes.append(bpsx.size())])
    train(state)
    print("done", bpsx.rank(), bpsx.size(), state.total, flush=True)
    bpsx.shutdown()
"""


def run(
    tmp_path, end: str, *options: str, source: str = WORKER, **more: str
) -> subprocess.CompletedProcess[str]:
    source = textwrap.dedent(source.format(end=end, flag=str(tmp_path / "flag")))
    command = [sys.executable, "-m", "bpsx", "--local", "--workers", "3", "--servers", "2"]
    return subprocess.run(
        [*command, *options, sys.executable, "-c", source],
        env={**os.environ, "BPSX_ELASTIC": "shrink", **more},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize(
    ("transport", "end", "story"),
    [
        ("zmq", "os.kill(os.getpid(), 9)", "worker 1 was killed by SIGKILL"),
        ("tcp", "raise ValueError('no more')", "worker 1 exited with status 1"),
        ("shm", "os._exit(3)", "worker 1 exited with status 3"),
    ],
)
def test_a_worker_is_started_again_and_joins(tmp_path, transport, end, story):
    job = run(tmp_path, end, "--max-restarts", "2", **TRANSPORTS[transport])
    assert job.returncode == 0, job.stderr
    said = [line.split("] ")[-1] for line in job.stdout.splitlines()]
    assert sorted(s for s in said if s.startswith("done")) == [f"done {i} 3 60.0" for i in range(3)]
    assert f"{story}; started again in 0.5 s (1 of 2)" in job.stderr
    assert f"{story}, and the job went on without it" in job.stderr


@pytest.mark.parametrize("killed", ["0", "1"])
def test_the_processes_of_a_machine_are_started_again(tmp_path, killed):
    """As one is killed, the other one ends, too; together they count as one restart."""
    source = WORKER.replace("[3]", "[6]").replace(
        '== "1" and first', f'== "1" and os.environ["BYTEPS_LOCAL_RANK"] == "{killed}" and first'
    )
    assert source.count("LOCAL_RANK") == 1 and "[6]" in source
    options = ("--processes", "2", "--max-restarts", "1")
    job = run(tmp_path, "os.kill(os.getpid(), 9)", *options, source=source)
    assert job.returncode == 0, job.stderr
    said = [line.split("] ")[-1] for line in job.stdout.splitlines()]
    assert sorted(s for s in said if s.startswith("done")) == [f"done {i} 6 60.0" for i in range(6)]
    assert job.stderr.count("started again in 0.5 s (1 of 1)") == 2, job.stderr
    assert "its machine leaves the job with it" in job.stderr


#: Ways in which the neighbour of a dead process hangs: the script's lines around its training, and
#: what the process that is to die does before.
HANGS = {
    "deaf": (
        "try: train(state)\n"
        "    except bpsx.PeerLostError:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)",
        "pass",
    ),
    "heeds SIGTERM": (
        "try: train(state)\n"
        "    except bpsx.PeerLostError:\n"
        "        signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); time.sleep(99)",
        "pass",
    ),
    "stopped": (
        "open(pids + me, 'w').write(str(os.getpid()))\n    train(state)",
        "os.kill(int(open(pids + '1.1').read()), signal.SIGSTOP)",
    ),
}


def hanging(how: str, pids: str) -> str:
    """The script of a job whose worker 1.1 hangs when worker 1.0 kills itself."""
    training, before = HANGS[how]
    source = WORKER.replace("    train(state)\n", f"    {training}\n").replace("[3]", "[6]")
    mine = 'me = os.environ["DMLC_WORKER_ID"] + "." + os.environ["BYTEPS_LOCAL_RANK"]\n    '
    mine += f"pids = {pids!r}\n    "
    source = source.replace("import os, time\n    ", "import os, signal, time\n    " + mine)
    source = source.replace(
        'os.environ["DMLC_WORKER_ID"] == "1" and first', 'me == "1.0" and first'
    )
    return source.replace('"w").close()\n', f'"w").close()\n                {before}\n')


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("deaf", "got SIGTERM and was killed by SIGKILL"),
        ("heeds SIGTERM", "got SIGTERM and exited with status 0"),
        ("stopped", "got SIGTERM and was killed by SIGKILL"),
    ],
)
def test_a_neighbour_that_hangs_is_ended_and_its_machine_started_again(tmp_path, how, end):
    options = ("--processes", "2", "--max-restarts", "1", "--grace", "1")
    source = hanging(how, str(tmp_path / "pid"))
    job = run(tmp_path, "os.kill(os.getpid(), 9)", *options, source=source)
    assert job.returncode == 0, job.stderr
    said = [line.split("] ")[-1] for line in job.stdout.splitlines()]
    assert sorted(s for s in said if s.startswith("done")) == [f"done {i} 6 60.0" for i in range(6)]
    hung = f"worker 1.1 was still running 1 s after the job had lost it, {end}"
    assert f"bpsx-run: {hung}; started again in 0.5 s (1 of 1)\n" in job.stderr, job.stderr
    assert "worker 1.0 was killed by SIGKILL; started again in 0.5 s (1 of 1)" in job.stderr


def test_a_neighbour_that_hangs_does_not_keep_bpsx_run(tmp_path):
    """Without restarts, the others end, and then bpsx-run."""
    source = hanging("stopped", str(tmp_path / "pid")).replace("sizes[-1:] != [6]", "False")
    options = ("--processes", "2", "--grace", "1")
    job = run(tmp_path, "os.kill(os.getpid(), 9)", *options, source=source)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("done") == 4, job.stdout
    hung = "worker 1.1 was still running 1 s after the job had lost it, got SIGTERM and was killed"
    assert f"{hung} by SIGKILL, and the job went on without it" in job.stderr, job.stderr


def test_a_worker_that_was_silent_is_ended_and_started_again(tmp_path):
    """It is stopped for good. The job loses it after its heartbeats' timeout."""
    source = WORKER.replace("import os, time", "import os, signal, time")
    silent = {"PS_HEARTBEAT_INTERVAL": "1", "PS_HEARTBEAT_TIMEOUT": "2"}
    options = ("--max-restarts", "1", "--grace", "0.5")
    job = run(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)", *options, source=source, **silent)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("done") == 3, job.stdout
    assert "worker 1 was still running 0.5 s after the job had lost it, got SIGTERM" in job.stderr


def test_a_worker_that_is_not_let_in_ends_with_the_job(tmp_path):
    """The others end once it has asked."""
    script = f"""
        import os, time
        import bpsx, numpy as np

        bpsx.init()
        for step in range(100):
            if step == 5 and bpsx.rank() == 1 and bpsx.size() == 3:
                os.kill(os.getpid(), 9)
            bpsx.push_pull(np.ones(10), name="x")
            time.sleep(0.02)
        while not os.path.exists({str(tmp_path / "asked")!r}):
            time.sleep(0.02)
        print("done", bpsx.size(), flush=True)
        bpsx.shutdown()
    """
    command = [sys.executable, "-m", "bpsx", "--local", "--workers", "3", "--servers", "1"]
    said = []
    with subprocess.Popen(
        [*command, "--max-restarts", "3", sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "BPSX_ELASTIC": "shrink"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            for line in job.stderr:
                said.append(line)
                if "wants to join the job while it runs" in line:
                    (tmp_path / "asked").touch()
            out = job.stdout.read()
        except BaseException:
            job.terminate()  # it ends its processes
            raise
    assert job.returncode == 0, said
    assert out.count("done 2") == 2
    assert re.search("accepts no more nodes|joins? the running job: it is over", "".join(said))


LEAVING = """
    import os, signal, time
    import bpsx, numpy as np

    bpsx.init()

    @bpsx.elastic.run
    def train(state):
        while state.step < 60:
            bpsx.push_pull(np.ones(10), name="x")
            state.step += 1
            if state.step == 20 and {who}:
                os.kill({pid}, signal.SIGTERM)
            time.sleep(0.01)
            state.commit()

    state = bpsx.State(step=0)
    state.register_departure_callbacks([lambda: print("left", bpsx.rank(), flush=True)])
    train(state)
    print("done", bpsx.rank(), bpsx.size(), flush=True)
    bpsx.shutdown()
"""


def run_leaving(who: str, pid: str, *options: str) -> subprocess.CompletedProcess[str]:
    source = textwrap.dedent(LEAVING.format(who=who, pid=pid))
    command = [sys.executable, "-m", "bpsx", "--local", "--workers", "3", "--servers", "2"]
    return subprocess.run(
        [*command, *options, sys.executable, "-c", source],
        env={**os.environ, "BPSX_ELASTIC": "shrink"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_worker_that_leaves_is_not_started_again():
    job = run_leaving("bpsx.rank() == 1 and bpsx.size() == 3", "os.getpid()", "--max-restarts", "9")
    assert job.returncode == 0, job.stderr
    assert sorted(line.split("] ")[-1] for line in job.stdout.splitlines()) == [
        "done 0 2", "done 1 2", "left 1",
    ]  # fmt: skip
    assert "started again" not in job.stderr and "went on without" not in job.stderr, job.stderr


def test_all_workers_leave_after_sigterm_to_bpsx_run():
    """It passes the signal on to them."""
    job = run_leaving("bpsx.rank() == 1", "os.getppid()")
    assert job.returncode == 0, job.stderr
    said = sorted(line.split("] ")[-1] for line in job.stdout.splitlines())
    assert [s.split()[0] for s in said] == ["left"] * 3
    assert job.stderr.count("got SIGTERM: it leaves the job") == 3


@pytest.mark.parametrize("late", [0.0, 0.2, 0.4, 0.7, 1.0])
def test_a_worker_that_comes_when_the_job_is_over_is_ended(tmp_path, late):
    """It would wait for a scheduler. The others leave about when it starts."""
    end = f"os._exit(3)\n            if state.step == 59: time.sleep({late})"
    source = WORKER.replace("sizes[-1:] != [3]", "False")
    job = run(tmp_path, end, "--max-restarts", "2", source=source)
    assert job.returncode == 0, job.stderr
    said = [line.split("] ")[-1] for line in job.stdout.splitlines()]
    assert sum(s.startswith("done") for s in said) >= 2, job.stdout
    assert "worker 1 exited with status 3, and the job went on without it" in job.stderr
