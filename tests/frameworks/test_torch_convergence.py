"""With error feedback a small network on handwritten digits becomes as accurate as without
compression.

Without feedback it does not. Functions named ``job_*`` run in the workers.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import bpsx.torch as bps
from support.torch_job import Finished, each, run_job

ROOT = Path(__file__).parents[2]
EPOCHS, BATCH, LEARNING_RATE = 16, 32, 0.4
SEEDS = range(5)
#: One percentage point of accuracy; there are 360 test pictures.
POINT = 0.01
_ONEBIT: dict[str, Any] = {"compressor": "onebit", "scaling": True}
_TOPK: dict[str, Any] = {"compressor": "topk", "k": 0.02}
_RANDOMK: dict[str, Any] = {"compressor": "randomk", "k": 0.05, "seed": 1}
_DITHERING: dict[str, Any] = {"compressor": "dithering", "k": 2, "seed": 1}
CASES: dict[str, dict[str, Any]] = {
    "onebit": {**_ONEBIT, "ef": "vanilla"},
    "onebit corrected": {**_ONEBIT, "ef": "corrected"},
    "topk": {**_TOPK, "ef": "vanilla"},
    "topk corrected": {**_TOPK, "ef": "corrected"},
    "randomk": {**_RANDOMK, "ef": "vanilla"},
    "randomk corrected": {**_RANDOMK, "ef": "corrected"},
    "randomk sparse": {**_RANDOMK, "ef": "sparse"},
    "dithering linear": {**_DITHERING, "ef": "vanilla"},
    "dithering natural": {**_DITHERING, "partition": "natural", "ef": "vanilla"},
    "powersgd": {"compressor": "powersgd", "rank": 2, "ef": "vanilla"},
    "dithering without feedback": _DITHERING,  # unbiased: its errors cancel out
}
#: Biased compressors, which need feedback; randomk sends a twentieth of each step.
WITHOUT = {"onebit": _ONEBIT, "topk": _TOPK, "randomk": _RANDOMK}


def _network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _accuracy(name: str, params: dict[str, Any] | None, seed: int = 0) -> float:
    """Return the accuracy after training with these ``compression_params``, always from the same
    weights and on the same data.
    """
    model = _network(seed)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        [(f"{name}.{n}", p) for n, p in model.named_parameters()],
        compression_params=None if params is None else lambda _: params,
    )
    return _learned(model, model, optimizer)


def _learned(model: nn.Module, called: nn.Module, optimizer: Any, epochs: int = EPOCHS) -> float:
    """Train ``model``, of which ``called`` computes the outputs; return its accuracy."""
    sys.path.append(str(ROOT))
    from examples.pytorch.digits import Digits, accuracy

    data = Digits()
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - epoch / epochs)
        for part in data.batches(epoch, BATCH, bps.rank(), bps.size()):
            optimizer.zero_grad()
            nn.functional.cross_entropy(called(data.x[part]), data.y[part]).backward()
            optimizer.step()
    return accuracy(model, data)


def job_train() -> Any:
    found = {"plain": _accuracy("plain", None)}
    found |= {case: _accuracy(case, params) for case, params in CASES.items()}
    return found | {
        f"no {case}": _accuracy(f"no {case}", params) for case, params in WITHOUT.items()
    }


def _accuracy_of_torchs_hook(seed: int) -> float:
    """As :func:`_accuracy`, with DDP and PyTorch's own PowerSGD."""
    hook = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
        random_seed=seed,
    )
    model = _network(seed)
    called = nn.parallel.DistributedDataParallel(model)
    called.register_comm_hook(hook, powerSGD_hook.powerSGD_hook)
    return _learned(model, called, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))


def job_beside_torchs_hook() -> Any:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['MEETING']}",
        rank=bps.rank(),
        world_size=bps.size(),
    )
    ours = [_accuracy(f"seed {s}", {**CASES["powersgd"], "seed": s}, s) for s in SEEDS]
    theirs = [_accuracy_of_torchs_hook(s) for s in SEEDS]
    # No destroy_process_group here. A thread of gloo may not have let go of the last callback of
    # PyTorch's hook, which holds the group. Were it the last to do so, it would destroy the group,
    # join itself and abort the process ("Resource deadlock avoided").
    return ours, theirs


def test_powersgd_learns_as_pytorchs_does(tmp_path: Path) -> None:
    finished = run_job(
        __file__,
        ["job_beside_torchs_hook"],
        tmp_path,
        BYTEPS_MIN_COMPRESS_BYTES="1000",
        MEETING=str(tmp_path / "meeting"),
    )
    assert finished.status == 0, finished.output[-5000:]
    for ours, theirs in each(finished, "job_beside_torchs_hook"):
        assert min(ours) > 0.9
        noise = statistics.stdev(theirs) + POINT
        assert abs(statistics.mean(ours) - statistics.mean(theirs)) < noise, (ours, theirs)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    finished = run_job(__file__, ["job_train"], tmp_path_factory, BYTEPS_MIN_COMPRESS_BYTES="1000")
    assert finished.status == 0, finished.output[-5000:]
    return finished


@pytest.mark.parametrize("case", CASES)
def test_training_is_as_accurate_as_without_compression(job: Finished, case: str) -> None:
    for found in each(job, "job_train"):
        assert found["plain"] > 0.94
        assert found[case] >= found["plain"] - POINT


@pytest.mark.parametrize("case", WITHOUT)
def test_without_feedback_training_is_worse(job: Finished, case: str) -> None:
    """Shows that the test above can fail."""
    for found in each(job, "job_train"):
        assert found[f"no {case}"] < found["plain"] - 2 * POINT
