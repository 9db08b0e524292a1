"""Scripts with only ``init_process_group`` or ``init()``, under bpsx-run and torchrun; and cleanup
when they die.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from support.torch_job import launch
from support.torchrun_job import Torchrun

GROUPS = """
    import sys
    import torch, torch.distributed as dist
    import bpsx.torch as bps

    for backend in sys.argv[1:]:
        for turn in range(2):
            dist.init_process_group(backend)
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.eq(dist.get_world_size()).all()
            dist.barrier()
            dist.destroy_process_group()
        assert bps.push_pull(torch.ones(2), average=False).eq(bps.size()).all()
        # in one write: torchrun's workers share a pipe
        sys.stdout.write(f"worked: {backend} {bps.rank()} {bps.size()}\\n")
"""

PLACES = """
    import json, os, sys
    import torch
    import bpsx
    import bpsx.torch as bps
    from bpsx.api.verbs import session


    def say(word, value):
        # in one write: torchrun's workers share a pipe
        sys.stdout.write(f"{word} {json.dumps(value)}\\n")
        sys.stdout.flush()


    for turn in range(3):
        if turn < 2:
            bps.init()
            bps.init()
        else:
            for resume, *numbers in (
                (bpsx.resume, 1, 0),
                (bps.resume, 7, 0),
                (bps.resume, config.num_worker, 0, 100),
            ):
                try:
                    resume(*numbers)
                except bpsx.BpsxError as e:
                    say("REFUSED", str(e))
            bps.resume(config.num_worker, 0)
        config = session().config
        total = bps.push_pull(torch.ones(2), name=f"turn {turn}", average=False)[0].item()
        say(
            "PLACE",
            [
                turn,
                int(os.environ["RANK"]),
                bps.rank(),
                bps.size(),
                bps.local_rank(),
                bps.local_size(),
                config.num_worker,
                config.servers,
                bool(config.secret),
                bps.declare(f"turn {turn}"),
                total,
            ],
        )
        bps.suspend() if turn == 1 else bps.shutdown()
"""

DYING = """
    import os, signal, sys
    import torch
    import bpsx.torch as bps


    def pause(**_):
        print("READY", flush=True)
        signal.pause()


    if sys.argv[1] == "before" and os.environ["RANK"] == "1":
        import bpsx.api.lifecycle

        # with the address of the job's scheduler
        bpsx.api.lifecycle.begin = pause
    bps.init()
    bps.push_pull(torch.ones(2))
    print("READY", flush=True)
    if sys.argv[1] == "raises" and os.environ["RANK"] == "1":
        raise ValueError("worker 1 has had enough")
    while True:
        bps.push_pull(torch.ones(2), name="x")
"""


def assert_places(
    text: str, size: int, each: int, machines: int, servers: int, secret: bool = True
) -> None:
    """Check that PLACES found ``size`` workers with the right places.

    Turn 2 must keep the order of names of turn 1, and follows three rejected calls.
    """
    found = sorted(json.loads(place) for place in re.findall(r"PLACE (\[.*?\])", text))
    assert found == [
        [turn, rank, rank, size, rank % each, each, machines, servers, secret, turn == 2, size]
        for turn in range(3)
        for rank in range(size)
    ]
    assert (
        text.count(f"resume: num_workers=7, but torchrun has started {machines} machines") == size
    )
    assert (
        text.count("resume: global_rank=100, but torchrun made this process worker")
        == text.count("call bpsx.torch.resume")
        == size
    )


# ---- under bpsx-run


def test_init_process_group_alone_under_bpsx_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(GROUPS))
    status, output = launch(
        [sys.executable, str(script), "bpsx", "gloo", "cpu:bpsx"], workers=2, servers=1, processes=2
    )
    assert status == 0, output[-20000:]
    for backend in ("bpsx", "gloo", "cpu:bpsx"):
        for rank in range(4):
            assert f"worked: {backend} {rank} 4" in output


def test_pytorchs_own_variables_take_precedence(tmp_path: Path) -> None:
    """A script that sets PyTorch's variables under bpsx-run gets the store that they name."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch.distributed as dist
        import bpsx.torch as bps

        dist.init_process_group(
            "bpsx", rank=int(__import__("os").environ["DMLC_WORKER_ID"]), world_size=2
        )
        print(
            "store:",
            type(
                dist.distributed_c10d._get_default_store().underlying_store.underlying_store
            ).__name__,
            dist.distributed_c10d._get_default_store().underlying_store.underlying_store.port,
            flush=True,
        )
        dist.barrier()
    """)
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    status, output = launch(
        [sys.executable, str(script)],
        workers=2,
        servers=1,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    assert status == 0, output[-20000:]
    assert output.count(f"store: TCPStore {port}") == 2


# ---- under torchrun


def test_torchrun_on_one_machine(tmp_path: Path) -> None:
    """Initialize three times in a process, then as a backend.

    Each time there is one scheduler and no server, and no process remains.
    """
    with Torchrun(
        tmp_path,
        textwrap.dedent(PLACES) + textwrap.dedent(GROUPS).replace("range(2)", "range(1)"),
        "bpsx",
    ) as job:
        statuses, output = job.wait()
        assert statuses == [0], output[-20000:]
        assert_places(output, 2, 2, 1, 0)
        assert all(f"worked: bpsx {rank} 2" in output for rank in range(2))
        assert not job.left()


def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    with Torchrun(tmp_path, PLACES, each=(2, 2)) as job:
        statuses, output = job.wait()
        assert statuses == [0, 0], output[-20000:]
        assert_places(output, 4, 2, 2, 2)
        assert not job.left()


def test_uneven_machines(tmp_path: Path) -> None:
    """Each process becomes a machine of its own; rank() is still RANK."""
    with Torchrun(tmp_path, PLACES, each=(2, 1), by_hand=True) as job:
        statuses, output = job.wait()
        assert statuses == [0, 0, 0], output[-20000:]
        assert_places(output, 3, 1, 3, 3)
        assert "machine of its own" in output and not job.left()


def test_a_single_process_needs_nothing(tmp_path: Path) -> None:
    with Torchrun(tmp_path, PLACES, each=(1,), by_hand=True) as job:
        statuses, output = job.wait()
        assert statuses == [0], output[-20000:]
        assert_places(output, 1, 1, 1, 0, secret=False)


@pytest.mark.parametrize("when", ["before", "running"])
def test_killed_workers_leave_nothing(tmp_path: Path, when: str) -> None:
    """Scheduler and servers that workers have started exit by themselves, before and during the
    job.
    """
    with Torchrun(
        tmp_path, DYING, when, by_hand=True, BYTEPS_FORCE_DISTRIBUTED="1", BYTEPS_LOG_LEVEL="info"
    ) as job:
        ready = ("READY", "arrived: server 0") if when == "before" else ("READY", "READY")
        seen = ""
        for line in job.output:
            seen += line
            if all(seen.count(text) >= ready.count(text) for text in ready):
                break
        assert len(job.left()) == 4, seen
        for process in job.processes:
            process.kill()
        # Read to end of file, which comes once scheduler and server have closed the pipe, too.
        rest = job.output.read()
        assert not job.left()
        assert (
            "the exit of the worker that started it" in rest
            if when == "before"
            else "is gone" in rest
        ), rest


def test_a_worker_that_raises_ends_the_job(tmp_path: Path) -> None:
    with Torchrun(tmp_path, DYING, "raises", by_hand=True) as job:
        statuses, output = job.wait()
        assert statuses == [1, 1] and "ended by ValueError: worker 1 has had enough" in output, (
            output[-20000:]
        )
        assert not job.left()


def test_variables_that_do_not_fit_are_refused_on_all_workers(tmp_path: Path) -> None:
    """With a scheduler of the user, DMLC variables apply and must fit torchrun's machines."""
    with Torchrun(
        tmp_path,
        "import bpsx.torch as bps\nbps.init()",
        by_hand=True,
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT="1",
        DMLC_NUM_WORKER="7",
        DMLC_NUM_SERVER="1",
    ) as job:
        statuses, output = job.wait()
        assert (
            statuses == [1, 1]
            and output.count("DMLC_NUM_WORKER=7, but torchrun has 1 machines") == 2
        ), output[-20000:]


pytestmark = pytest.mark.timeout(300)
