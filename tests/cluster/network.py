"""A private network of a test: one namespace per process on a bridge, whose links can be cut
silently and slowed down.

Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from bench.network import Links, why_no_cuts
from support.jobs import Job

#: A worker that pushes until the job fails, and reports how and when.
STEPPING = """
    import bpsx, numpy as np, time
    bpsx.init()
    a = np.ones(200_000, np.float32)
    bpsx.barrier()
    report("running")
    try:
        while True:
            bpsx.push_pull(a, name="x")
    except bpsx.BpsxError as e:
        report([type(e).__name__, str(e), time.time()])
        sys.exit(7)
"""

_WHY_NOT = why_no_cuts()
#: Marks tests that need such a network.
needed = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


class Network(Links):
    """The benchmarks' network with unlimited rates."""

    @property
    def hub(self) -> str:
        """Name of the process whose namespace has the bridge: the scheduler."""
        return self._names[0]


class NetJob(Job):
    """A job whose processes each run in their own namespace of ``network``."""

    def __init__(self, source: str, network: Network, *, env: dict[str, str], **more: Any) -> None:
        # Beyond loopback a job needs a secret.
        env = {"BPSX_SECRET": "5bd6a3f0" * 8, **env}
        super().__init__(source, host=network.address[network.hub], env=env, **more)
        self._network = network

    def command(self, name: str, words: list[str]) -> list[str]:
        return [*self._network.prefix(name), *words]


@contextlib.contextmanager
def net_job(source: str, env: dict[str, str], before: Any = None) -> Any:
    """(network, job) of two workers and a server; ``before(network)`` runs before the processes
    start.
    """
    with Network(["scheduler", "server 0", "worker 0", "worker 1"]) as network:
        if before is not None:
            before(network)
        with NetJob(source, network, env=env) as job:
            yield network, job
