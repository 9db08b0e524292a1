"""A private network of a test: one namespace per process on a bridge, whose links can be cut
silently and slowed down.

Needs root and iproute2, and nftables to cut; :func:`why_not` returns what is missing.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import pytest

from bench import network as plain
from bench.network import Links, run
from bench.report import BenchError
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
_RULE = (
    "add table inet cut; add chain inet cut {0} {{ type filter hook {0} priority 0; }}; add rule"
    " inet cut {0} {1}"
)


def why_not() -> str:
    """Return why this host cannot have such a network; empty if it can."""
    reason = plain.why_not()
    if reason or shutil.which("nft") is None:
        return reason or "not installed: nft"
    try:
        with Links(["try"]) as links:
            run(*links.prefix("try"), "nft", _RULE.format("input", "drop"))
    except BenchError as e:
        return f"this kernel does not allow it: {e}"
    return ""


_WHY_NOT = why_not()
#: Marks tests that need such a network.
needed = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


class Network(Links):
    """The benchmarks' network with unlimited rates, whose links can be cut."""

    @property
    def hub(self) -> str:
        """Name of the process whose namespace has the bridge: the scheduler."""
        return self._names[0]

    def cut(self, name: str) -> None:
        """Drop every packet from and to ``name``, silently.

        Packets between other processes still pass the hub's bridge.
        """
        for hook, side in (("input", "iifname"), ("output", "oifname")):
            run(*self.prefix(name), "nft", _RULE.format(hook, f"{side} net0 drop"))

    def filter(self, name: str, hook: str, rule: str) -> None:
        """Apply ``rule``, in nftables' language, to ``name``'s packets.

        ``hook``: "input" for packets that reach it, "output" for packets that leave it.
        """
        run(*self.prefix(name), "nft", _RULE.format(hook, rule))

    def mend(self, name: str) -> None:
        run(*self.prefix(name), "nft", "delete table inet cut")


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
