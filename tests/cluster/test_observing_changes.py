"""Observing real jobs whose processes die, leave and join: who, and for how long all stop."""

from __future__ import annotations

import json
import re
import signal
import urllib.request

from observing import launcher, looping, said

from support.exposition import parse
from support.jobs import DEADLINE, Job


def test_top_and_metrics_of_a_job_that_has_lost_processes_and_got_others():
    """A server has died, another one has joined, and the scheduler is another one."""
    env = {
        "BPSX_ELASTIC": "servers",
        "BPSX_ELASTIC_BALANCE": "0",
        "BPSX_METRICS_PORT": "0",
        "BYTEPS_LOG_LEVEL": "info",
    }
    with looping(env=env, servers=2) as job:
        job.start_server(2)
        job.scheduler.wait_for_line("has joined")
        for victim, text in ((job.servers[0], "with term 1"), (job.scheduler, "steps go on")):
            victim.signal(signal.SIGKILL)
            victim.wait()
            job.workers[0].wait_for_line(text)
        job.start_scheduler(int(job.port))
        for worker in job.workers:
            worker.wait_for_line("is back, after")
            worker.lines.clear()
            worker.wait_for_line("stepped")
        view = json.loads(said(launcher(job, "top", "--once", "--json")))
        url = "http" + job.scheduler.wait_for_line("metrics at http").split("http")[1]
        with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
            found = parse(answer.read().decode())
        job.workers[0].say("")
        assert [p.wait() for p in (*job.workers, job.scheduler)] == [0, 0, 0]
    states = {n["pid"]: (n["role"], n["state"], bool(n["rates"])) for n in view["nodes"]}
    assert states == {
        **{worker.popen.pid: ("worker", "running", True) for worker in job.workers},
        **{server.popen.pid: ("server", "running", True) for server in job.servers[1:]},
        job.servers[0].popen.pid: ("server", "lost", False),
    }
    (lost, scheduler), pid = view["changes"], job.servers[0].popen.pid
    assert (lost["what"], lost["term"], lost["ago"]) == ("lost", 1, None), lost
    assert lost["who"].endswith(f" (127.0.0.1, pid {pid})") and "broke" in lost["why"], lost
    assert (scheduler["what"], scheduler["who"]) == ("joined", "another scheduler"), scheduler
    assert (view["servers"], view["term"], view["servers_lost"], view["tensors"]) == (2, 1, 1, 2)
    assert sum(found["bpsx_up"][1].values()) == 5


def test_top_says_who_was_lost_and_how_long_the_others_stopped():
    env = {"BPSX_ELASTIC": "shrink", "BYTEPS_LOG_LEVEL": "info"}
    with looping(env=env, workers=3, servers=2) as job:
        victims = job.servers[1], job.workers[2]
        for term, victim in enumerate(victims, 1):
            victim.signal(signal.SIGKILL)
            job.scheduler.wait_for_line(f"term {term}: {4 - term} workers ")
        text = said(launcher(job, "top", "--once"))
        job.workers[0].say("")
        assert [p.wait() for p in (*job.workers[:2], job.scheduler)] == [0, 0, 0]
    server, worker = (victim.popen.pid for victim in victims)
    row = r"\n +{} +\d+ +\d\.\d{{3}} +\d+  lost: {} \(127\.0\.0\.1, pid {}\), its connection "
    assert re.search(row.format(1, r"server \d", server), text), text
    assert re.search(row.format(2, "worker 2", worker), text), text
    assert text.index(f"pid {worker})") < text.index(f"pid {server})")  # the latest first
    assert re.search(rf"\nserver +\d +127\.0\.0\.1 +{server} +lost ", text), text
    assert re.search(rf"\nworker +2 +127\.0\.0\.1 +{worker} +lost ", text), text


CHANGING = """
    import bpsx, time, numpy as np

    bpsx.init()

    @bpsx.elastic.run
    def train(state):
        while not state.ends:
            bpsx.push_pull(np.ones(1000), name="g")
            state.step += 1
            state.ends = bool(bpsx.push_pull(np.array([float(told())]), name="ends")[0])
            print("stepped", state.step, bpsx.size(), flush=True)
            state.commit()

    def told():
        import select
        return bool(select.select([0], [], [], 0.005)[0])

    train(bpsx.State(step=0, ends=False))
    bpsx.shutdown()
"""


def test_top_metrics_and_timelines_of_a_job_whose_workers_change(tmp_path):
    """One leaves, one is killed, and another joins in its place."""
    env = {
        "BPSX_ELASTIC": "shrink",
        "BPSX_METRICS_PORT": "0",
        "BYTEPS_LOG_LEVEL": "info",
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_DIR": str(tmp_path),
        "BYTEPS_TRACE_START_STEP": "1",
        "BYTEPS_TRACE_END_STEP": "100000",
    }
    with Job(CHANGING, workers=4, servers=1, env=env) as job:
        for worker in job.workers:
            worker.wait_for_line("stepped 5")
        job.workers[3].signal(signal.SIGTERM)
        assert job.workers[3].wait() == 0, job.workers[3].text()
        job.workers[2].signal(signal.SIGKILL)
        job.scheduler.wait_for_line("workers go on without", count=2)
        job.start_worker(2)
        job.workers[4].wait_for_line("stepped")
        url = "http" + job.scheduler.wait_for_line("metrics at http").split("http")[1]
        with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
            found = parse(answer.read().decode())
        text = said(launcher(job, "top", "--once"))
        job.workers[0].say("")
        assert [job.workers[i].wait() for i in (0, 1, 4)] == [0] * 3
        log, pids = job.scheduler.text(), [worker.popen.pid for worker in job.workers]
    scheduler = (("host", "127.0.0.1"), ("rank", "0"), ("role", "scheduler"))
    figures = {
        name.removeprefix("bpsx_workers"): values[scheduler]
        for name, (_, values) in found.items()
        if name.startswith("bpsx_workers")
    }
    assert figures == {
        "": 3, "_at_start": 4, "_lost_total": 1, "_left_total": 1, "_joined_total": 1
    }  # fmt: skip
    assert 0 < found["bpsx_last_recovery_seconds"][1][scheduler] < 5
    assert re.search(r"running, 3 workers \(4 at the beginning\), 1 server", text), text
    for line in (
        # No worker pushes again if the server had answered all when worker 2 was killed.
        r"term \d+: 1 worker lost; 1 worker left; 1 worker joined(; [1-9]\d* bytes pushed again)?",
        rf" +\d+ +\d+ +\d\.\d+ +0  left: worker 3 \(127.0.0.1, pid {pids[3]}\), SIGTERM",
        rf" +\d+ +\d+ +\d\.\d+ +\d+  lost: worker 2 \(127.0.0.1, pid {pids[2]}\), its .*",
        rf" +\d+ +\d+ +\d\.\d+ +0  joined: worker 2 \(127.0.0.1, pid {pids[4]}\)",
    ):
        assert re.search(f"^{line}$", text, re.M), text
    # Each event is one line of the scheduler's log.
    for event in (
        "wants to leave the job: SIGTERM",
        "leaves the job: SIGTERM; the job goes on with term",
        "which has left in good order, and push 0 bytes again",
        "is gone: its connection to the scheduler broke",
        "wants to join the job while it runs",
        "has joined: the job goes on with term",
    ):
        assert len([line for line in log.splitlines() if event in line]) == 1, event
    marks = [
        event["args"]["why"]
        for path in tmp_path.rglob("*.json")
        for event in json.loads(path.read_text())["traceEvents"]
        if "why" in event.get("args", {})
    ]
    assert marks.count("SIGTERM") == 1, "the one that has left"
    for why in ("leaves the job: SIGTERM", "is gone", "has joined"):
        assert any(why in mark for mark in marks), (why, marks)
