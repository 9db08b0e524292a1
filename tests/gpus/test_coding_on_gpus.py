"""Gradients compressed on the GPU, by the CUDA kernels on Numba's simulator: the results equal
those of the host's compressors.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import SIMULATED, gpu_job
from support.jobs import DEADLINE

WORKER = """
    bpsx.init()
    r = bpsx.rank()
    # name, element type, compression: known and unknown sizes, halves, a residual, momentum, a
    # learning rate, a counter.
    for name, kind, params in (
        ("onebit", "float16", {"compressor": "onebit", "ef": "vanilla"}),
        (
            "momentum",
            "float32",
            {"compressor": "topk", "k": 0.3, "ef": "vanilla", "momentum": "nesterov", "mu": 0.9},
        ),
        ("corrected", "float32", {"compressor": "randomk", "k": 20, "ef": "corrected"}),
        ("sizes", "float32", {"compressor": "dithering", "k": 3}),
    )[: int(os.environ["CASES"])]:
        bpsx.declare(name, compression=params)
        for step in range(1 if name == "sizes" else 2):
            # With integers a machine's sum does not depend on the order.
            g = np.random.default_rng([step, r]).integers(-9, 9, 90).astype(kind)
            rate = {"learning_rate": 0.1 / (step + 1)} if name == "corrected" else {}
            if os.environ["WHERE"] == "gpu":
                x = PretendArray(g, main)
                bpsx.push_pull(x, name, output=x, **rate)
                out = x.get()
            else:
                out = bpsx.push_pull(g, name, **rate)
            report([name, step, out.astype(float).tolist()])
    assert (
        os.environ["WHERE"] == "gpu"
        and bool(bpsx.api.verbs.session().compressing._gpu_kernels._room[0])
    ) == (os.environ["CODES"] == "1")
    bpsx.shutdown()
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shape", "cases", "elastic"),
    [((2, 1, 1), 4, "off"), ((2, 1, 1), 4, "shrink"), ((2, 2, 1), 1, "off")],
    ids=["a GPU per machine", "answers are committed", "two"],
)
def test_the_same_as_on_the_host(
    shape: tuple[int, int, int], cases: int, elastic: str, pretend: Path
) -> None:
    more = {
        "BPSX_ELASTIC": elastic,
        "CASES": str(cases),
        "NUMBA_ENABLE_CUDASIM": "1",
        "BYTEPS_MIN_COMPRESS_BYTES": "0",
        "BYTEPS_PARTITION_BYTES": "4096",
    }
    machines, processes, _ = shape
    found = {}
    for where in ("gpu", "host"):
        own = {
            i: {"CODES": int(where == "gpu" and i % processes == processes - 1)}
            for i in range(machines * processes)
        }
        with gpu_job(
            SIMULATED + WORKER, pretend, *shape, env={**more, "WHERE": where}, worker_env=own
        ) as job:
            found[where] = job.results(2 * DEADLINE)  # the simulator is slow
    for gpu, host in zip(found["gpu"], found["host"], strict=True):
        for (*case, values), (*same, wanted) in zip(gpu, host, strict=True):
            assert case == same
            assert values == pytest.approx(wanted, rel=2e-3, abs=1e-6), case
            assert any(values)
