"""Scripts that pass rank and world_size to ``init_process_group``: with a URL, a store, or another
backend's store.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frameworks.test_torch_places import free_port, reports, run

INIT = {
    "tcp": (
        'dist.init_process_group("bpsx", rank=rank, world_size=2,'
        ' init_method=f"tcp://127.0.0.1:{port}")'
    ),
    "environment": (
        'os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)\n'
        'dist.init_process_group("bpsx", rank=rank, world_size=2)'
    ),
    "store": (
        'store = dist.TCPStore("127.0.0.1", int(port), 2, rank == 0)\n'
        'dist.init_process_group("bpsx", rank=rank, world_size=2, store=store)'
    ),
    "file": (
        'dist.init_process_group("bpsx", rank=rank, world_size=2,'
        ' store=dist.FileStore(os.environ["BYTEPS_SOCKET_PATH"] + "/store", 2))'
    ),
    "another backend": (
        'dist.init_process_group("gloo", rank=rank, world_size=2,'
        ' init_method=f"tcp://127.0.0.1:{port}")\nbps.init()'
    ),
}
WORK = """
import os, sys
import torch, torch.distributed as dist
import bpsx.torch as bps

rank, port = int(os.environ["TEST_RANK"]), os.environ["TEST_PORT"]
{init}
total = torch.ones(2)
dist.all_reduce(total)
report([bps.rank(), bps.size(), bps.local_rank(), bps.local_size(), total.tolist()])
dist.barrier()
dist.destroy_process_group()
report(bps.push_pull(torch.ones(1), name="x", average=False).tolist())
bps.suspend()
bps.resume(1, 0)
report(bps.push_pull(torch.ones(1), name="x", average=False).tolist())
bps.shutdown()
bps.init()
report(bps.size())
"""
LATE = """
import os
import torch, torch.distributed as dist
import bpsx
import bpsx.torch as bps

bps.init()
group = dict(
    rank=int(os.environ["TEST_RANK"]),
    world_size=2,
    init_method=f"tcp://127.0.0.1:{os.environ['TEST_PORT']}",
)
dist.init_process_group("gloo", **group)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model.register_comm_hook(None, bps.ddp_comm_hook)
try:
    model(torch.ones(1, 2)).sum().backward()
except (RuntimeError, bpsx.ConfigError) as e:
    report(str(e))
dist.destroy_process_group()
# a store that stays open when a process ends
group["init_method"] = "file://" + os.environ["BYTEPS_SOCKET_PATH"] + "/store"
try:
    dist.init_process_group("bpsx", **group)
except bpsx.ConfigError as e:
    report(str(e))
"""
SPAWN = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing
import bpsx.torch as bps

def work(rank, port):
    dist.init_process_group("bpsx", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    theirs = [torch.empty(1, 4) for _ in range(2)]
    dist.all_gather(theirs, model.module.weight.detach())
    assert theirs[0].equal(theirs[1])
    sys.stdout.write(f"EQUAL {rank}\\n")

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
"""


def two(source: str, folder: Path, **environment: str) -> list[object]:
    return reports(
        run(
            [{"TEST_RANK": str(rank)} for rank in range(2)],
            folder,
            source,
            TEST_PORT=free_port(),
            **environment,
        )
    )


@pytest.mark.parametrize("how", INIT)
def test_two_meet_at_the_store(tmp_path, how):
    """Also after suspend, and after shutdown, when the process group no longer exists."""
    expected = [[[rank, 2, rank, 2, [2.0, 2.0]], [2.0], [2.0], 2] for rank in range(2)]
    assert two(WORK.replace("{init}", INIT[how]), tmp_path) == [
        report for worker in expected for report in worker
    ]


def test_the_scripts_arguments_override_other_launchers(tmp_path):
    """As in PyTorch's imagenet example, where RANK counts machines."""
    assert two(WORK.replace("{init}", INIT["tcp"]), tmp_path, RANK="0", WORLD_SIZE="1")[0] == [
        0,
        2,
        0,
        2,
        [2.0, 2.0],
    ]


def test_a_job_of_one_under_a_group_of_two_is_refused(tmp_path):
    """bpsx.torch.init() ran before init_process_group, so it could not know the size."""
    for told in zip(*[iter(two(LATE, tmp_path))] * 2, strict=True):
        assert (
            "ddp_comm_hook: bpsx's job is this process alone, but PyTorch's process group has 2"
            in told[0]
        )
        assert (
            "Call init_process_group before bpsx.torch.init" in told[0]
            and "call init_process_group before bpsx.torch.init" in told[1]
        )


def test_spawned_by_the_script(tmp_path):
    """Processes started by the children end with them."""
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "BYTEPS_"))}
    done = subprocess.run(
        [sys.executable, str(script), free_port()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**clean, "BYTEPS_SOCKET_PATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and all(f"EQUAL {rank}" in done.stdout for rank in range(2)), (
        done.stdout + done.stderr
    )


pytestmark = pytest.mark.timeout(240)
