"""What a lane keeps of a key between its rounds: a record, and none of the round's memory."""

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

#: Shapes that are pushed once each, as by a script whose batches differ in length.
SHAPES = 2000
NBYTES = 30_000
#: Of a record with its name, with room for what malloc and the test itself need.
MOST_BYTES = 5_000


def resident() -> int:
    """Bytes of this process in memory."""
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
    # Besides the record, buffers for what is encoded: half of the tensor.
    "compressed": (2, compressed, NBYTES // 2 + 2 * MOST_BYTES),
}


def growth(case: str) -> float:
    """By how much a shape makes this process grow, in bytes.

    Only of a process of its own: others have memory to spare.
    """
    workers, one_round, _ = CASES[case]
    rig = Rig(workers)

    def push(slots: range) -> None:
        for slot in slots:
            one_round(rig, slot)
            for rank in range(workers):
                assert rig.take(rank)[0].key == slot + 100

    try:
        push(range(200))  # the C library's own stores fill
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
