"""Training under torchrun with restarts, also on separate machines, and cleanup afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun_training as training
from test_torch_launch import DYING

from support.torchrun_job import Torchrun

SOURCE = Path(training.__file__).read_text()
LOOPBACK = ("--local-addr", "127.0.0.1")


def train(folder: Path, faults: list[Any], **more: Any) -> dict[int, list[list[Any]]]:
    """Train to a successful end; return what workers reported at the start of each attempt.

    The key is the step from which the attempt continued.
    """
    with Torchrun(folder, SOURCE, json.dumps(faults), **more) as job:
        statuses, output = job.wait()
        assert not any(statuses), output[-5000:]
        assert not job.left()
    assert not list(folder.glob("bpsx-*/*")), "what the processes of a machine met at"
    begins: dict[int, list[list[Any]]] = {}
    for facts in sorted(json.loads(found) for found in re.findall(r"BEGINS (\[.*?\])", output)):
        begins.setdefault(facts[0], []).append(facts[1:])
    assert all((folder / f"fault-{step}").exists() for step, *_ in faults)
    weights = [torch.load(file, weights_only=True) for file in sorted(folder.glob("weights-*"))]
    assert len(weights) == begins[max(begins)][0][1]
    for found in weights:
        for ours, first, right in zip(found, weights[0], training.reference(), strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, right, rtol=0, atol=1e-11)
    return begins


def test_a_machine_restarts_twice_and_continues(tmp_path: Path) -> None:
    """The worker that started the scheduler is killed; in the next attempt the other one raises."""
    begins = train(
        tmp_path,
        [[1, 0, "kill"], [3, 1, "raise"]],
        endpoint="standalone",
        options=("--max-restarts", "2"),
    )
    first, second, third = sorted(begins)
    assert (first, second) == (0, 2) and third in (
        3,
        4,
    )  # worker 0 may not have saved the step that worker 1 had completed
    for attempt in begins.values():
        assert [facts[:5] for facts in attempt] == [
            [rank, 2, 1, 0, "127.0.0.1"] for rank in range(2)
        ]
    assert len({facts[-1] for attempt in begins.values() for facts in attempt}) == 3  # secrets


@pytest.mark.parametrize("elastic", ["off", "shrink"])
def test_two_machines_restart_and_continue(tmp_path: Path, elastic: str) -> None:
    """All begin again, as torchrun's rendezvous demands it, whoever the job could lose."""
    begins = train(
        tmp_path,
        [[2, 1, "kill"]],
        each=(1, 1),
        endpoint="127.0.0.1",
        options=("--max-restarts", "1", *LOOPBACK),
        BPSX_ENCRYPT="1",
        BPSX_ELASTIC=elastic,
    )
    assert len(begins) == 2 and all(
        [facts[:4] for facts in attempt] == [[rank, 2, 2, 2] for rank in range(2)]
        for attempt in begins.values()
    )
    assert len({facts[-1] for attempt in begins.values() for facts in attempt}) == 2


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with Torchrun(tmp_path, DYING, "running", BYTEPS_FORCE_DISTRIBUTED="1") as job:
        seen = 0
        for line in job.output:
            seen += line.count("READY")
            if seen == 2:
                break
        assert len(job.left()) == 5  # torchrun, two workers, scheduler, server
        os.killpg(job.processes[0].pid, signal.SIGINT)
        statuses, output = job.wait()
        assert statuses != [0] and not job.left(), output


# PyTorch 2.1 warns about its own use of TypedStorage when it loads a checkpoint.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:TypedStorage")]
