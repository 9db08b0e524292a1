"""Futures of the backend "bpsx", and PyTorch's communication hooks, compared with gloo.

The hooks wait for futures in callbacks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

import bpsx.torch as bps
from bpsx.torch.parallel import DistributedDataParallel
from support.torch_job import run_job

_Register = Callable[[Any, Any], None]  # takes a model and a process group of all workers


def _power(hook: Any, **options: Any) -> _Register:
    def register(model: Any, group: Any) -> None:
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, **options
        )
        model.register_comm_hook(state, hook)

    return register


def _local_sgd(model: Any, group: Any) -> None:
    alone = dist.new_subgroups(1, backend=dist.get_backend(group))[0]
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(group, alone, 2), post_localSGD_hook.post_localSGD_hook
    )


def _stateless(hook: Any) -> _Register:
    return lambda model, group: model.register_comm_hook(group, hook)


HOOKS: dict[str, _Register] = {
    "allreduce": _stateless(default_hooks.allreduce_hook),
    "fp16": _stateless(default_hooks.fp16_compress_hook),
    "fp16 of allreduce": _stateless(
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "bf16 of allreduce": _stateless(
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "PowerSGD": _power(powerSGD_hook.powerSGD_hook),
    "PowerSGD without feedback": _power(
        powerSGD_hook.powerSGD_hook, use_error_feedback=False, warm_start=False
    ),
    "batched PowerSGD": _power(powerSGD_hook.batched_powerSGD_hook),
    "fp16 of PowerSGD": _power(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "post-local SGD": _local_sgd,
    "nothing": _stateless(debugging_hooks.noop_hook),
    "quantized": _stateless(quantization_hooks.quantization_pertensor_hook),
    "quantized by channel": _stateless(quantization_hooks.quantization_perchannel_hook),
}


#: Hooks that fail with gloo on the CPU, because they need NCCL or read values as NCCL's futures
#: hold them. They are compared anyway.
NOT_WITH_GLOO = {"bf16 of allreduce", "batched PowerSGD", "quantized", "quantized by channel"}

#: PyTorch 2.11's PowerSGD queries the current GPU if there is one, even for CPU tensors.
if torch.cuda.is_available():
    NOT_WITH_GLOO |= {"PowerSGD", "PowerSGD without feedback", "fp16 of PowerSGD"}


def _trained(register: _Register, group: Any) -> Any:
    """Train for a few steps; return the weights, or the text of the error."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    try:
        register(model, group)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    # Some of PyTorch's own hooks cannot work on the CPU; their errors are compared.
    except Exception as e:
        return f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def job_hooks() -> Any:
    dist.init_process_group("bpsx")
    gloo = dist.new_group(backend="gloo")
    found = {
        name: (_trained(register, dist.group.WORLD), _trained(register, gloo))
        for name, register in HOOKS.items()
    }
    wrapped = default_hooks.fp16_compress_wrapper(bps.ddp_comm_hook)
    found["fp16 of bpsx"] = (
        _trained(lambda model, _: model.register_comm_hook(None, wrapped), gloo),
        _trained(HOOKS["fp16 of allreduce"], gloo),
    )
    return found


def _ones(value: float = 1.0) -> Any:
    """Return the future of a sum over all workers that is under way."""
    return dist.all_reduce(torch.full((5,), value), async_op=True).get_future()


def job_within() -> Any:
    dist.init_process_group("bpsx")
    size = dist.get_world_size()

    def deeper(depth: int) -> Callable[[Any], Any]:
        def callback(future: Any) -> Any:
            total = future.wait()[0]
            return total if depth == 0 else _ones(total[0].item()).then(deeper(depth - 1)).wait()

        return callback

    nested = _ones().then(deeper(6)).wait()
    first = _ones()
    behind = _ones(2.0)
    crossed = first.then(lambda _: behind.wait()[0] + 1).wait()
    order: list[int] = []
    several = _ones()
    for i in range(5):
        several.add_done_callback(lambda _, i=i: order.append(i))
    several.wait()
    futures = [_ones(float(i)) for i in range(40)]
    gathered = [f.wait()[0][0].item() for f in torch.futures.collect_all(futures).wait()]
    failed = ""
    try:
        _ones().then(lambda f: 1 / 0).wait()
    except Exception as e:
        failed = str(e)
    after = _ones().wait()[0]
    threads = sum(t.name == "bpsx-futures" for t in threading.enumerate())
    return size, nested, crossed, order, gathered, failed, after, threads


def job_no_hook_here() -> Any:
    try:
        DistributedDataParallel(torch.nn.Linear(2, 2)).register_comm_hook(
            None, default_hooks.allreduce_hook
        )
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "none"


def test_every_hook_of_pytorch_works_as_with_gloo(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_hooks"], tmp_path, workers=2)
    results = finished.results
    assert len(results) == 2, finished.output[-4000:]
    for result in results.values():
        found = result["job_hooks"]
        assert set(found) == {*HOOKS, "fp16 of bpsx"}
        for name, (ours, reference) in found.items():
            # This hook expects nested values in futures, as NCCL's are, and fails with gloo.
            if name == "quantized":
                torch.testing.assert_close(ours, found["allreduce"][1], rtol=0, atol=0.02)
                assert torch.equal(ours, results[0]["job_hooks"][name][0])
            elif isinstance(reference, str):
                assert isinstance(ours, str) and ours.split(":")[:2] == reference.split(":")[:2], (
                    name,
                    ours,
                    reference,
                )
            else:
                # bpsx averages float16 itself. All other hooks send the same bits as with gloo.
                atol = 1e-6 if name == "fp16 of bpsx" else 0
                torch.testing.assert_close(
                    ours,
                    reference,
                    rtol=0,
                    atol=atol,
                    msg=lambda text, name=name: f"{name}: {text}",
                )
        work = {
            name for name, (_, reference) in found.items() if isinstance(reference, torch.Tensor)
        }
        assert work >= {*HOOKS, "fp16 of bpsx"} - NOT_WITH_GLOO, {
            name: found[name] for name in sorted(set(found) - work)
        }


def test_a_callback_may_wait_for_other_futures(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_within", "job_no_hook_here"], tmp_path, workers=2)
    results = finished.results
    assert len(results) == 2, finished.output[-4000:]
    for result in results.values():
        size, nested, crossed, order, gathered, failed, after, threads = result["job_within"]
        assert nested.eq(float(size) ** 7).all()
        assert crossed.eq(2.0 * size + 1).all()
        assert order == [0, 1, 2, 3, 4]
        assert gathered == [float(i * size) for i in range(40)]
        assert "division by zero" in failed
        assert after.eq(size).all()
        assert 1 <= threads <= 10
        assert result["job_no_hook_here"].startswith(
            "ConfigError: DistributedDataParallel.register_comm_hook"
        )
