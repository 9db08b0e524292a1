"""A node's own address, in network namespaces: the one that faces the scheduler, whatever other
addresses there are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PY, Launcher, finish, launching, local_words, words

PORT = "9000"
COMMON = {
    "DMLC_PS_ROOT_PORT": PORT,
    "DMLC_NUM_WORKER": "1",
    "DMLC_NUM_SERVER": "1",
    "BYTEPS_FORCE_DISTRIBUTED": "1",
    "BYTEPS_LOG_LEVEL": "info",
    "BPSX_SECRET": "a-secret-for-the-tests-that-is-long-enough",
    "BPSX_RENDEZVOUS_TIMEOUT": "60",
}
SUM = (
    "import numpy, bpsx; bpsx.init(); a = numpy.full(3000, 7, 'float32');"
    "print(bpsx.push_pull(a, name='a', average=False)[-1]); bpsx.shutdown()"
)


class Namespace:
    """A network namespace that exists as long as its holder process."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "ip link set lo up && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._holder.stdout
        self.ready = self._holder.stdout.readline() == b"ready\n"
        self.pid = str(self._holder.pid)

    def within(self, *command: str) -> list[str]:
        """Return ``command`` in the form that runs inside the namespace."""
        return [str(shutil.which("nsenter")), "-t", self.pid, "-n", *command]

    def ip(self, line: str) -> None:
        subprocess.run(self.within("ip", *line.split()), check=True, capture_output=True)

    def close(self) -> str:
        _, err = self._holder.communicate()
        return err.decode(errors="replace").strip()


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    made = [Namespace() for _ in range(count)]
    ready = all(space.ready for space in made)
    try:
        if ready:
            yield made
    finally:
        said = [space.close() for space in made]
    if not ready:
        pytest.skip(f"network namespaces cannot be made here: {said[0]}")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        made.environment |= {
            "BPSX_CACHE_DIR": os.environ["BPSX_CACHE_DIR"],
            "BYTEPS_SOCKET_PATH": str(tmp_path),
        }
        yield made


def join(first: Namespace, second: Namespace) -> None:
    """Connect the two namespaces: each gets an interface ``cable``."""
    first.ip(f"link add cable type veth peer name cable netns {second.pid}")
    for space in (first, second):
        space.ip("link set cable up")


def dead(space: Namespace) -> None:
    """Add an interface with an address that leads nowhere, because its other end is down."""
    space.ip("link add aaa type veth peer name zzz")
    space.ip("addr add 10.77.0.1/24 dev aaa")
    space.ip("link set aaa up")


def job(
    launcher: Launcher, here: Namespace, there: Namespace, uri: str, **more: str
) -> tuple[str, tuple[int, list[str], list[str]]]:
    """Run scheduler and worker here, the server there.

    Returns the server's log lines about its address, and the worker's result.
    """
    common = {**COMMON, "DMLC_PS_ROOT_URI": uri, **more}
    scheduler = launcher.start(here.within(*words()), {**common, "DMLC_ROLE": "scheduler"})
    server = launcher.start(there.within(*words()), {**common, "DMLC_ROLE": "server"})
    worker = launcher.start(
        here.within(*words(PY, "-c", SUM)), {**common, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0"}
    )
    found = finish(worker)
    status, _, said = finish(server)
    assert (status, finish(scheduler)[0]) == (0, 0)
    return next(line for line in said if "server 0: " in line), found


def test_a_dead_interface_comes_first(launcher: Launcher) -> None:
    with namespaces(2) as (here, there):
        for space in (here, there):
            dead(space)  # an interface that a choice of the first one would take, like docker0
        join(here, there)
        here.ip("addr add 10.78.0.1/24 dev cable")
        there.ip("addr add 10.78.0.2/24 dev cable")
        said, (status, out, _) = job(launcher, here, there, "10.78.0.1")
        assert (status, out) == (0, ["7.0"])
        assert "server 0: 10.78.0.2:" in said


@pytest.mark.parametrize(
    "more", [{}, {"DMLC_INTERFACE": "cable"}], ids=["by route", "by interface"]
)
def test_ipv6_only(launcher: Launcher, more: dict[str, str]) -> None:
    with namespaces(2) as (here, there):
        join(here, there)
        here.ip("addr add fd77::1/64 dev cable nodad")
        there.ip("addr add fd77::2/64 dev cable nodad")
        said, (status, out, _) = job(launcher, here, there, "fd77::1", **more)
        assert (status, out) == (0, ["7.0"])
        assert "server 0: [fd77::2]:" in said


def test_loopback_only(launcher: Launcher) -> None:
    with namespaces(1) as (space,):
        whole = launcher.start(space.within(*local_words("--workers", "1", PY, "-c", SUM)))
        assert finish(whole) == (0, ["[worker 0] 7.0"], [])
        status, out, _ = finish(launcher.start(space.within(*words("doctor"))))
        assert status == 0
        assert any("own address: none but loopback" in line for line in out)


def test_a_loopback_address_among_others_gets_a_warning(launcher: Launcher) -> None:
    with namespaces(1) as (space,):
        dead(space)
        environment = {
            **COMMON,
            "DMLC_PS_ROOT_URI": "10.77.0.1",
            "DMLC_NODE_HOST": "127.0.0.1",
            "BPSX_RENDEZVOUS_TIMEOUT": "1",
        }
        _, _, err = finish(
            launcher.start(space.within(*words()), {**environment, "DMLC_ROLE": "server"})
        )
        assert any(
            "the scheduler's address 10.77.0.1 is not: other machines cannot reach" in line
            for line in err
        )
