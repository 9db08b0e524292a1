"""GPU tensors over RDMA, in the emulated machine of tests/machine: pushes are sent from pinned
memory, and replies are written into it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.test_rdma import RDMA, with_rdma
from gpus.machines import gpu_run

# Several rounds of several tensors, so that tensors reuse each other's pinned memory; the last ones
# have another size.
SUMS = """
bpsx.init()
r, n = bpsx.rank(), bpsx.size()
for step in range(4):
    sizes = [100_000, 100_000, 50_001] if step < 3 else [70_000, 120_000, 20_000]
    drawn = [
        [draw("float32", size, w, 10 * step + i) for w in range(n)] for i, size in enumerate(sizes)
    ]
    arrays = [PretendArray(parts[r], main) for parts in drawn]
    handles = [push_pull(f"{i} {a.nbytes}", a) for i, a in enumerate(arrays)]
    for handle in handles:
        handle.wait(240)
    for parts, array in zip(drawn, arrays):
        assert near(array.get(), parts, False), step
endpoint = verbs.session()._endpoint
report(getattr(endpoint, "copied", 0))
bpsx.shutdown()
assert not cuda.alive("pinned") and not cuda.alive("registered")
"""


@with_rdma
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1)], ids=lambda s: "{}x{}/{}".format(*s))
def test_over_rdma_pinned_memory_is_not_copied(shape: tuple[int, int, int], pretend: Path) -> None:
    found = gpu_run(SUMS, pretend, *shape, env=RDMA)
    assert found == [[0]] * (shape[0] * shape[1])


@with_rdma
def test_over_rdma_pushes_of_a_job_that_survives_deaths_are_not_copied(pretend: Path) -> None:
    """Replies are not written over them, but stay where they arrive until the core reads them."""
    elastic = {"BPSX_ELASTIC": "servers", "BPSX_ELASTIC_WAIT": "60"}
    assert gpu_run(SUMS, pretend, 2, 1, 1, env={**RDMA, **elastic}) == [[0]] * 2
