"""Tensors on GPUs that are exchanged as two factors (PowerSGD), by the CUDA kernels on Numba's
simulator or by the host's kernels: the bits equal those of gradients in host memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus.machines import SIMULATED, gpu_job
from support.jobs import DEADLINE

#: Source of a worker that cannot build kernels.
BROKEN = """
    import sys

    sys.modules["numba.cuda"] = None
"""
WORKER = """
    bpsx.init()
    r, on_gpu = bpsx.rank(), os.environ["WHERE"] == "gpu"
    kept = bpsx.api.verbs.session().compressing
    for name, kind, more in (
        ("plain", "float32", {}),
        ("half", "float16", {"ef": "vanilla"}),
        ("momentum", "float32", {"ef": "vanilla", "momentum": "nesterov", "mu": 0.5}),
    )[: int(os.environ["CASES"])]:
        bpsx.declare(name, compression={"compressor": "powersgd", "rank": 2, **more})
        saved = None
        for step in range(3):
            # With integers a machine's sum does not depend on the order.
            g = np.random.default_rng([step, r]).integers(-9, 9, (6, 70)).astype(kind)
            if on_gpu:
                x = PretendArray(g, main)
                bpsx.push_pull(x, name, output=x)
                out = x.get()
            else:
                out = bpsx.push_pull(g, name)
            report([name, step, out.astype(float).tolist()])
            if step == 0:
                bpsx.barrier()
                saved = kept.save([name])
            elif step == 1:  # the last step has the state that the second one had
                bpsx.barrier()
                kept.restore(saved)
    bpsx.shutdown()
"""


ELSEWHERE = """
    bpsx.init()
    here = np.random.default_rng(bpsx.rank()).standard_normal((200, 200), np.float32)
    there = PretendArray(here, main)
    first, second = (there, here) if os.environ["FIRST"] == "gpu" else (here, there)
    bpsx.declare("a", compression={"compressor": "powersgd", "rank": 2})
    told = []
    for array in (first, second, first):  # no later sum may lack what the refused one was to bring
        try:
            bpsx.push_pull(array, "a", output=array)
        except bpsx.BpsxError as e:
            told.append(str(e))
    report(told)
    bpsx.shutdown()
"""


def outcome(
    pretend: Path, where: str, shape: tuple[int, int, int], broken: bool = False, **more: object
) -> list[list[object]]:
    env = {
        "WHERE": where,
        "NUMBA_ENABLE_CUDASIM": "1",
        "BYTEPS_MIN_COMPRESS_BYTES": "0",
        "BYTEPS_PARTITION_BYTES": "4096",
        **more,
    }
    kernels = BROKEN if broken else SIMULATED
    with gpu_job(kernels + WORKER, pretend, *shape, env=env) as job:
        found = job.results(2 * DEADLINE)  # the simulator is slow
        said = [w.text().count("compressed on the CPU") for w in job.workers]
    assert said == [int(broken)] * len(said)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shape", "broken", "more"),
    [
        ((2, 1, 1), False, {"CASES": 3}),
        ((2, 1, 1), False, {"CASES": 1, "BPSX_ELASTIC": "shrink"}),
        ((2, 2, 1), False, {"CASES": 1}),
        ((2, 1, 1), True, {"CASES": 3, "PRETEND_DELAY_US": "5000"}),
    ],
    ids=["a GPU per machine", "answers are committed", "two", "kernels that cannot be built"],
)
def test_the_bits_are_those_of_host_memory(
    shape: tuple[int, int, int], broken: bool, more: dict[str, object], pretend: Path
) -> None:
    wanted = outcome(pretend, "host", shape, **more)
    assert outcome(pretend, "gpu", shape, broken, **more) == wanted
    assert all(any(map(any, values)) for worker in wanted for _, _, values in worker)


@pytest.mark.parametrize(("first", "second"), [("gpu", "host memory"), ("host memory", "a GPU")])
def test_a_matrix_stays_where_its_first_push_was(first: str, second: str, pretend: Path) -> None:
    with gpu_job(BROKEN + ELSEWHERE, pretend, 2, 1, 1, env={"FIRST": first}) as job:
        for worker in job.workers:
            worker.wait()
        found = [worker.reports() for worker in job.workers]
    # One worker may hear that the other has failed before it has pushed anything itself.
    refused = f"cannot be pushed from {second} any more"
    assert any(refused in told[0] for (told,) in found), found
    assert all(len(told) >= 2 for (told,) in found), found
