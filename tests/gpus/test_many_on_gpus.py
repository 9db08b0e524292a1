"""Many threads, streams, names, priorities and rounds at once, in another order on each process.

The order of NCCL calls must be the same on all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import gpu_job, gpu_run

# The pretend NCCL aborts the process where the ranks of a communicator queue different collectives.
CHAOS = """
import threading

bpsx.init()
r, n = bpsx.rank(), bpsx.size()
SIZES = [0, 1, 300, 5000, 70_000, 200_000]
failures = []


def one(thread):
    cuda.enter()
    streams = [cuda.stream(), cuda.stream()]
    names = [(f"{thread}.{size}", size) for size in SIZES]
    # Two tensors of a name: several of its rounds are under way at once.
    arrays = [
        [PretendArray(np.zeros(size, np.float32), streams[k % 2]) for k in range(2)]
        for _, size in names
    ]
    rng = np.random.default_rng([r, thread])
    for step in range(4):
        handles = []
        for i in rng.permutation(len(names)):
            name, size = names[i]
            for k in range(2):
                arrays[i][k].set(np.full(size, r + 1 + 10 * k + step, np.float32))
                handles.append(
                    push_pull(
                        name, arrays[i][k], stream=streams[k], priority=int(rng.integers(-3, 3))
                    )
                )
                if (thread + i + k + step) % 3 == 0:
                    handles.append(
                        broadcast(
                            f"b{name}.{k}.{step}",
                            PretendArray(np.zeros(size, np.float32), main),
                            step % n,
                            stream=streams[k],
                        )
                    )
                else:
                    handles.append(None)
        for j in rng.permutation(len(handles)):
            if handles[j] is not None:
                handles[j].wait(60)
        for i, (_, size) in enumerate(names):
            for k in range(2):
                want = sum(w + 1 + 10 * k + step for w in range(n))
                if not (arrays[i][k].get() == want).all():
                    failures.append((thread, step, size, k, arrays[i][k].get()[:3].tolist(), want))


def guarded(thread):
    try:
        one(thread)
    except BaseException as e:
        failures.append(repr(e))


threads = [threading.Thread(target=guarded, args=(t,)) for t in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failures, failures[:3]
assert cuda.pageable() == cuda.straddling() == 0
bpsx.shutdown()
report("done")
"""

LAYOUTS = {
    "2x2/1": ((2, 2, 1), {}),
    "1x3/0 slow": ((1, 3, 0), {"PRETEND_DELAY_US": 200}),
    "1x4/1 switches slow": ((1, 4, 1), {"BYTEPS_PCIE_SWITCH_SIZE": 2, "PRETEND_DELAY_US": 100}),
    "1x3/1 roots": ((1, 3, 1), {"BYTEPS_REDUCE_ROOTS": "0,2"}),
    "1x3/1 groups of 16": (
        (1, 3, 1),
        {"BYTEPS_NCCL_GROUP_SIZE": 16, "BYTEPS_PARTITION_BYTES": 65536},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_of_requests_gives_one_order_of_collectives(layout: str, pretend: Path) -> None:
    shape, env = LAYOUTS[layout]
    assert gpu_run(CHAOS, pretend, *shape, env=env) == [["done"]] * (shape[0] * shape[1])


VALUES = """
import os

bpsx.init()
r, n = bpsx.rank(), bpsx.size()
seed = 0
for dtype in ["float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8"]:
    for size in (0, 1, 1009, 65536 * 4 // 4 + 3, 300_001):
        seed += 1
        parts = [draw(dtype, size, w, seed) for w in range(n)]
        average = average_of(dtype) and seed % 2 == 0
        x, b = PretendArray(parts[r], main), PretendArray(parts[r], main)
        handles = [push_pull(f"x{seed}", x, average=average), broadcast(f"b{seed}", b, seed % n)]
        [h.wait(60) for h in handles]
        assert near(x.get(), parts, average), (
            dtype,
            size,
            average,
            x.get()[:4],
            reference(parts, average)[:4],
        )
        assert (b.get() == parts[seed % n]).all(), (dtype, size)
assert cuda.pageable() == cuda.straddling() == 0
bpsx.shutdown()
"""


@pytest.mark.parametrize(
    ("shape", "env"),
    [
        ((1, 4, 1), {"BYTEPS_PCIE_SWITCH_SIZE": 2}),
        ((1, 3, 1), {"BYTEPS_PCIE_SWITCH_SIZE": 1}),
        ((1, 3, 1), {"BYTEPS_REDUCE_ROOTS": "0,1", "BYTEPS_PARTITION_BYTES": 262144}),
    ],
    ids=["switches", "a switch each", "roots"],
)
def test_layouts_of_a_machine(
    shape: tuple[int, int, int], env: dict[str, object], pretend: Path
) -> None:
    gpu_run(VALUES, pretend, *shape, env=env)


def test_averages_of_halves_do_not_overflow_on_their_way(pretend: Path) -> None:
    source = """
        bpsx.init()
        for size in (1000, 400_000):
            x = PretendArray(np.full(size, 60000, np.float16), main)
            push_pull(f"x{size}", x, average=True).wait(60)
            assert (x.get() == 60000).all(), x.get()[:3]
        bpsx.shutdown()
    """
    gpu_run(source, pretend, 1, 4, 1, env={"BYTEPS_PCIE_SWITCH_SIZE": 2})
    gpu_run(source, pretend, 1, 3, 0)


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1)], ids=lambda s: "{}x{}/{}".format(*s))
def test_memory_is_bounded_and_comes_back(shape: tuple[int, int, int], pretend: Path) -> None:
    """Broadcasts a model's weights once; then rounds must allocate nothing new; then the session
    ends, but the GPU's context stays.
    """
    gpu_run(
        """
        import gc, resource
        bpsx.init()
        for i in range(40):
            broadcast(f"b{i}", PretendArray(np.full(400_000, i, np.float32), main), 0).wait(60)
        pinned = cuda.alive("pinned") + cuda.alive("registered")
        assert pinned <= 2, pinned
        x = PretendArray(np.ones(3000, np.float32), main)
        def rounds(n):
            for i in range(n):
                push_pull("x", x).wait(60)
            x.get()
            x.set(np.ones(3000, np.float32))
            return cuda.alive("events"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rounds(50)
        before, after = rounds(100), rounds(2000)
        assert after[0] <= before[0] + 4 and after[1] <= before[1] + 1000, (before, after)
        assert cuda.alive("pinned") + cuda.alive("registered") == pinned
        assert cuda.pageable() == cuda.straddling() == 0
        bpsx.shutdown()
        left = {what: cuda.alive(what) for what in ("pinned", "registered", "events")}
        assert not any(left.values()) and cuda.alive("streams") == cuda.alive("contexts") == 1, left
    """,
        pretend,
        *shape,
    )


def test_a_job_that_comes_back_finds_its_gpus_again(pretend: Path) -> None:
    """Memory that the first session had pinned may overlap with the second session's memory."""
    with gpu_job(
        """
        bpsx.init()
        def step(k):
            for size in (1000, 400_000):
                x = PretendArray(np.full(size, bpsx.rank() + k, np.float32), main)
                push_pull(f"x{size}", x).wait(60)
                assert (x.get() == 1 + 2 * k).all(), x.get()[:3]
        step(1)
        bpsx.suspend()
        assert cuda.alive("pinned") == cuda.alive("registered") == cuda.alive("events") == 0
        print("suspended", flush=True)
        sys.stdin.readline()
        bpsx.resume(1, 1)
        step(2)
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        1,
    ) as job:
        for worker in job.workers:
            worker.wait_for_line("suspended")
        assert job.scheduler is not None
        old = [job.scheduler, *job.servers]
        assert [p.wait() for p in old] == [0, 0]
        for p in old:
            p.end()
        port, job.servers = int(job.port), []
        job.start_scheduler(port)
        job.start_server(0)
        for worker in job.workers:
            worker.say("")
        job.results()
