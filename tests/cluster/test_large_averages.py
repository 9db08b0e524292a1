"""Averages of half types near their maximum, where their sums overflow: in servers and on machines
of several processes.
"""

from __future__ import annotations

import pytest

from support.jobs import Job

WORKER = """
    import bpsx, ml_dtypes, numpy as np

    bpsx.init()
    for dtype in (ml_dtypes.bfloat16, np.float16):
        large = float(ml_dtypes.finfo(dtype).max)
        for n in (5, 20_001):
            found = bpsx.push_pull(
                np.full(n, large, dtype), f"{np.dtype(dtype).name} {n}", average=True
            )
            report(bool((found.astype(float) == large).all()))
    bpsx.shutdown()
"""


@pytest.mark.parametrize(
    ("workers", "servers", "processes"), [(2, 1, 1), (3, 1, 1), (2, 0, 2), (4, 1, 2)]
)
def test_averages_near_the_maximum_are_finite(workers: int, servers: int, processes: int) -> None:
    with Job(WORKER, workers, servers, processes=processes) as job:
        assert job.results() == [[True] * 4] * workers
