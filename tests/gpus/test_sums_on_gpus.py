"""push_pull and broadcast of tensors on GPUs against NumPy in float64: every layout of machines,
processes and servers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import gpu_run

# With partitions of 8192 bytes, parts of a share are small and belong to one GPU; with 4 MB, large
# tensors have a share per GPU.
SUMS = """
import os

bpsx.init()
r, n = bpsx.rank(), bpsx.size()
DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8"]
small = os.environ.get("BYTEPS_PARTITION_BYTES") == "8192"
SIZES = [0, 1, 2047, 2049, 5003] if small else [1009, 16384 * n + 1, 1048576 + 5]
for step in range(2):
    for k, size in enumerate(SIZES):
        for i, dtype in enumerate(DTYPES if k % 2 or small else DTYPES[:1]):
            seed = 1000 * step + 10 * k + i
            parts = [draw(dtype, size, w, seed) for w in range(n)]
            average = average_of(dtype) and step % 2 == 1
            x = PretendArray(parts[r], main)
            y = x if (step + i) % 2 else PretendArray(np.full_like(parts[r], 77), main)
            h = push_pull(f"{dtype} {size}", x, y, average=average)
            if i % 3 == 0:
                h.wait(60)
                assert near(y.get(), parts, average), (
                    dtype,
                    size,
                    average,
                    step,
                    y.get()[:4],
                    reference(parts, average)[:4],
                )
                if y is not x:
                    assert (x.get() == parts[r]).all()
            b = PretendArray(parts[r], main)
            root = (step + k + i) % n
            hb = broadcast(f"b {dtype} {size}", b, root)
            h.wait(60), hb.wait(60)
            assert near(y.get(), parts, average), (
                dtype,
                size,
                average,
                step,
                y.get()[:4],
                reference(parts, average)[:4],
            )
            assert (b.get() == parts[root]).all(), (dtype, size, root)
assert cuda.pageable() == cuda.straddling() == 0
bpsx.shutdown()
left = {what: cuda.alive(what) for what in ("pinned", "registered")}
assert not any(left.values()), left
report("done")
"""

SHAPES = [(1, 1, 0), (2, 1, 1), (3, 1, 2), (1, 2, 0), (1, 3, 0), (2, 2, 1), (2, 3, 2)]


@pytest.mark.parametrize(
    ("shape", "partition_bytes"),
    [(s, 8192) for s in SHAPES] + [((1, 2, 1), 4096000), ((2, 1, 1), 4096000)],
    ids=lambda s: "{}x{}/{}".format(*s) if isinstance(s, tuple) else str(s),
)
def test_sums_and_broadcasts(
    shape: tuple[int, int, int], partition_bytes: int, pretend: Path
) -> None:
    found = gpu_run(SUMS, pretend, *shape, env={"BYTEPS_PARTITION_BYTES": partition_bytes})
    assert found == [["done"]] * (shape[0] * shape[1])
