"""Timelines of real jobs are written however the job ends, use the scheduler's clock, and appear
only on request.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from bpsx.telemetry import timeline
from cluster.launching import words
from support.jobs import Job, run
from support.traces import about, load

STEPS = """
import numpy as np, bpsx, time

bpsx.init()


def step(*sizes):
    for h in [
        bpsx.push_pull_async(np.ones(n, np.float32), name=f"t{n}") for n in sizes or (10, 3000)
    ]:
        bpsx.synchronize(h)
"""


def tracing(folder: Path, start: int = 1, end: int = 20, workers: int = 2, **more: str) -> dict:
    """Return arguments for a job whose processes write timelines below ``folder``.

    Worker i uses worker-i, as with bpsx-run --local.
    """
    env = {
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_START_STEP": str(start),
        "BYTEPS_TRACE_END_STEP": str(end),
        "BYTEPS_TRACE_DIR": str(folder),
        "BYTEPS_LOG_LEVEL": "info",
        **more,
    }
    return {
        "env": env,
        "workers": workers,
        "worker_env": {
            i: {"BYTEPS_TRACE_DIR": str(folder / f"worker-{i}")} for i in range(workers)
        },
    }


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def counted(events: list[dict]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for e in events:
        found[e["name"].rpartition(".")[2] if e["tid"] != "total" else "total"] += 1
    return found


def test_a_run_of_three_steps_writes_a_complete_file_though_the_window_ends_at_twenty(tmp_path):
    run(STEPS + "for _ in range(3): step()\nbpsx.shutdown()\n", **tracing(tmp_path))
    assert files(tmp_path) == ["server-0/comm.json", "worker-0/0/comm.json", "worker-1/0/comm.json"]
    for i in range(2):
        assert counted(load(tmp_path / f"worker-{i}/0/comm.json")) == {
            "total": 6,
            "PUSH": 6,
            "PULL": 6,
        }
        assert about(tmp_path / f"worker-{i}/0/comm.json")["clock"] == "scheduler"
    assert counted(load(tmp_path / "server-0/comm.json")) == {
        "RECEIVE": 12,
        "SUM": 12,
        "SEND": 6,
        "ROUND": 6,
    }


def test_a_run_that_ends_before_the_window_leaves_a_file_without_events(tmp_path):
    with Job(
        STEPS + "for _ in range(3): step()\nbpsx.shutdown()\n", **tracing(tmp_path, 10)
    ) as job:
        job.results()
    assert [load(tmp_path / f) for f in files(tmp_path)] == [[], [], []]
    for worker in job.workers:
        (line,) = (line for line in worker.errors if "has no events" in line)
        assert "BYTEPS_TRACE_START_STEP=10" in line and "BYTEPS_TRACE_END_STEP=" in line
    assert not any("has no events" in line for line in job.servers[0].errors)
    done = subprocess.run(
        words("trace", "--merge", str(tmp_path)), capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 0
        and "0 events in " in done.stdout
        and "did the job reach BYTEPS_TRACE_START_STEP" in done.stdout
    )


def test_deaths_and_newcomers_are_on_the_timeline(tmp_path):
    """A server dies and another one joins; the scheduler dies and another one takes over."""
    source = """
for _ in range(3): step(10, 3000, 200_000)
report("before")
hear()
for _ in range(3): step(10, 3000, 200_000)
bpsx.shutdown()
"""
    options = tracing(tmp_path, BPSX_ELASTIC="servers")
    with Job(STEPS + source, servers=2, **options) as job:
        for worker in job.workers:
            worker.wait_for_line("before")
        job.servers[0].signal(signal.SIGKILL)
        job.start_server(2)
        job.scheduler.wait_for_line("workers have moved")
        job.scheduler.wait_for_line("has joined")
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.start_scheduler(int(job.port))
        for worker in job.workers:
            worker.wait_for_line("is back, after")
            worker.say("go")
        assert [worker.wait() for worker in job.workers] == [0, 0], job.workers[0].text()
    for i in range(2):
        happened = {
            e["name"]: e
            for e in load(tmp_path / f"worker-{i}/0/comm.json")
            if (e["pid"], e["tid"]) == ("Job", "events")
        }
        term, gone = happened["term 1"], happened["no scheduler"]
        assert "server" in term["args"]["why"] and term["args"]["bytes_pushed_again"] == 0
        assert term["args"]["partitions"] and gone["dur"] > 0
        assert any(name.endswith("joins") for name in happened)
    left = [load(path) for path in tmp_path.glob("server-*/comm.json")]
    assert sorted("term 1" in {e["name"] for e in found} for found in left) == [False, True]
    merged = timeline.merge(tmp_path)["traceEvents"]
    assert sum(e["ph"] == "X" and e["name"] == "term 1" for e in merged) == 3


def test_the_window_holds_its_steps_and_no_others(tmp_path):
    run(STEPS + "for _ in range(9): step()\nbpsx.shutdown()\n", **tracing(tmp_path, 3, 5))
    for name in files(tmp_path):
        assert {e["args"]["step"] for e in load(tmp_path / name)} == {3, 4, 5}


def test_off_by_default(tmp_path):
    run(
        STEPS + "for _ in range(3): step()\nbpsx.shutdown()\n",
        env={"BYTEPS_TRACE_DIR": str(tmp_path), "BYTEPS_TRACE_START_STEP": "1"},
    )
    assert files(tmp_path) == []


def test_the_file_is_there_while_the_job_runs_on(tmp_path):
    """Also for a tensor that never reaches the end of the window."""
    with Job(
        STEPS + "step(77)\nfor _ in range(4):"
        " step()\nreport('traced')\nsys.stdin.readline()\nstep()\nbpsx.shutdown()\n",
        **tracing(tmp_path, 2, 3),
    ) as job:
        for p in (*job.workers, *job.servers):
            p.wait_for_line("timeline: ")
        assert len(load(tmp_path / "worker-0/0/comm.json")) == 12
        for w in job.workers:
            w.say("")
        job.results()
    assert len(load(tmp_path / "worker-0/0/comm.json")) == 12


def test_two_machines_that_share_a_folder_do_not_overwrite_each_other(tmp_path):
    """Their local ranks are equal; a second job in the same folder starts new files."""
    env = {**tracing(tmp_path)["env"], "BYTEPS_TRACE_DIR": str(tmp_path)}
    for _ in range(2):
        with Job(STEPS + "step(); step()\n", env=env) as job:
            job.results()
        found = files(tmp_path)
        assert len(found) == 3 and {"0/comm.json", "server-0/comm.json"} < set(found), found
        assert any(name in ("worker-0/0/comm.json", "worker-1/0/comm.json") for name in found), (
            found
        )
        assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in found)
        for name in found:
            (tmp_path / name).unlink() if name.startswith("worker") else None


@pytest.mark.parametrize("way", ["exception", "sigterm"])
def test_an_early_end_leaves_the_file(tmp_path, way):
    source = STEPS + "for _ in range(2): step()\nreport('there')\n"
    source += "hear()\n" + ("raise ValueError('enough')\n" if way == "exception" else "")
    with Job(source, **tracing(tmp_path)) as job:
        for w in job.workers:
            w.wait_for_line("there")
        for w in job.workers:
            w.signal(signal.SIGTERM) if way == "sigterm" else w.say("")
        for p in job.processes:
            status = p.wait()
            assert status == (-signal.SIGTERM if way == "sigterm" and p in job.workers else 1), (
                p.text()
            )
    assert files(tmp_path) == ["server-0/comm.json", "worker-0/0/comm.json", "worker-1/0/comm.json"]
    for i in range(2):
        assert counted(load(tmp_path / f"worker-{i}/0/comm.json")) == {
            "total": 4,
            "PUSH": 4,
            "PULL": 4,
        }


def test_a_dead_peer_leaves_the_file_and_the_failed_push_pull_in_it(tmp_path):
    source = (
        STEPS
        + """
step()
report('there')
if bpsx.rank() == 1:
    sys.stdin.readline()
try:
    step()
except bpsx.PeerLostError:
    report("lost")
"""
    )
    with Job(source, **tracing(tmp_path)) as job:
        for w in job.workers:
            w.wait_for_line("there")
        job.workers[1].signal(signal.SIGKILL)
        for p in job.processes:
            p.wait()
    events = load(tmp_path / "worker-0/0/comm.json")
    assert [e["args"].get("status") for e in events if e["tid"] == "total"].count(-1) == 2
    assert "worker-1/0/comm.json" not in files(tmp_path)


def test_servers_trace_on_sigterm(tmp_path):
    source = STEPS + "step()\nreport('there')\nsys.stdin.readline()\n"
    with Job(source, **tracing(tmp_path, BPSX_TERM_GRACE="0.5")) as job:
        for w in job.workers:
            w.wait_for_line("there")
        job.servers[0].signal(signal.SIGTERM)
        assert job.servers[0].wait() == 1
        assert counted(load(tmp_path / "server-0/comm.json"))["ROUND"] == 2
        for w in job.workers:
            w.say("")
            w.wait()


def test_events_of_merged_timelines_are_in_causal_order(tmp_path):
    """Sums follow their pushes and arrivals follow their sends, within the clock error that the
    files give.
    """
    large = 200_000
    run(STEPS + f"for _ in range(5): step(10, {large})\nbpsx.shutdown()\n", **tracing(tmp_path))
    slack = 2 * sum(about(tmp_path / f)["clock_error_us"] for f in files(tmp_path)) + 2
    timeline.merge_to(tmp_path, tmp_path / "merged.json")
    events = load(tmp_path / "merged.json")
    titles = {
        e["pid"]: e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"
    }
    assert sorted(titles.values()) == ["server 0", "worker 0", "worker 1"]
    at: dict[tuple, dict] = {}
    for e in events:
        if e["ph"] == "X":
            kind = e["name"].removeprefix(e["args"]["name"])[1:]
            at[
                titles[e["pid"]],
                e["args"]["name"],
                e["args"]["step"],
                kind,
                e["args"].get("worker"),
            ] = e
    checked = 0
    for (who, name, step, kind, _), push in at.items():
        if kind != "PUSH":
            continue
        rank = int(who[-1])
        sum_ = at["server 0", name, step, "SUM", rank]
        send, round_, pull = (
            at["server 0", name, step, "SEND", None],
            at["server 0", name, step, "ROUND", None],
            at[who, name, step, "PULL", None],
        )
        assert push["ts"] <= sum_["ts"] + slack
        assert sum_["ts"] + sum_["dur"] <= send["ts"] + slack
        assert send["ts"] <= pull["ts"] + pull["dur"] + slack
        assert push["ts"] + push["dur"] == pull["ts"]
        assert (
            round_["ts"] <= sum_["ts"] and send["ts"] + send["dur"] <= round_["ts"] + round_["dur"]
        )
        checked += 1
    assert checked == 2 * 2 * 5


def test_names_with_quotes_and_foreign_letters(tmp_path):
    name = 'layer."weight"\\0 \u00e9\u4e2d\n'
    run(
        "import numpy as np, bpsx\nbpsx.init()\nbpsx.push_pull(np.ones(4, np.float32),"
        f" name={name!r})\nbpsx.shutdown()\n",
        **tracing(tmp_path),
    )
    for file in files(tmp_path):
        assert {e["args"]["name"] for e in load(tmp_path / file)} == {"Comm." + name}


def test_a_single_worker_traces_too(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import numpy as np, bpsx\nbpsx.init()\nfor _ in range(5):"
                " bpsx.push_pull(np.ones(4, np.float32), name='x')\n"
            ),
        ],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_"))},
            "DMLC_ROLE": "worker",
            "DMLC_NUM_WORKER": "1",
            "BYTEPS_TRACE_ON": "1",
            "BYTEPS_TRACE_START_STEP": "2",
            "BYTEPS_TRACE_END_STEP": "4",
            "BYTEPS_TRACE_DIR": str(tmp_path),
        },
        timeout=90,
    )
    assert done.returncode == 0
    events = load(tmp_path / "0/comm.json")
    assert [(e["name"], e["tid"], e["args"]["step"]) for e in events] == [
        ("Comm.x", "total", s) for s in (2, 3, 4)
    ]
    assert about(tmp_path / "0/comm.json")["clock"] == "own"


def test_on_demand_from_the_script(tmp_path):
    source = (
        STEPS
        + """
report(bpsx.trace_stop())
step()
bpsx.trace_start(); bpsx.trace_start()
step(); step()
report(bpsx.trace_stop())
step()
bpsx.trace_start()
step()
report(bpsx.trace_stop())
bpsx.shutdown()
"""
    )
    results = run(
        source,
        env={"BYTEPS_TRACE_DIR": str(tmp_path)},
        worker_env={1: {"BYTEPS_TRACE_DIR": str(tmp_path / "one")}},
    )
    for reports, folder in zip(results, (tmp_path, tmp_path / "one")):
        assert reports == [None, str(folder / "0/comm.json"), str(folder / "0/comm.2.json")]
        assert {e["args"]["step"] for e in load(Path(reports[1]))} == {2, 3}
        assert {e["args"]["step"] for e in load(Path(reports[2]))} == {5}


def test_a_timeline_that_cannot_be_written_is_logged_and_the_job_continues(tmp_path):
    (tmp_path / "file").write_text("")
    with Job(
        STEPS + "step()\nbpsx.trace_start()\nstep()\nreport(bpsx.trace_stop())\nbpsx.shutdown()\n",
        env={"BYTEPS_TRACE_DIR": str(tmp_path / "file" / "below")},
    ) as job:
        assert job.results() == [[None], [None]]
        assert all(
            "cannot write the timeline" in w.text() and "BYTEPS_TRACE_DIR" in w.text()
            for w in job.workers
        )


def test_a_forked_child_that_is_terminated_writes_nothing(tmp_path):
    """The child inherits the signal handler and a lock that may be held, as in data loaders."""
    source = (
        STEPS
        + """
step()
import os, signal
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"x")     # earlier signals may be lost by Python
    while True:
        time.sleep(0.01)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
report(os.waitpid(child, 0)[1])
report(os.path.exists(os.path.join(os.environ["BYTEPS_TRACE_DIR"], "0", "comm.json")))
step()
bpsx.shutdown()
report(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""
    )
    for reports in run(source, **tracing(tmp_path)):
        assert reports == [signal.SIGTERM, False, True]
    assert {e["args"]["step"] for e in load(tmp_path / "worker-0/0/comm.json")} == {1, 2}
