"""torchrun's agents on separate machines: network namespaces, each with its own host name and
/etc/hosts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_torch_restart import train

from bench.network import Links, why_not

_WHY_NOT = why_not() or ("" if shutil.which("unshare") else "not installed: unshare")
pytestmark = [pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT), pytest.mark.timeout(300)]
MACHINES = ("alpha", "beta")
#: Takes a host name, a file to use as /etc/hosts, and a command. ``ip netns exec`` has already made
#: a mount namespace.
_AS_MACHINE = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Both(Links):
    """Two machines with IPv4 and IPv6."""

    def __init__(self) -> None:
        super().__init__(MACHINES)
        self.address6 = {name: f"fd00:214:9::{i + 1}" for i, name in enumerate(MACHINES)}

    def _make(self) -> None:
        super()._make()
        for name, address in self.address6.items():
            self._ip(name, "addr", "add", f"{address}/64", "dev", "net0", "nodad")

    def prefixes(self, folder: Path, family: dict[str, str]) -> list[list[str]]:
        """Return a command prefix per machine.

        As on many systems, each machine resolves its own name to a loopback address, and the
        other's to an address in ``family``.
        """
        found = []
        for name in MACHINES:
            hosts = folder / f"hosts-{name}"
            hosts.write_text(
                "127.0.0.1 localhost\n"
                + "".join(f"{'127.0.1.1' if n == name else family[n]} {n}\n" for n in MACHINES)
            )
            found.append(
                [*self.prefix(name), "unshare", "--uts", "sh", "-c", _AS_MACHINE, name, str(hosts)]
            )
        return found


@pytest.fixture(scope="module")
def net() -> Iterator[Both]:
    with Both() as made:
        yield made


def test_machines_that_know_each_other_by_name(tmp_path: Path, net: Both) -> None:
    begins = train(
        tmp_path, [], each=(1, 1), endpoint="alpha", prefixes=net.prefixes(tmp_path, net.address)
    )
    assert {facts[4] for facts in begins[0]} <= set(net.address.values()), (
        "the scheduler's address, on the machine of rank 0"
    )


def test_machines_with_ipv6(tmp_path: Path, net: Both) -> None:
    master = net.address6["alpha"]
    begins = train(
        tmp_path, [], each=(1, 1), master=master, prefixes=net.prefixes(tmp_path, net.address6)
    )
    assert {facts[4] for facts in begins[0]} == {master}
