"""Calls that PyTorch makes on a process group beside collectives, compared with gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile

import bpsx.torch as bps
from support.torch_job import run_job

_c10d: Any = dist.distributed_c10d
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _kind(value: Any) -> Any:
    """What is comparable of an answer."""
    return (
        value if isinstance(value, (bool, int, str, timedelta, type(None), list)) else "an object"
    )


def _answers(group: Any) -> dict[str, Any]:
    questions: dict[str, Callable[[], Any]] = {
        "devices": lambda: sorted(map(str, group._device_types)),
        "meta": lambda: group._get_backend(torch.device("meta")),
        "bound device": lambda: group.bound_device_id,
        "store": group.get_group_store,
        "number": lambda: (
            group._set_sequence_number_for_group(),
            group._get_sequence_number_for_group(),
        )[1],
        "hooks": group._has_hooks,
        # not in all releases
        "symmetric memory": lambda: group.use_pg_for_symm_mem_rendezvous(),
        "rank and size": lambda: [group.rank(), group.size()],
        "pg timeout": lambda: _c10d._set_pg_timeout(timedelta(seconds=50), group),
        "default device": lambda: str(_c10d._get_pg_default_device(group)),
        "device of objects": lambda: str(_c10d._get_object_coll_device(group)),
        "capability": lambda: sorted(_c10d._device_capability(group)),
        "ranks": lambda: dist.get_process_group_ranks(group),
        "parameters": lambda: dist._verify_params_across_processes(group, [torch.ones(3)], None),
        "coalesced": lambda: _coalesced(group),
        "list": lambda: _listed(group),
        "functional": lambda: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
        ).tolist(),
    }
    for device in (CPU, CUDA):
        backend = functools.partial(group._get_backend, device)
        questions |= {
            f"{device}": backend,
            f"{device} rank": lambda b=backend: [b().rank(), b().size()],
            f"{device} timeout": lambda b=backend: b().options._timeout,
            f"{device} coalesces": lambda b=backend: b().supports_coalescing,
            f"{device} estimates": lambda b=backend: b().supports_time_estimate,
            f"{device} allocates": lambda b=backend: b().supports_tensor_alloc(CPU),
        }
    found = {}
    for name, question in questions.items():
        try:
            found[name] = _kind(question())
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    return found


def _coalesced(group: Any) -> Any:
    tensors = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager(group=group, async_ops=True) as together:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    together.wait()
    return [t.tolist() for t in tensors]


def _listed(group: Any) -> Any:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, {"rank": group.rank()}, group=group)
    return found


def job_surface() -> Any:
    dist.init_process_group("bpsx")
    group, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    return _answers(group), _answers(gloo)


def job_coalescing_by_device() -> Any:
    group: Any = dist.group.WORLD
    first, second = torch.ones(4), torch.full((3,), float(dist.get_rank()))
    before = group._get_sequence_number_for_group()
    group._start_coalescing(CPU)
    dist.all_reduce(first, async_op=True)
    dist.broadcast(second, 1, async_op=True)
    group._end_coalescing(CPU).wait()
    try:
        group._end_coalescing(CPU)
    except RuntimeError as e:
        return first, second, group._get_sequence_number_for_group() - before, str(e)
    return "no error"


def job_timeout() -> Any:
    """The timeout that was set in PyTorch's way is kept."""
    gloo, tensor, text = dist.new_group(backend="gloo"), torch.ones(3), ""
    _c10d._set_pg_timeout(timedelta(seconds=1))
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(tensor)
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
    _c10d._set_pg_timeout(timedelta(seconds=60))
    dist.barrier(group=gloo)
    if dist.get_rank() == 1:
        dist.all_reduce(tensor)
    return text


def job_mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    return whole.full_tensor(), whole.sum().full_tensor()


def job_profiled() -> Any:
    tensor, size = torch.ones(1000), dist.get_world_size()
    with profile(record_shapes=True) as seen:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather([torch.empty(1000) for _ in range(size)], tensor)
        dist.barrier()
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model.register_comm_hook(None, bps.ddp_comm_hook)
        model(torch.ones(1, 3)).sum().backward()
    shapes = [e.input_shapes for e in seen.events() if e.name == "c10d::allreduce_"]
    return [e.name for e in seen.events()], shapes, tensor


def job_profiled_push_pulls() -> Any:
    model = torch.nn.Linear(3, 3)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )
    with profile() as seen:
        bps.push_pull(torch.ones(5), name="one")
        bps.synchronize(bps.push_pull_async(torch.ones(5), name="later"))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    bps.push_pull(torch.ones(5), name="unseen")
    return [e.name for e in seen.events()]


def job_profiles_that_end_first() -> Any:
    """Stop profiles while a collective and a push_pull wait for the other worker."""
    group: Any = dist.new_group(backend="gloo")
    model = torch.nn.Linear(3, 3)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )
    found = []
    for i in range(40):
        if dist.get_rank() == i % 2:
            dist.barrier(group=group)  # the other has stopped its profile
        with profile() as seen:
            work = dist.all_reduce(torch.ones(9), async_op=True)
            handle = bps.push_pull_async(torch.ones(5), name="late")
            model(torch.ones(1, 3)).sum().backward()
        if dist.get_rank() != i % 2:
            dist.barrier(group=group)
        work.wait()
        bps.synchronize(handle)
        optimizer.step()
        optimizer.zero_grad()
        # PyTorch would write ends into the memory of these events if they were open.
        spans = {e.name: e.time_range.elapsed_us() for e in seen.events()}
        found.append([n for n in spans if n.startswith("bpsx:") and spans[n] > 0])
    return found


def test_profiles_may_end_before_their_collectives(tmp_path: Path) -> None:
    finished = run_job(
        __file__, ["job_surface", "job_profiles_that_end_first"], tmp_path, workers=2
    )
    assert sorted(finished.results) == [0, 1], finished.output[-4000:]
    for result in finished.results.values():
        for names in result["job_profiles_that_end_first"]:
            assert {"bpsx:all_reduce", "bpsx:push_pull late", "bpsx:push_pull Gradient.bias"} <= {
                *names
            }


def test_push_pulls_are_seen_by_the_profiler(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_profiled_push_pulls"], tmp_path, workers=2)
    assert sorted(finished.results) == [0, 1], finished.output[-4000:]
    for result in finished.results.values():
        names = result["job_profiled_push_pulls"]
        for name in ("one", "later", "Gradient.weight", "Gradient.bias"):
            assert names.count(f"bpsx:push_pull {name}") == 1, names
        assert names.count("bpsx::push_pull") == 4


def test_the_backend_supports_the_calls_that_gloo_supports(tmp_path: Path) -> None:
    jobs = ["job_surface", "job_coalescing_by_device", "job_timeout", "job_mesh"]
    finished = run_job(__file__, jobs, tmp_path, workers=2)
    assert sorted(finished.results) == [0, 1], finished.output[-4000:]
    for result in finished.results.values():
        ours, reference = result["job_surface"]
        answered = {k: v for k, v in reference.items() if k == "meta" or "Error: " not in str(v)}
        assert {k: ours[k] for k in answered} == answered and len(answered) >= 20
        assert ours["cpu"] == ours["cuda"] == "an object" and ours["cpu timeout"] == timedelta(
            seconds=50
        )
        first, second, number, text = result["job_coalescing_by_device"]
        assert (
            first.eq(2).all() and second.eq(1).all() and number == 2 and "_start_coalescing" in text
        )
        whole, total = result["job_mesh"]
        assert torch.equal(whole, torch.arange(6.0)) and total == 15
    assert (
        finished.results[0]["job_timeout"].startswith("GroupTimeoutError")
        and "timeout of 1 s" in finished.results[0]["job_timeout"]
    )


def test_collectives_are_seen_by_the_profiler(tmp_path: Path) -> None:
    finished = run_job(__file__, ["job_surface", "job_profiled"], tmp_path, workers=2)
    assert sorted(finished.results) == [0, 1], finished.output[-4000:]
    for result in finished.results.values():
        names, shapes, tensor = result["job_profiled"]
        for operator, name in (
            ("allreduce_", "all_reduce"),
            ("broadcast_", "broadcast"),
            ("allgather_", "all_gather"),
            ("barrier", "barrier"),
        ):
            assert f"c10d::{operator}" in names and f"bpsx:{name}" in names, names
        assert names.count("c10d::allreduce_") >= 2 and [[1000]] in shapes
        assert "bpsx:push_pull" in names
        assert tensor.eq(4).all()
