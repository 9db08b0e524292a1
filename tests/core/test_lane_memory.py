"""Between rounds a lane keeps only a record per key, not the round's memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from core.test_lane import Rig
from core.test_lane_compressed import PACKED, register

#: Number of shapes, each pushed once, as by a script whose batches differ in length.
SHAPES = 2000
NBYTES = 30_000
#: Bound per key: a record with its name, plus room for malloc and the test itself.
MOST_BYTES = 5_000


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def plain(rig: Rig, slot: int, dtype: str) -> None:
    rig.register(slot, NBYTES, dtype)
    for rank in range(len(rig.workers)):
        rig.push(rank, slot, bytes(NBYTES), dtype=dtype)


def broadcast(rig: Rig, slot: int) -> None:
    rig.register(slot, NBYTES)
    rig.push(0, slot, bytes(NBYTES), divisor=0, flags=2)
    rig.push(1, slot, b"", divisor=0, flags=2)


def compressed(rig: Rig, slot: int) -> None:
    register(rig, slot, {"compressor": "half"}, nbytes=NBYTES)
    wire = np.ones(NBYTES // 4, np.float16).tobytes()
    for rank in range(len(rig.workers)):
        rig.push(rank, slot, wire, flags=PACKED, divisor=2)


CASES: dict[str, tuple[int, Callable[[Rig, int], None], int]] = {
    "float32": (2, lambda rig, slot: plain(rig, slot, "float32"), MOST_BYTES),
    "float16 of three workers": (3, lambda rig, slot: plain(rig, slot, "float16"), MOST_BYTES),
    "broadcast": (2, broadcast, MOST_BYTES),
    # Besides the record: buffers for encoded data, half of the tensor.
    "compressed": (2, compressed, NBYTES // 2 + 2 * MOST_BYTES),
}


def growth(case: str) -> float:
    """Return the bytes by which each new shape makes this process grow.

    Must run in a process of its own, as other processes have free memory to reuse.
    """
    workers, one_round, _ = CASES[case]
    rig = Rig(workers)

    def push(slots: range) -> None:
        for slot in slots:
            one_round(rig, slot)
            for rank in range(workers):
                assert rig.take(rank)[0].key == slot + 100

    try:
        push(range(200))  # fill the C library's own free lists
        before = resident()
        push(range(200, 200 + SHAPES))
        return (resident() - before) / SHAPES
    finally:
        rig.close()


@pytest.mark.parametrize("case", CASES)
def test_a_round_leaves_no_buffer_behind(case: str) -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import core.test_lane_memory as m;"
        f" print(m.growth({case!r}))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.PIPE, text=True
    ).stdout
    assert float(told) < CASES[case][2]
