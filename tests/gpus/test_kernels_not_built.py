"""Workers whose GPU kernels cannot be built: they warn once, the host compresses, and the sums
equal those of compression on GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import gpu_job

#: Makes kernels fail in the way that a worker's variable ``HOW`` names.
BREAK = """
    import sys, os
    how = os.environ["HOW"]
    if how == "import":
        sys.modules["numba.cuda"] = None
    elif how == "attribute":        # like numba-cuda with a NumPy that has removed a name
        class Module:
            def __getattr__(self, name):
                raise AttributeError("module 'numpy' has no attribute 'gone'")
        sys.modules["numba.cuda"] = Module()
    else:
        from bpsx.kernels.cuda import device
        launch = device.Kernel.launch

        def after_the_stream(self, blocks, stream, *arguments):
            cuda.sync(stream)       # the simulator runs a kernel at once, wherever it is queued
            if how == "launch" and not device.building():
                raise RuntimeError("invalid device function")
            launch(self, blocks, stream, *arguments)

        def no_compiler(*given):
            raise ValueError("ptxas: unknown architecture")

        device.Kernel.launch = after_the_stream
        if how == "compile":
            device._made_of.launcher = no_compiler
"""
WORKER = """
    bpsx.init()
    r = bpsx.rank()
    # The last one is too short to be compressed: its momentum is added before the push.
    for name, n, params in (
        ("onebit", 40, {"compressor": "onebit", "ef": "vanilla"}),
        (
            "momentum",
            40,
            {"compressor": "topk", "k": 0.3, "ef": "vanilla", "momentum": "nesterov", "mu": 0.5},
        ),
        ("short", 6, {"compressor": "onebit", "momentum": "nesterov", "mu": 0.5}),
    )[: int(os.environ["CASES"])]:
        bpsx.declare(name, compression=params)
        for step in range(2):
            g = np.random.default_rng([step, r]).integers(-9, 9, n).astype("float32")
            if os.environ["WHERE"] == "gpu":
                x = PretendArray(g, main)
                bpsx.push_pull(x, name, output=x)
                report([name, step, x.get().tolist()])
            else:
                report([name, step, bpsx.push_pull(g, name).tolist()])
    bpsx.shutdown()
"""


def outcome(
    pretend: Path, where: str, hows: tuple[str, str], cases: int
) -> tuple[list[list[object]], list[list[str]]]:
    """Return the reports of both workers, and the warnings of each."""
    # Queued work is slow on purpose: code that does not wait for the result's copy reads the
    # gradient.
    env = {
        "NUMBA_ENABLE_CUDASIM": "1",
        "BYTEPS_MIN_COMPRESS_BYTES": "100",
        "WHERE": where,
        "CASES": cases,
        "PRETEND_DELAY_US": "5000",
    }
    source = (BREAK if where == "gpu" else "") + WORKER
    with gpu_job(
        source,
        pretend,
        2,
        1,
        1,
        env=env,
        worker_env={i: {"HOW": how} for i, how in enumerate(hows)},
    ) as job:
        found = job.results()
        return found, [
            [line for line in worker.text().splitlines() if "compressed on the CPU" in line]
            for worker in job.workers
        ]


@pytest.mark.parametrize(
    ("hows", "said", "cases"),
    [
        (
            ("import", "attribute"),
            ("numba.cuda", "AttributeError: module 'numpy' has no attribute 'gone'"),
            3,
        ),
        (
            ("compile", "launch"),
            ("ValueError: ptxas: unknown architecture", "RuntimeError: invalid device function"),
            3,
        ),
        (("attribute", "works"), ("has no attribute 'gone'", ""), 1),
    ],
)
def test_one_warning_and_the_same_sums(
    hows: tuple[str, str], said: tuple[str, str], cases: int, pretend: Path
) -> None:
    wanted, _ = outcome(pretend, "host", ("", ""), cases)
    found, warnings = outcome(pretend, "gpu", hows, cases)
    assert found == wanted
    for told, cause in zip(warnings, said, strict=True):
        assert len(told) == bool(cause)
        assert all(cause in line and "Training continues" in line for line in told)
