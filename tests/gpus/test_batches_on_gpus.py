"""Buckets: tensors that begin together, with one event."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import SHAPES, gpu_run, run

DTYPES = ["bfloat16", "float32", "int64"]

BATCH = """
from bpsx.plugin.adapter import Item


def begin(arrays, average=False, stream=None):
    items, on = (
        [Item(name, view(a)) for name, a in arrays.items()],
        main if stream is None else stream,
    )
    verbs.session().push_pull_all(items, 0, lambda: main, on, average=average)
    return [item.begun for item in items]
"""


# In each step, workers put the same tensors into different buckets; the order of each stream is
# kept.
SUMS = (
    BATCH
    + """
import contextlib, json, os

bpsx.init()
r, n = bpsx.rank(), bpsx.size()
for step in range(4):
    names = [
        f"{dtype} {size}" for dtype in json.loads(os.environ["DTYPES"]) for size in (0, 1, 40_001)
    ]
    own = {
        name: [draw(name.split()[0], int(name.split()[1]), w, step) for w in range(n)]
        for name in names
    }
    arrays = {name: PretendArray(own[name][r], main) for name in names}
    average = step % 2 == 1
    names = [name for name in names if not average or average_of(name)]
    if r % 2:
        names.reverse()
    cut = (step * 7 + r * 5) % len(names)
    with held(main) if step > 1 else contextlib.nullcontext():
        handles = {}
        for part in (names[:cut], names[cut:]):
            if part:
                handles |= dict(zip(part, begin({name: arrays[name] for name in part}, average)))
    for name in names:
        handles[name].wait(60)
    cuda.sync(main)
    for name in names:
        assert near(arrays[name].get(), own[name], average), (step, name)
bpsx.shutdown()
"""
)


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_are_summed_right_in_each_layout(shape: str, pretend: Path) -> None:
    gpu_run(
        SUMS,
        pretend,
        *SHAPES[shape],
        env={"DTYPES": str(DTYPES).replace("'", '"'), "BYTEPS_PARTITION_BYTES": 65536},
    )


def test_averages_of_integers_that_are_added_in_groups(pretend: Path) -> None:
    """NCCL queues a group's sums at the group's end, so the divisions must be queued after that."""
    run(
        BATCH,
        """
        bpsx.init()
        r, n = bpsx.rank(), bpsx.size()
        push_pull("first", PretendArray(np.ones(10, np.float32), main)).wait(60)
        gpu = verbs.session().devices._gpu
        for code, name in ((7, "int32"), (8, "int64")):
            gpu.take_divider(code, cuda.kernel(f"pretend_divide_{name}"), 64)
        for step in range(3):
            names = [f"{dtype} {i}" for dtype in ("int32", "float32", "int64") for i in range(5)]
            own = {
                name: [draw(name.split()[0], 20_000, w, step) for w in range(n)] for name in names
            }
            arrays = {name: PretendArray(own[name][r], main) for name in names}
            with held(main):
                handles = begin(arrays, average=True)
            for h in handles:
                h.wait(60)
            cuda.sync(main)
            for name in names:
                assert near(arrays[name].get(), own[name], True), (step, name)
        assert max(cuda.groups()) > 1, cuda.groups()
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        0,
    )


def test_a_stream_waits_for_an_event_unless_it_has_waited_for_a_later_one(pretend: Path) -> None:
    run(
        BATCH,
        """
        bpsx.init()
        other = cuda.stream()
        for step in range(3):
            arrays = {
                name: PretendArray(np.full(1000, bpsx.rank() + 1.0, np.float32), main)
                for name in "abcd"
            }
            handles = begin(arrays)
            if step:
                until(lambda: all(h.done() for h in handles))
                begun = cuda.count("cuStreamWaitEvent")
                for h in reversed(handles):
                    h.wait(60)
                once = cuda.count("cuStreamWaitEvent") - begun
                assert once <= 1, once
                moment = cuda.count("cuStreamWaitEvent")
                sink = PretendArray(np.zeros(1000, np.float32), other)
                push_pull("x", sink, stream=other).wait(60)  # waits on another stream
                handles[0].wait(60)  # needs a wait on the first stream again
                assert cuda.count("cuStreamWaitEvent") > moment
            [h.wait(60) for h in handles]
            cuda.sync(main)
            for a in arrays.values():
                assert (a.get() == 3).all()
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        0,
    )


def test_nothing_begins_on_a_stream_that_is_captured(pretend: Path) -> None:
    run(
        BATCH,
        """
        bpsx.init()
        arrays = {name: PretendArray(np.ones(10, np.float32), main) for name in "ab"}
        for _ in range(2):
            cuda.capture(main)
            assert "'a': its stream is being captured into a CUDA graph" in refused(
                lambda: begin(arrays)
            )
            cuda.capture(main, False)
            assert verbs.session()._core.outstanding == 0
            [h.wait(60) for h in begin(arrays)]
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        0,
    )


def test_a_tensor_that_cannot_begin_has_its_error_in_its_place(pretend: Path) -> None:
    run(
        BATCH,
        """
        bpsx.init()
        arrays = {
            "a": PretendArray(np.ones(10, np.float32), main),
            "n" * 5000: PretendArray(np.ones(10, np.float32), main),
            "i": PretendArray(np.ones(10, np.int8), main),
            "b": PretendArray(np.ones(10, np.float32), main),
        }
        for _ in range(2):
            a, long, small, b = begin(arrays, average=True)
            assert "must be a string of 1 to 4096 bytes" in str(
                long
            ) and "cannot be averaged on GPUs" in str(small), (long, small)
            a.wait(60), b.wait(60)
        cuda.sync(main)
        assert (arrays["a"].get() == 1).all() and (arrays["b"].get() == 1).all()
        bpsx.shutdown()
    """,
        pretend,
        1,
        2,
        0,
    )


# PyTorch has no GPU here, so tensors on the CPU stand for tensors of the pretend GPU. The tests
# wait for work on its streams themselves.
