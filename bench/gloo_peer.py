"""One of the two processes of the peer: torch.distributed's gloo all_reduce on loopback."""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.distributed as dist

from bench.child import serve


def init(store: str, rank: int, size: int) -> None:
    """Join the gloo job through a file, so that no other process can take the port in between."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)


@cache
def _tensor(nbytes: int) -> torch.Tensor:
    # Zeros stay finite however often they are summed in place.
    return torch.zeros(nbytes // 4, dtype=torch.float32)


def all_reduce(nbytes: int, calls: int, warm: int = 1) -> list[float]:
    """Return the seconds of each float32 all_reduce of ``nbytes`` bytes."""
    tensor = _tensor(nbytes)
    for _ in range(warm):
        dist.all_reduce(tensor)
    dist.barrier()
    samples = []
    for _ in range(calls):
        before = time.perf_counter()
        dist.all_reduce(tensor)
        samples.append(time.perf_counter() - before)
    return samples


if __name__ == "__main__":
    serve({"init": init, "all_reduce": all_reduce})
    if dist.is_initialized():
        dist.destroy_process_group()
