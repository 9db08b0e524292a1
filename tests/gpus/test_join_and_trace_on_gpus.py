"""join() of processes with GPUs, compression on the wire, and timelines."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import gpu_job, gpu_run
from support.traces import load

# Each worker pushes for its number of steps in COUNTS, and knows which workers are left.
UNEVEN = """
import json, os

bpsx.init()
r, n = bpsx.rank(), bpsx.size()
for size in (10, 300_000):
    push_pull(f"x{size}", PretendArray(np.ones(size, np.float32), main)).wait(60)
for counts in json.loads(os.environ["COUNTS"]):
    for step in range(counts[r]):
        here = [w for w in range(n) if counts[w] > step]
        for size in (10, 300_000):
            a, b = (PretendArray(np.full(size, w, np.float32), main) for w in (r + 1, 4 * n))
            new = PretendArray(np.full(size, r, np.int64), main)
            handles = [
                push_pull(f"x{size}", a),
                push_pull(f"x{size}", b, average=True),
                push_pull(f"new {counts} {step} {size}", new),
            ]
            [h.wait(60) for h in handles]
            assert (a.get() == sum(w + 1 for w in here)).all(), (counts, step, size, a.get()[:3])
            assert (b.get() == 4 * len(here)).all(), (counts, step, size, b.get()[:3])
            assert (new.get() == sum(here)).all(), (counts, step, size, new.get()[:3])
    bpsx.join()
push_pull("x10", PretendArray(np.ones(10, np.float32), main)).wait(60)
bpsx.shutdown()
"""


@pytest.mark.parametrize(
    ("shape", "env", "counts"),
    [
        ((1, 3, 0), {}, [[3, 1, 2], [1, 2, 0], [0, 0, 2]]),
        ((2, 2, 1), {}, [[2, 1, 0, 3], [1, 1, 2, 0]]),
        ((1, 4, 1), {"BYTEPS_PCIE_SWITCH_SIZE": 2}, [[1, 2, 1, 2], [2, 0, 2, 0]]),
    ],
    ids=["alone", "2x2", "switches"],
)
def test_join_while_others_continue(
    shape: tuple[int, int, int], env: dict[str, object], counts: list[list[int]], pretend: Path
) -> None:
    gpu_run(UNEVEN, pretend, *shape, env={**env, "COUNTS": str(counts)})


def test_a_process_that_joins_before_its_first_tensor_is_named(pretend: Path) -> None:
    """NCCL cannot start without the joined process; after all have joined it can."""
    gpu_run(
        """
        bpsx.init()
        x = PretendArray(np.ones(1000, np.float32), main)
        bpsx.join()
        # as if it did not know yet that all have joined: the other process, which knows, waits
        if bpsx.rank() == 0:
            verbs.session()._near.machine.put_notice(b'{"rests": 0}')
            bpsx.push_pull(np.ones(1), "begun")
            push_pull("x", x).wait(60)
        else:
            handle = push_pull("x", x)
            bpsx.push_pull(np.ones(1), "begun")
            handle.wait(60)
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        0,
    )
    with gpu_job(
        """
        bpsx.init()
        if bpsx.rank() == 0:
            bpsx.join()
        else:
            text = ask(push_pull("x", PretendArray(np.ones(1000, np.float32), main)))
            assert text.startswith(
                "DeviceError: local rank 0 called join() before its first tensor on a GPU"
            ), text
            report("told")
    """,
        pretend,
        1,
        2,
        0,
    ) as job:
        job.workers[1].wait()
        assert job.workers[1].reports() == ["told"], job.workers[1].text()


ALL = [
    "COORDINATE_REDUCE",
    "REDUCE",
    "COPYD2H",
    "COORDINATE_PUSH",
    "COPYH2D",
    "COORDINATE_BROADCAST",
    "BROADCAST",
]


@pytest.mark.parametrize(
    ("shape", "env", "root", "member"),
    [
        ((2, 1, 1), {}, ["COPYD2H", "PUSH", "PULL", "COPYH2D"], None),
        ((1, 2, 0), {}, ["COORDINATE_REDUCE", "REDUCE"], ["COORDINATE_REDUCE", "REDUCE"]),
        ((1, 2, 1), {}, [*ALL, "PUSH", "PULL"], ALL),
        ((1, 4, 1), {"BYTEPS_PCIE_SWITCH_SIZE": 2}, [*ALL, "PCIE_REDUCE", "PUSH", "PULL"], ALL),
    ],
    ids=["direct", "alone", "machine", "switches"],
)
def test_a_timeline_has_every_stage(
    shape: tuple[int, int, int],
    env: dict[str, object],
    root: list[str],
    member: list[str] | None,
    pretend: Path,
    tmp_path: Path,
) -> None:
    n = shape[0] * shape[1]
    gpu_run(
        """
        bpsx.init()
        arrays = [PretendArray(np.ones(size, np.float32), main) for size in (1000, 300_000)]
        for step in range(4):
            for h in [push_pull(f"x{i}", a) for i, a in enumerate(arrays)]:
                h.wait(60)
        bpsx.shutdown()
    """,
        pretend,
        *shape,
        env={
            "BYTEPS_TRACE_ON": 1,
            "BYTEPS_TRACE_START_STEP": 2,
            "BYTEPS_TRACE_END_STEP": 3,
            "PRETEND_DELAY_US": 2000,
            **env,
        },
        worker_env={i: {"BYTEPS_TRACE_DIR": str(tmp_path / str(i))} for i in range(n)},
    )
    for i in range(n):
        [path] = (tmp_path / str(i)).rglob("comm.json")
        events = [e for e in load(path) if e["ph"] == "X" and e["tid"] != "total"]
        stages = {e["name"].rpartition(".")[2] for e in events}
        wanted = root if i % shape[1] == shape[1] - 1 else member
        assert wanted is not None and stages == set(wanted), (i, stages)
        # A stage ends when the GPU has finished it; the pretend GPU is slow on purpose.
        slow = [
            e["dur"]
            for e in events
            if e["name"].rpartition(".")[2] in ("REDUCE", "COPYH2D") and "x1" in e["name"]
        ]
        assert slow and min(slow) >= 1500, slow


def test_compressed_on_its_way(pretend: Path) -> None:
    """Compression loses the same bits as on the host, so the sums are equal."""
    gpu_run(
        """
        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        for kind, params in {
            "onebit": {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
            "topk": {"compressor": "topk", "k": 0.01},
        }.items():
            for place in ("gpu", "host"):
                bpsx.declare(f"{kind} {place}", params)
            for step in range(3):
                # With integers sums are exact in any order.
                given = (
                    np.random.default_rng([step, r]).integers(-50, 50, 300_000).astype(np.float32)
                )
                a, b = PretendArray(given, main), given.copy()
                handles = [
                    push_pull(f"{kind} gpu", a, average=True),
                    push_pull(f"{kind} host", b, average=True),
                ]
                [h.wait(60) for h in handles]
                assert b.any() and (a.get() == b).all(), (kind, step, a.get()[:5], b[:5])
        bpsx.shutdown()
    """,
        pretend,
        2,
        2,
        1,
    )
