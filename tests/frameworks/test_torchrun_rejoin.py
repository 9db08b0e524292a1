"""Workers that torchrun starts again on one machine join the running job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.torchrun_job import Torchrun

ELASTIC = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "120"}
OPTIONS = ("--max-restarts", "2", "--local-addr", "127.0.0.1")
TRAINING = """
    import json, os, signal, zlib
    import torch
    import bpsx.torch as bps

    def report(*values):
        os.write(1, f"REPORT {json.dumps(values)}\\n".encode())

    torch.set_num_threads(1)
    bps.init()
    first = bps.rank()
    model = torch.nn.Linear(8, 4)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
    )

    @bps.elastic.run
    def train(state):
        report("train", bps.rank(), bps.size(), state.step, os.getpid())
        while state.step < 40:
            optimizer.zero_grad()
            made = torch.Generator().manual_seed(10 * state.step + bps.rank())
            model(torch.randn(4, 8, generator=made)).square().mean().backward()
            optimizer.step()
            state.step += 1
            if state.step == 10:
                report("ten", bps.rank(), os.getpid())
                if first == int(os.environ["VICTIM"]):
                    signal.pause()
            state.commit()

    state = bps.elastic.TorchState(model, optimizer, step=0)
    train(state)
    weights = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    report("end", bps.rank(), bps.size(), state.step, weights)
"""


def train(job: Torchrun, strike: Callable[[int], None], victim: int) -> list[list[Any]]:
    """Train to a successful end; ``strike(pid)`` when worker ``victim`` has made ten steps.

    It makes no other one. The job's environment has ``victim`` as VICTIM. Returns what workers have
    reported. All of them have made all steps, and have equal weights.
    """
    reports = []
    for line in job.output:
        print(line, end="")
        for text in re.findall(r"REPORT (\[.*?\])", line):
            reports.append(json.loads(text))
            if reports[-1][:2] == ["ten", victim]:
                strike(reports[-1][2])
    assert [process.wait() for process in job.processes] == [0, 0] and not job.left()
    ends = [r for r in reports if r[0] == "end"]
    assert sorted(r[1] for r in ends) == list(range(ends[0][2]))
    assert len({r[4] for r in ends}) == 1 and all(r[3] == 40 for r in ends)
    return reports


def begun(reports: list[list[Any]], late: int = 11) -> set[int]:
    """Return the process ids of workers that have trained, all from step 0 or where others were.

    The others make no step without the lost worker but the one under way. ``late``: the latest
    step with which they go on.
    """
    begins = [r for r in reports if r[0] == "train"]
    assert {r[3] for r in begins} <= {0, *range(10, late + 1)}
    return {r[4] for r in begins}


@pytest.mark.parametrize(("each", "victim"), [((1, 1), 1), ((1, 1), 0), ((2, 2), 3)])
def test_a_worker_that_its_agent_starts_again_joins(tmp_path: Path, each, victim) -> None:
    """Only its machine's workers begin again; worker 0's scheduler and server outlive it."""
    env = {**ELASTIC, "VICTIM": str(victim)}
    with Torchrun(tmp_path, TRAINING, each=each, options=OPTIONS, **env) as job:
        reports = train(job, lambda pid: os.kill(pid, signal.SIGKILL), victim)
    # Rank 0 may get the root's sum before it hears of the loss, and then makes one step more.
    assert len(begun(reports, 12 if each[0] > 1 else 11)) == sum(each) + each[0]


def test_a_machine_that_comes_back_joins(tmp_path: Path) -> None:
    """Its agent, its worker and its server have died, and its agent is started again."""

    def strike(_: int) -> None:
        job.lose(1)
        job.start_again(1)

    env = {**ELASTIC, "VICTIM": "1"}
    with Torchrun(tmp_path, TRAINING, each=(1, 1), options=OPTIONS, **env) as job:
        reports = train(job, strike, 1)
    assert len(begun(reports)) == 3


HOLD = """
    import json, os
    import torch
    import bpsx.torch as bps

    if os.environ["RANK"] == "1" and not os.path.exists("environment"):
        with open("environment", "w") as file:
            json.dump(dict(os.environ), file)
    bps.init()
    os.write(1, b"IN\\n")
    told = torch.zeros(1)
    while not told:  # all leave after the same sum
        told = bps.push_pull(torch.tensor([float(os.path.exists("go"))]), name="go", average=False)
"""


def test_a_place_that_is_taken_is_not_taken_again(tmp_path: Path) -> None:
    """Torchrun may have started all workers again, so the worker waits for their next job."""
    with Torchrun(tmp_path, HOLD, each=(1, 1), options=OPTIONS, **ELASTIC) as job:
        seen = 0
        while seen < 2:
            seen += job.output.readline().count("IN")
        env = json.loads((tmp_path / "environment").read_text())
        late = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**env, "BPSX_RENDEZVOUS_TIMEOUT": "1"},
            capture_output=True,
            text=True,
        )
        (tmp_path / "go").touch()
        statuses, output = job.wait()
    assert statuses == [0, 0], output
    assert "cannot join the running job, so this worker waits for the next one: " in late.stderr
    assert "the job has not come together after 1 s; no answer from worker 0" in late.stderr


pytestmark = pytest.mark.timeout(300)
