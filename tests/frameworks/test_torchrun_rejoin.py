"""Workers that torchrun starts again on one machine join the running job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.torchrun_job import Torchrun

ELASTIC = {"BPSX_ELASTIC": "replace", "BPSX_ELASTIC_WAIT": "120"}
TRAINING = """
    import json, os, time, zlib
    import torch
    import bpsx.torch as bps

    def report(*values):
        os.write(1, f"REPORT {json.dumps(values)}\\n".encode())

    torch.set_num_threads(1)
    bps.init()
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
                time.sleep(0.1)
            state.commit()

    state = bps.elastic.TorchState(model, optimizer, step=0)
    train(state)
    weights = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    report("end", bps.rank(), bps.size(), state.step, weights)
"""


@pytest.mark.parametrize(("each", "victim"), [((1, 1), 1), ((1, 1), 0), ((2, 2), 3)])
def test_a_worker_that_its_agent_starts_again_joins(tmp_path: Path, each, victim) -> None:
    """Only its machine's workers begin again; worker 0's scheduler and server outlive it."""
    options = ("--max-restarts", "2", "--local-addr", "127.0.0.1")
    with Torchrun(tmp_path, TRAINING, each=each, options=options, **ELASTIC) as job:
        reports = []
        for line in job.output:
            print(line, end="")
            for text in re.findall(r"REPORT (\[.*?\])", line):
                reports.append(json.loads(text))
                if reports[-1][:2] == ["ten", victim]:
                    os.kill(reports[-1][2], signal.SIGKILL)
        statuses = [process.wait() for process in job.processes]
    assert statuses == [0, 0] and not job.left()
    workers = sum(each)
    ends = [r for r in reports if r[0] == "end"]
    assert sorted(r[1] for r in ends) == list(range(workers)) and ends[0][2] == workers
    assert len({r[4] for r in ends}) == 1 and all(r[3] == 40 for r in ends)
    assert {r[3] for r in reports if r[0] == "train"} - {0} <= {10, 11, 12, 13}
    # One machine's processes are new, the others have lived on.
    pids = {r[4] for r in reports if r[0] == "train"}
    assert len(pids) == workers + each[0]


HOLD = """
    import json, os
    import bpsx.torch as bps

    if os.environ["RANK"] == "1" and not os.path.exists("environment"):
        with open("environment", "w") as file:
            json.dump(dict(os.environ), file)
    bps.init()
    os.write(1, b"IN\\n")
    while not os.path.exists("go"):
        bps.barrier()
"""


def test_a_place_that_is_taken_is_not_taken_again(tmp_path: Path) -> None:
    """Torchrun may have started all workers again, so the worker waits for their next job."""
    with Torchrun(
        tmp_path, HOLD, each=(1, 1), options=("--local-addr", "127.0.0.1"), **ELASTIC
    ) as job:
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
