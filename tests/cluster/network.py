"""A network of the test's own: one namespace per process on a bridge, whose links can be cut without a word, and made slow.

Needs root and iproute2, and nftables to cut; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from typing import Any

from jobs import Job

_numbers = itertools.count()
_DROP = "add table inet cut; add chain inet cut {0} {{ type filter hook {0} priority 0; }}; add rule inet cut {0} {1} drop"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    missing = [tool for tool in ("ip", "nft", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"bpsx-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        _run("ip", "netns", "exec", name, "nft", _DROP.format("input", ""))
    except subprocess.CalledProcessError as e:
        return f"this kernel does not allow it: {' '.join(e.cmd)}: {e.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)
    return ""


class Network:
    """Namespaces named by process; the scheduler's holds the bridge. A context manager that removes them all."""

    def __init__(self, names: list[str]) -> None:
        self._mark = f"bpsx-{os.getpid()}-{next(_numbers)}"
        self.hub = names[0]
        self._names = names
        self.address = {name: f"10.213.7.{i + 1}" for i, name in enumerate(names)}

    def namespace(self, name: str) -> str:
        return f"{self._mark}-{self._names.index(name)}"

    def __enter__(self) -> Network:
        try:
            for name in self._names:
                _run("ip", "netns", "add", self.namespace(name))
                self._ip(name, "link", "set", "lo", "up")
            self._ip(self.hub, "link", "add", "net0", "type", "bridge")
            for i, name in enumerate(self._names[1:]):
                self._ip(self.hub, "link", "add", f"port{i}", "type", "veth", "peer", "name", "net0", "netns", self.namespace(name))
                self._ip(self.hub, "link", "set", f"port{i}", "master", "net0", "up")
            for name in self._names:
                self._ip(name, "addr", "add", f"{self.address[name]}/24", "dev", "net0")
                self._ip(name, "link", "set", "net0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True, timeout=30, check=False)

    def _ip(self, name: str, *words: str) -> None:
        _run("ip", "-n", self.namespace(name), *words)

    def cut(self, name: str) -> None:
        """Drop every packet from and to ``name``, silently. What others send each other across the hub's bridge still passes."""
        for hook, side in (("input", "iifname"), ("output", "oifname")):
            _run("ip", "netns", "exec", self.namespace(name), "nft", _DROP.format(hook, f"{side} net0"))

    def mend(self, name: str) -> None:
        _run("ip", "netns", "exec", self.namespace(name), "nft", "delete table inet cut")

    def slow(self, name: str, rate: str) -> None:
        """Bound what ``name`` sends, as in ``50mbit``."""
        _run("tc", "-n", self.namespace(name), "qdisc", "add", "dev", "net0", "root", "tbf", "rate", rate, "burst", "32k", "latency", "50ms")


class NetJob(Job):
    """A job of which every process runs in its own namespace of ``network``."""

    def __init__(self, source: str, network: Network, *, env: dict[str, str], **more: Any) -> None:
        # Beyond loopback a job needs a secret.
        env = {"BPSX_SECRET": "5bd6a3f0" * 8, **env}
        super().__init__(source, host=network.address[network.hub], env=env, **more)
        self._network = network

    def command(self, name: str, words: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self._network.namespace(name), *words]


@contextlib.contextmanager
def net_job(source: str, env: dict[str, str], before: Any = None) -> Any:
    """(network, job) of two workers and a server; ``before(network)`` runs before the processes start."""
    with Network(["scheduler", "server 0", "worker 0", "worker 1"]) as network:
        if before is not None:
            before(network)
        with NetJob(source, network, env=env) as job:
            yield network, job
