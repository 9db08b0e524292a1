"""Scripts that say no more than ``init_process_group`` or ``init()``, under bpsx-run and under torchrun; and what is left when they die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch_job import launch

DEADLINE = 120

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
        print("worked:", backend, bps.rank(), bps.size(), flush=True)
"""

PLACES = """
    import json, os
    import torch
    import bpsx.torch as bps
    from bpsx.api import session

    for turn in range(2):
        bps.init()
        bps.init()
        config = session().config
        total = bps.push_pull(torch.ones(2), average=False)[0].item()
        print("PLACE", json.dumps([turn, int(os.environ["RANK"]), bps.rank(), bps.size(), bps.local_rank(), bps.local_size(), config.num_worker,
                                   config.servers, bool(config.secret), total]), flush=True)
        bps.shutdown()
"""

DYING = """
    import os, signal, sys
    import torch
    import bpsx.torch as bps

    if sys.argv[1] == "before" and os.environ["RANK"] == "1":
        print("READY", os.getpid(), flush=True)
        signal.pause()
    print("READY", os.getpid(), flush=True)
    bps.init()
    bps.push_pull(torch.ones(2))
    print("READY again", flush=True)
    if os.environ["RANK"] == "0" or sys.argv[1] != "raises":
        while True:
            bps.push_pull(torch.ones(2), name="x")
    raise ValueError("worker 1 has had enough")
"""


class Torchrun:
    """A torchrun for each of ``machines`` machines, which are this one; leaving the block ends what is left of them."""

    def __init__(self, folder: Path, source: str, *arguments: str, each: tuple[int, ...] = (2,), **environment: str) -> None:
        script = folder / "script.py"
        script.write_text(textwrap.dedent(source))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_", "PS_"))}
        if "BPSX_CACHE_DIR" in os.environ:
            clean["BPSX_CACHE_DIR"] = os.environ["BPSX_CACHE_DIR"]
        # What of ours is still there is found by this.
        self.mark = f"BPSX_TEST_MARK={folder}"
        env = {**clean, "OMP_NUM_THREADS": "1", "BPSX_RENDEZVOUS_TIMEOUT": "60", "BYTEPS_SOCKET_PATH": str(folder), **environment}
        env[self.mark.partition("=")[0]] = str(folder)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        where = ["--standalone"] if len(each) == 1 else ["--master-addr", "127.0.0.1", "--master-port", port, "--nnodes", str(len(each))]
        self.agents = [
            subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *where, *(["--node-rank", str(i)] if len(each) > 1 else []),
                              "--nproc-per-node", str(n), str(script), *arguments],
                             env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=folder)
            for i, n in enumerate(each)]

    def __enter__(self) -> Torchrun:
        return self

    def wait(self) -> tuple[list[int], str]:
        """Exit statuses and all output. The output ends when the last process that writes to it has ended: ours, too."""
        texts = [agent.communicate(timeout=DEADLINE)[0] for agent in self.agents]
        return [agent.returncode for agent in self.agents], "".join(texts)

    def left(self) -> list[str]:
        """Command lines of processes of this test that are there."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            if agent.stdout is not None:
                agent.stdout.close()
            agent.wait()


def places(text: str) -> list[list[Any]]:
    return sorted(json.loads(line.partition("PLACE ")[2]) for line in text.splitlines() if "PLACE " in line)


# ---- under bpsx-run

def test_init_process_group_alone_under_bpsx_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(GROUPS))
    status, output = launch([sys.executable, str(script), "bpsx", "gloo", "cpu:bpsx"], workers=2, servers=1, processes=2)
    assert status == 0, output[-3000:]
    for backend in ("bpsx", "gloo", "cpu:bpsx"):
        for rank in range(4):
            assert f"worked: {backend} {rank} 4" in output


def test_pytorchs_own_variables_come_first(tmp_path: Path) -> None:
    """A user who has set them up under bpsx-run gets the store that they name."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import torch.distributed as dist
        import bpsx.torch as bps

        dist.init_process_group("bpsx", rank=int(__import__("os").environ["DMLC_WORKER_ID"]), world_size=2)
        print("store:", type(dist.distributed_c10d._get_default_store().underlying_store.underlying_store).__name__,
              dist.distributed_c10d._get_default_store().underlying_store.underlying_store.port, flush=True)
        dist.barrier()
    """))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    status, output = launch([sys.executable, str(script)], workers=2, servers=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert status == 0, output[-3000:]
    assert output.count(f"store: TCPStore {port}") == 2


# ---- under torchrun

def test_torchrun_on_one_machine(tmp_path: Path) -> None:
    """Twice in a process: a scheduler for each, no server, and nothing is left."""
    with Torchrun(tmp_path, PLACES) as job:
        statuses, output = job.wait()
        assert statuses == [0], output[-3000:]
        assert places(output) == [[turn, rank, rank, 2, rank, 2, 1, 0, True, 2.0] for turn in range(2) for rank in range(2)]
        assert not job.left()


def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    with Torchrun(tmp_path, PLACES, each=(2, 2)) as job:
        statuses, output = job.wait()
        assert statuses == [0, 0], output[-3000:]
        assert places(output) == [[turn, rank, rank, 4, rank % 2, 2, 2, 2, True, 4.0] for turn in range(2) for rank in range(4)]
        assert not job.left()


def test_torchrun_with_uneven_machines(tmp_path: Path) -> None:
    """Each process becomes a machine of its own; rank() is RANK all the same."""
    with Torchrun(tmp_path, PLACES, each=(2, 1)) as job:
        statuses, output = job.wait()
        assert statuses == [0, 0], output[-3000:]
        assert places(output) == [[turn, rank, rank, 3, 0, 1, 3, 3, True, 3.0] for turn in range(2) for rank in range(3)]
        assert "machine of its own" in output and not job.left()


def test_the_backend_and_gloo_under_torchrun(tmp_path: Path) -> None:
    with Torchrun(tmp_path, GROUPS.replace("range(2)", "range(1)"), "bpsx", BYTEPS_FORCE_DISTRIBUTED="1") as job:
        statuses, output = job.wait()
        assert statuses == [0], output[-3000:]
        assert all(f"worked: bpsx {rank} 2" in output for rank in range(2)) and not job.left()


def test_a_single_process_needs_nothing(tmp_path: Path) -> None:
    with Torchrun(tmp_path, PLACES, each=(1,)) as job:
        statuses, output = job.wait()
        assert statuses == [0], output[-3000:]
        assert places(output) == [[turn, 0, 0, 1, 0, 1, 1, 0, False, 1.0] for turn in range(2)]


@pytest.mark.parametrize("when", ["before", "running"])
def test_killed_workers_leave_nothing(tmp_path: Path, when: str) -> None:
    """torchrun and all workers are killed; what they had started sees that by itself. Before the job has begun and after."""
    with Torchrun(tmp_path, DYING, when, each=(2,), BYTEPS_FORCE_DISTRIBUTED="1", BYTEPS_LOG_LEVEL="info") as job:
        stream = job.agents[0].stdout
        assert stream is not None
        workers, seen = [], ""
        wanted = "listening on" if when == "before" else "READY again"
        for line in stream:
            seen += line
            if "READY" in line and "again" not in line:
                workers.append(int(line.split()[-1]))
            if len(workers) == 2 and wanted in seen:
                break
        assert len(workers) == 2, seen
        for process in [job.agents[0].pid, *workers]:
            os.kill(process, signal.SIGKILL)
        # Its end comes when the scheduler and the server, too, have closed it.
        rest = stream.read()
        assert any("bpsx.rendezvous" in text for text in job.left()) is False, job.left()
        assert not job.left()
        assert "the end of the worker that had started it" in rest if when == "before" else "is gone" in rest, rest


def test_a_worker_that_raises_ends_the_job(tmp_path: Path) -> None:
    with Torchrun(tmp_path, DYING, "raises") as job:
        statuses, output = job.wait()
        assert statuses != [0] and "worker 1 has had enough" in output
        assert not job.left()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """The user's own scheduler: its variables are used, and have to fit torchrun's machines."""
    with Torchrun(tmp_path, "import bpsx.torch as bps\nbps.init()", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT="1", DMLC_NUM_WORKER="7",
                  DMLC_NUM_SERVER="1") as job:
        statuses, output = job.wait()
        assert statuses == [1] and "DMLC_NUM_WORKER=7, but torchrun has 1 machines" in output, output[-3000:]


pytestmark = pytest.mark.timeout(300)
