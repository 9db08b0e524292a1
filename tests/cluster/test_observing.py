"""Observing real jobs: metrics, top, recording from outside, and debug output; observing changes
nothing in the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

import pytest
from launching import local_words, words
from observing import LOOP, end, launcher, looping, said

from bpsx.launch import job_registry
from support.exposition import parse
from support.jobs import DEADLINE, Job, run
from support.traces import load

# ---- top


def test_top_shows_a_running_job_and_its_slowest_worker():
    with looping() as job:
        text = said(launcher(job, "top", "--once"))
        end(job)
    assert re.search(
        r"^job at 127\.0\.0\.1:\d+: running, 2 workers, 1 server, 2 tensors, up \d+ s$", text, re.M
    )
    for name, rank, p in (
        ("worker", 0, job.workers[0]),
        ("worker", 1, job.workers[1]),
        ("server", 0, job.servers[0]),
    ):
        row = re.search(
            rf"^{name} +{rank} +127\.0\.0\.1 +{p.popen.pid} +running +([0-9.]+) +([0-9.]+) +[0-9.]+"
            r" +\d+ +\d+$",
            text,
            re.M,
        )
        assert row and float(row[1]) > 0 and float(row[2]) > 0, text
    assert re.search(
        r"^slowest: worker 1, last to push in \d+% of the rounds, on average [0-9.]+ ms", text, re.M
    ), text


def test_top_as_json():
    with looping() as job:
        view = json.loads(said(launcher(job, "top", "--once", "--json")))
        end(job)
    assert view["state"] == "running" and [(n["role"], n["rank"]) for n in view["nodes"]] == [
        ("worker", 0),
        ("worker", 1),
        ("server", 0),
    ]
    assert view["slowest"]["rank"] == 1 and all(n["rates"] for n in view["nodes"])


def test_a_stopped_scheduler_is_not_reported_as_the_end_of_the_job():
    with looping() as job:
        top = launcher(job, "top", "--json", "--interval", "0.1")
        assert (
            top.stdout is not None
            and job.scheduler is not None
            and json.loads(top.stdout.readline())["state"] == "running"
        )
        job.scheduler.signal(signal.SIGSTOP)
        _, errors = top.communicate(timeout=60)
        job.scheduler.signal(signal.SIGCONT)
        assert top.returncode == 1 and "stopped, overloaded" in errors, errors
        end(job)


def test_an_observer_that_is_killed_leaves_the_job_alone():
    with looping() as job:
        observers = [launcher(job, "top", "--json", "--interval", "0.1") for _ in range(3)]
        for o in observers:
            assert o.stdout is not None and json.loads(o.stdout.readline())["state"] == "running"
        for o in observers:
            o.kill()
            o.communicate()
        steps = len(job.workers[0].lines)
        said(launcher(job, "top", "--once"))  # a new observer still gets a reply
        deadline = time.monotonic() + DEADLINE
        while len(job.workers[0].lines) <= steps and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(job.workers[0].lines) > steps
        end(job)
    assert not any(
        "ERROR" in line or "dropped an invalid" in line for p in job.processes for line in p.errors
    )


def test_top_while_the_job_gathers():
    job = Job("")
    try:
        job.start_scheduler()
        text = said(launcher(job, "top", "--once"))
    finally:
        job.__exit__()
    assert "waiting" in text and "missing: " in text and "worker 0" in text


def test_top_without_a_job():
    done = subprocess.run(
        words("top", "--once", "--scheduler", "127.0.0.1:1"),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1 and "no answer from a scheduler at 127.0.0.1:1" in done.stderr
    for wrong in ("nonsense", "host:", "host:port", ":5"):
        done = subprocess.run(
            words("top", "--once", "--scheduler", wrong),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 2 and "expected HOST:PORT" in done.stderr


@pytest.mark.parametrize("way", ["q", "interrupt", "job ends"])
def test_top_in_a_terminal_puts_it_back_as_it_was(way):
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    seen = bytearray()
    changed = threading.Condition()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(ours, 4096):
                with changed:
                    seen.extend(data)
                    changed.notify_all()

    threading.Thread(target=read, daemon=True).start()
    with looping() as job:
        process = subprocess.Popen(
            words("top", "--scheduler", f"127.0.0.1:{job.port}", "--interval", "0.2"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        try:
            with changed:
                assert changed.wait_for(lambda: b"slowest: worker 1" in seen, DEADLINE), bytes(seen)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if way == "q":
            os.write(ours, b"q")
        elif way == "interrupt":
            process.send_signal(signal.SIGINT)
        end(job)
        assert process.wait(DEADLINE) == 0
    with changed:
        assert changed.wait_for(lambda: b"\x1b[?25h\x1b[?1049l" in seen, DEADLINE)
    assert b"Traceback" not in seen and termios.tcgetattr(theirs) == before
    os.close(theirs)
    os.close(ours)


# ---- metrics


def test_metrics_of_a_running_job():
    with looping(env={"BPSX_METRICS_PORT": "0", "BYTEPS_LOG_LEVEL": "info"}) as job:
        assert job.scheduler is not None
        url = "http" + job.scheduler.wait_for_line("metrics at http").split("http")[1]
        deadline = time.monotonic() + DEADLINE
        found: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                found = parse(answer.read().decode())
            late = {
                dict(k)["worker"]: v
                for k, v in found.get("bpsx_worker_late_seconds_total", ("", {}))[1].items()
            }
            if len(found.get("bpsx_push_pulls_total", ("", {}))[1]) == 2 and late.get("1", 0) > 0:
                break
            time.sleep(0.2)
        assert late["1"] > late["0"]
        assert all(v > 0 for v in found["bpsx_rounds_total"][1].values())
        assert sum(found["bpsx_up"][1].values()) == 4
        asked = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(asked, timeout=DEADLINE) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert answer.read().endswith(b"# EOF\n")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.replace("/metrics", "/other"), timeout=DEADLINE)
        end(job)


def scheduler_that_does_not_start(*command: str, port: int) -> str:
    """Run a scheduler with a metrics port; returns what it says before it exits with status 2."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_M"))}
    env |= {
        "DMLC_ROLE": "scheduler",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NUM_SERVER": "1",
        "BPSX_METRICS_PORT": str(port),
    }
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    return done.stderr


def test_a_metrics_port_that_is_taken_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = scheduler_that_does_not_start("-m", "bpsx.scheduler", port=port)
    assert f"BPSX_METRICS_PORT=127.0.0.1:{port}" in text


def test_a_metrics_port_without_prometheus_client_is_an_error_that_says_what_to_install():
    script = (
        "import sys; sys.modules['prometheus_client'] = None;"
        " from bpsx.scheduler.__main__ import main; sys.exit(main())"
    )
    text = scheduler_that_does_not_start("-c", script, port=0)
    assert "BPSX_METRICS_PORT" in text and "pip install 'bpsx[metrics]'" in text


# ---- recording from outside


def test_a_running_job_is_recorded_from_outside(tmp_path):
    with looping(
        env={"BYTEPS_TRACE_DIR": str(tmp_path)},
        worker_env={1: {"BYTEPS_TRACE_DIR": str(tmp_path / "one")}},
    ) as job:
        text = said(launcher(job, "trace", "--seconds", "1"))
        again = said(launcher(job, "trace", "--seconds", "1"))
        end(job)
    for path in (tmp_path / "0", tmp_path / "one/0", tmp_path / "server-0"):
        assert (
            f" events in {path / 'comm.json'}" in text
            and f" events in {path / 'comm.2.json'}" in again
        )
        assert load(path / "comm.json") and load(path / "comm.2.json")
    done = subprocess.run(
        words("trace", "--merge", str(tmp_path)), capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0 and load(tmp_path / "merged.json")
    done = subprocess.run(
        words("trace", "--merge", str(tmp_path / "nosuch")),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1 and done.stderr == (
        f"bpsx-run: error: {tmp_path / 'nosuch'}: no comm.json in this folder or below\n"
    )


# ---- records of local jobs


def test_a_local_job_is_found_and_its_record_is_removed_at_its_end(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys, os, time\ndef report(x): print(x, flush=True)\n"
        + LOOP.replace(
            "bool(select.select([sys.stdin], [], [], 0)[0])",
            f"os.path.exists({str(tmp_path / 'stop')!r})",
        )
    )
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DMLC_")},
        "BPSX_SECRET": "s" * 32,
        "BYTEPS_TRACE_DIR": str(tmp_path / "traces"),
    }
    with subprocess.Popen(
        local_words(sys.executable, str(worker)), env=env, stdout=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            while "stepped" not in job.stdout.readline():
                pass
            threading.Thread(target=job.stdout.read, daemon=True).start()
            (found,) = (r for r in job_registry.running() if r.pid == job.pid)
            assert (found.pid, found.address, found.secret, found.command) == (
                job.pid,
                "127.0.0.1",
                "s" * 32,
                [sys.executable, str(worker)],
            )
            assert not list(tmp_path.rglob("*.json")), "the secret is in no file"
            top = subprocess.run(
                words("top", "--once", "--job", str(job.pid)),
                env=env,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
            assert top.returncode == 0 and f"127.0.0.1:{found.port}: running" in top.stdout, (
                top.stderr
            )
            trace = subprocess.run(
                words("trace", "--seconds", "1", "--job", str(job.pid)),
                env=env,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
            assert trace.returncode == 0, trace.stderr
        finally:
            (tmp_path / "stop").touch()
        assert job.wait(DEADLINE) == 0
    assert job.pid not in [r.pid for r in job_registry.running()]
    made = sorted(
        str(p.relative_to(tmp_path / "traces")) for p in (tmp_path / "traces").rglob("*.json")
    )
    assert made == ["server-0/comm.json", "worker-0/0/comm.json", "worker-1/0/comm.json"]


HOLD = """
import sys
from bpsx.launch import job_registry
job_registry.write("127.0.0.1", int(sys.argv[1]), "s" * 32, ["a", "job"])
print("held", flush=True)
input()
"""


def test_a_record_ends_with_its_launcher_and_several_jobs_are_distinguished(tmp_path, monkeypatch):
    from bpsx.errors import ConfigError
    from bpsx.launch.job_view import find

    def hold(port: int) -> subprocess.Popen[str]:
        held = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert held.stdout is not None and held.stdout.readline() == "held\n"
        return held

    def ours() -> list[int]:
        return [r.pid for r in job_registry.running() if r.pid in (first.pid, second.pid)]

    for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigError, match=f"this user has no running bpsx-run with process id {os.getpid()}"
    ):
        find(None, os.getpid())
    with hold(5) as first, hold(6) as second:
        assert ours() == [first.pid, second.pid]
        with pytest.raises(ConfigError, match="several jobs run here; choose one with --job"):
            find(None, None)
        assert [find(None, p.pid).root_port for p in (first, second)] == [5, 6]
        first.kill()
        first.wait()
        assert ours() == [second.pid], "nothing is left of a launcher that was killed"
        second.communicate("\n")
    assert ours() == []


# ---- debug output


def test_a_key_is_found_by_name_and_its_values_are_printed():
    source = """
import numpy as np, bpsx

bpsx.init()
for _ in range(2):
    bpsx.push_pull(
        np.arange(1, 5, dtype=np.float32) * (bpsx.rank() + 1), name="first", average=False
    )
    bpsx.push_pull(np.full(3, 0.5, np.float16), name="second")
bpsx.shutdown()
"""
    with Job(
        source,
        env={
            "PS_KEY_LOG": "1",
            "BYTEPS_SERVER_DEBUG": "1",
            "BYTEPS_SERVER_DEBUG_KEY": "0",
            "BYTEPS_DEBUG_SAMPLE_TENSOR": "0",
            "BYTEPS_LOG_HIDE_TIME": "1",
            "BYTEPS_LOG_LEVEL": "debug",
        },
    ) as job:
        job.results()
    server = job.servers[0].errors
    names = {
        int(m[1]): m[2]
        for line in server
        if (
            m := re.fullmatch(r"bpsx server 0 DEBUG: key (\d+) is (\S+): float\d+, \d+ bytes", line)
        )
    }
    assert sorted(names.values()) == ["first", "second"] and names[0] == "first"
    values = [line.split("DEBUG: ")[1] for line in server if "elements" in line]
    assert all(line.startswith("key 0 ") for line in values)
    for step in (1, 2):
        assert sorted(v for v in values if f"step {step} received" in v) == [
            f"key 0 step {step} received: 4 elements, first 1, last 4",
            f"key 0 step {step} received: 4 elements, first 2, last 8",
        ]
        assert f"key 0 step {step} sum so far: 4 elements, first 3, last 12" in values
        assert f"key 0 step {step} send: 4 elements, first 3, last 12" in values
        for rank, w in enumerate(job.workers):
            assert (
                f"bpsx worker {rank} DEBUG: key 0 step {step} PUSH: 4 elements, first {rank + 1},"
                f" last {4 * rank + 4}" in w.errors
            )
            assert (
                f"bpsx worker {rank} DEBUG: key 0 step {step} PULL: 4 elements, first 3, last 12"
                in w.errors
            )
    assert any("tensor 'first' has the keys 0" in line for line in job.workers[0].errors)


@pytest.mark.parametrize(
    ("dtype", "first", "last"),
    [
        ("float16", "-2.5", "6.10352e-05"),
        ("bfloat16", "1", "0.25"),
        ("float64", "0.5", "-3"),
        ("uint8", "0", "255"),
        ("int8", "-128", "127"),
        ("int32", "-7", "8"),
        ("int64", "-9007199254740993", "1"),
    ],
)
def test_values_of_every_type_are_printed(dtype, first, last):
    source = f"""
import ml_dtypes, numpy as np, bpsx
bpsx.init()
dtype = {dtype!r} if {dtype!r} != "bfloat16" else ml_dtypes.bfloat16
bpsx.push_pull(np.array([{first}, 1, {last}]).astype(dtype), name="x")
bpsx.shutdown()
"""
    if dtype == "int64":
        source = source.replace(
            f"np.array([{first}, 1, {last}])", f"np.array([{first}, 1, {last}], np.int64)"
        )
    with Job(
        source, workers=1, env={"BYTEPS_DEBUG_SAMPLE_TENSOR": "-1", "BYTEPS_FORCE_DISTRIBUTED": "1"}
    ) as job:
        job.results()
    assert f"PUSH: 3 elements, first {first}, last {last}" in job.workers[0].text()


@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (4, 1)])
def test_values_on_a_machine_with_several_processes(workers, servers):
    source = """
import numpy as np, bpsx
bpsx.init()
for step in (1, 2):
    bpsx.push_pull(np.full(4, step * (bpsx.rank() + 1), np.float32), name="x", average=False)
bpsx.shutdown()
"""
    with Job(
        source,
        workers,
        servers,
        processes=2,
        env={"BYTEPS_DEBUG_SAMPLE_TENSOR": "0", "BYTEPS_LOG_HIDE_TIME": "1"},
    ) as job:
        job.results()
    machine, total = {2: (3, 3), 4: (3, 10)}[workers]
    for step in (1, 2):
        root = {"COORDINATE_REDUCE": 2, "REDUCE": machine, "BROADCAST": total} | (
            {"PUSH": machine, "PULL": total} if servers else {}
        )
        for rank, stages in (
            (0, {"REDUCE": 1, "COORDINATE_BROADCAST": total, "BROADCAST": total}),
            (1, root),
        ):
            for stage, value in stages.items():
                line = (
                    f"bpsx worker {rank} DEBUG: key 0 step {step} {stage}: 4 elements, first"
                    f" {value * step}, last {value * step}"
                )
                assert line in job.workers[rank].errors, job.workers[rank].text()


def test_verbose_two_logs_every_message_and_one_logs_connections():
    source = (
        "import numpy as np, bpsx\nbpsx.init()\nfor _ in range(3): bpsx.push_pull(np.ones(9,"
        " np.float32), name='x')\nbpsx.shutdown()\n"
    )
    with Job(source, env={"PS_VERBOSE": "2"}) as job:
        job.results()
    for rank, w in enumerate(job.workers):
        for round_ in range(3):
            assert any(
                line.endswith(
                    f"bpsx worker {rank} DEBUG: sent PUSH key 0 round {round_} 36 bytes,"
                    " connection 0"
                )
                for line in w.errors
            )
            assert any(
                line.endswith(
                    f"bpsx worker {rank} DEBUG: received ANSWER key 0 round {round_} 36 bytes,"
                    " connection 0"
                )
                for line in w.errors
            )
            for what in ("received PUSH", "sent ANSWER"):
                assert any(
                    line.endswith(f"DEBUG: {what} key 0 round {round_} 36 bytes, worker {rank}")
                    for line in job.servers[0].errors
                )
        assert any("connected to server 0" in line for line in w.errors)
    with Job(source, env={"PS_VERBOSE": "1"}) as job:
        job.results()
    assert not any("DEBUG" in line for p in job.processes for line in p.errors)
    assert all(any("connected to server 0" in line for line in w.errors) for w in job.workers)
    assert job.scheduler is not None and any(
        "worker 0 (127.0.0.1, pid" in line and line.endswith("has connected")
        for line in job.scheduler.errors
    )
    # An orderly end breaks no connection.
    assert not any("is gone" in line for p in job.processes for line in p.errors)


def test_without_telemetry_nothing_is_counted():
    source = """
import numpy as np, bpsx
bpsx.init()
bpsx.push_pull(np.ones(5000, np.float32), name="x")
report([bpsx.get_pushpull_speed(), bpsx.api.verbs.session().counters()["tensor_bytes"]])
bpsx.shutdown()
"""
    assert run(source, env={"BYTEPS_TELEMETRY_ON": "0"}) == [[[[0.0, 0.0], 0]], [[[0.0, 0.0], 0]]]
    (((now, speed), count),) = run(source)[0]
    assert now > 1.7e12 and speed > 0 and count == 20000


def test_every_role_follows_the_log_options():
    source = (
        "import numpy as np, bpsx\nbpsx.init()\nbpsx.push_pull(np.ones(9, np.float32),"
        " name='x')\nbpsx.shutdown()\n"
    )
    with Job(source, env={"BYTEPS_LOG_HIDE_TIME": "1", "BYTEPS_LOG_LEVEL": "debug"}) as job:
        job.results()
        for p in job.processes:
            assert p.errors and all(line.startswith("bpsx ") for line in p.errors), p.text()
    with Job(source, env={"BYTEPS_LOG_LEVEL": "error"}) as job:
        job.results()
        assert [p.errors for p in (*job.workers, *job.servers)] == [[], [], []]
