"""``python -m bpsx.launch.advise_probe``: a worker of the jobs that ``bpsx-run advise`` runs.

``costs [gpu]`` measures what each way of sending gradients costs processors. ``link`` measures how
long a push_pull takes. Worker 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import bpsx
from bpsx.api.lifecycle import session
from bpsx.config import Config
from bpsx.launch.advise_methods import METHODS
from bpsx.launch.job_view import Observer

#: Matrices of float32 that are under way together.
_SHAPE, _COUNT = (2048, 1024), 4
_BYTES = _COUNT * 4 * _SHAPE[0] * _SHAPE[1]
#: Rounds before the measured ones, batches of these, and seconds and rounds of a batch.
_WARM, _BATCHES, _SECONDS, _FEWEST, _MOST = 2, 3, 0.1, 2, 20
#: Seconds of the push_pulls that measure a link, and bytes of the first and the largest.
_LINK_SECONDS, _FIRST, _LARGEST = 2.0, 1 << 20, 256 << 20


def _mean(value: float, name: str) -> float:
    """The workers' mean, so that all decide alike."""
    return float(bpsx.push_pull(np.array([value], np.float64), name=name)[0])


def _processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in nanosecond steps.

    The number is Linux' name of that process's clock: man 3 clock_getcpuclockid.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _matrix(on_gpu: bool, rng: np.random.Generator) -> Any:
    host = rng.standard_normal(_SHAPE, np.float32)
    if not on_gpu:
        return host
    try:
        import torch
    except ImportError:
        import cupy

        return cupy.asarray(host)
    return torch.from_numpy(host).cuda()


def _costs(servers: Sequence[int], on_gpu: bool) -> dict[str, Any]:
    """Measure all methods. ``servers``: process ids; only worker 0 knows them."""
    found = {}
    for name, given in METHODS.items():
        rng = np.random.default_rng(bpsx.rank())
        tensors = {f"advise.{name}.{i}": _matrix(on_gpu, rng) for i in range(_COUNT)}
        for one in tensors if given is not None else ():
            bpsx.declare(one, compression=given)

        def once(tensors: Mapping[str, Any] = tensors) -> None:
            handles = [bpsx.push_pull_async(tensor, name=one) for one, tensor in tensors.items()]
            for handle in handles:
                bpsx.synchronize(handle)

        for _ in range(_WARM):
            once()
        begin = time.perf_counter()
        once()
        seconds = _mean(time.perf_counter() - begin, "advise.seconds")
        rounds = min(_MOST, max(_FEWEST, int(_SECONDS / seconds)))
        # The least of each: what other processes of the machine do only adds to it.
        batches = [_measure(once, rounds, servers) for _ in range(_BATCHES)]
        found[name] = {what: min(batch[what] for batch in batches) for what in batches[0]}
    return found


def _measure(once: Callable[[], None], rounds: int, servers: Sequence[int]) -> dict[str, float]:
    """Return seconds, and bytes on the wire, per byte of gradient."""

    def state() -> tuple[float, float, float, float]:
        return (
            time.perf_counter(),
            time.process_time(),
            sum(map(_processor_seconds, servers)),
            session().counters()["bytes_sent"],
        )

    bpsx.barrier()
    before = state()
    for _ in range(rounds):
        once()
    bpsx.barrier()
    names = ("seconds", "worker", "servers", "wire")
    amount = rounds * _BYTES
    return {
        name: (new - old) / amount for name, new, old in zip(names, state(), before, strict=True)
    }


def _link() -> dict[str, Any]:
    """Measure a push_pull that takes a good part of a second, or is large.

    Returns its bytes and seconds, and the seconds of a push_pull of 8 bytes.
    """
    trips = []
    for _ in range(10):
        bpsx.barrier()
        begin = time.perf_counter()
        _mean(0.0, "advise.trip")
        trips.append(time.perf_counter() - begin)
    nbytes = _FIRST
    while True:
        array = np.zeros(nbytes, np.uint8).view(np.float32)
        times = []
        for _ in range(3):
            bpsx.barrier()
            begin = time.perf_counter()
            bpsx.push_pull(array, name=f"advise.{nbytes}")
            times.append(time.perf_counter() - begin)
        # The first one makes memory, and TCP's windows grow in it.
        seconds = _mean(min(times[1:]), "advise.seconds")
        if seconds >= _LINK_SECONDS / 4 or nbytes >= _LARGEST:
            trip = _mean(statistics.median(trips), "advise.trip")
            return {"bytes": nbytes, "seconds": seconds, "trip": trip}
        grown = nbytes * min(8.0, _LINK_SECONDS / 3 / seconds)
        nbytes = min(_LARGEST, max(nbytes * 2, int(grown) // 4096 * 4096))


def main() -> int:
    """Run the measurement that the command line names."""
    bpsx.init()
    what, *more = sys.argv[1:]
    view: dict[str, Any] = {}
    if bpsx.rank() == 0:
        with Observer(Config()) as observer:
            view = observer.ask()
    if what == "link":
        found = {**_link(), "nodes": view.get("nodes"), "workers": bpsx.size()}
    else:
        servers = [n["pid"] for n in view.get("nodes", ()) if n["role"] == "server"]
        found = {"methods": _costs(servers, "gpu" in more), "workers": bpsx.size()}
    bpsx.shutdown()
    if view:
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
