"""``python -m bpsx.launch.selftest``: a worker of the job that ``bpsx-run doctor`` runs.

Prints one line of JSON: whether sums are right, and times.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import bpsx

_SMALL, _LARGE = 1024, 4 << 20  # float32 elements: 4 KiB and 16 MiB
_ROUNDS = 20


def _exchange(name: str, elements: int) -> tuple[bool, float]:
    """Run push_pulls; returns whether all sums were right, and the median seconds of one."""
    rng = np.random.default_rng(elements)  # the same on all workers
    every = sum(range(1, bpsx.size() + 1))
    right, times = True, []
    for _ in range(_ROUNDS):
        # Whole numbers, so that sums are exact.
        part = rng.integers(-1000, 1000, elements).astype(np.float32)
        tensor = part * np.float32(bpsx.rank() + 1)
        start = time.perf_counter()
        total = bpsx.push_pull(tensor, name=name, average=False)
        times.append(time.perf_counter() - start)
        right = right and bool(np.array_equal(total, part * np.float32(every)))
    return right, sorted(times)[_ROUNDS // 2]


def main() -> int:
    """Run the self-test; returns 0 if every sum was right, else 1."""
    start = time.perf_counter()
    bpsx.init()
    joined = time.perf_counter() - start
    small, small_time = _exchange("small", _SMALL)
    large, large_time = _exchange("large", _LARGE)
    bpsx.shutdown()
    print(
        json.dumps(
            {
                "right": small and large,
                "init_seconds": round(joined, 3),
                "push_pull_4_KiB_us": round(small_time * 1e6, 1),
                "push_pull_16_MiB_ms": round(large_time * 1e3, 2),
            }
        ),
        flush=True,
    )
    return 0 if small and large else 1


if __name__ == "__main__":
    sys.exit(main())
