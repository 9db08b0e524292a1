"""bpsx.torch on real GPUs: one machine with two and with all of them, and two imitated machines
with one, two, four and all of them each.

Imitated machines have GPUs of their own while there are enough, and share them otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.torch_job import Finished, run_job

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"two GPUs are needed; there are {GPUS}"),
]
WORK = str(Path(__file__).parent / "gpus_work.py")
#: (machines, servers, processes of each)
LAYOUTS = {
    "one machine of two": (1, 0, 2),
    "two machines of one": (2, 1, 1),
    **{f"one machine of {n}": (1, 0, n) for n in (4, 8) if n <= GPUS},
    "two machines of two": (2, 2, 2),
    **{f"two machines of {n}": (2, 2, n) for n in (4, 8) if n <= GPUS},
}


def run(layout: str, function: str, folder: Path) -> Finished:
    machines, servers, processes = LAYOUTS[layout]
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return run_job(WORK, [function], folder, workers=machines, servers=servers, processes=processes)


@pytest.fixture(scope="module", params=LAYOUTS, ids=list(LAYOUTS))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(request.param, "all_of_it", tmp_path_factory.mktemp("gpus"))


def each(job: Finished, name: str) -> list[Any]:
    assert job.status == 0, job.output
    return [found["all_of_it"][name] for found in job.results.values()]


def test_sums_of_all_types(job: Finished) -> None:
    assert not any(each(job, "sums")), each(job, "sums")


@pytest.mark.parametrize(
    "how", ["DistributedOptimizer", "CrossBarrier", "parallel", "hook", "backend"]
)
def test_training_is_that_of_one_gpu_on_the_joined_batch(job: Finished, how: str) -> None:
    assert max(each(job, how)) < 1e-9


def test_streams_are_ordered_without_the_host(job: Finished) -> None:
    assert max(each(job, "streams")) == 0


def test_a_gradient_outside_the_batch_is_exchanged_on_its_own_stream(job: Finished) -> None:
    assert max(each(job, "odd_gradients")) < 1e-5


def test_tensors_on_the_host_and_on_the_gpu(job: Finished) -> None:
    assert all(each(job, "both_kinds"))


def test_cuda_graphs_are_refused_by_name(job: Finished) -> None:
    assert all(
        told.startswith("ConfigError: 'graph': ") and "CUDA graph" in told
        for told in each(job, "graph_refused")
    ), each(job, "graph_refused")


def test_compression_on_the_gpu(job: Finished) -> None:
    assert not any(each(job, "compressed")), each(job, "compressed")


def test_the_rest_of_the_plugin(job: Finished) -> None:
    assert not any(each(job, "others")), each(job, "others")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.endswith("of one")])
def test_a_process_killed_in_mid_step_ends_the_others_with_its_name(
    layout: str, tmp_path: Path
) -> None:
    machines, _, processes = LAYOUTS[layout]
    job = run(layout, "killed", tmp_path)
    victim = machines * processes - 1
    assert sorted(job.results) == list(range(victim)), job.output
    for found in job.results.values():
        assert (
            found["killed"].startswith("PeerLostError: ") and f"worker {victim}" in found["killed"]
        )
