"""Choice of an RDMA adapter, port and GID, from the kernel's table in /sys, without a library.

An Ethernet port (RoCE) has GIDs for the addresses of its network interfaces, one per version of
RoCE. On InfiniBand the first GID is the port's own. The chosen GID is that of this machine's own
address, with RoCE v2 before v1. If no GID matches, as for a loopback address, and there is only one
port, it is that port's best GID.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from bpsx.errors import TransportError

_ROOT = Path("/sys/class/infiniband")
#: A GID table has up to some thousand entries, nearly all of them empty; used ones come first.
_EMPTY_IN_A_ROW = 16


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table."""

    index: int
    value: str  # as an IPv6 address
    kind: str  # "RoCE v2", "IB/RoCE v1"
    interface: str  # network interface of the GID; empty: none

    @property
    def address(self) -> str:
        """Address of the GID; an IPv4 address if the GID is a mapped one."""
        found = ipaddress.IPv6Address(self.value)
        return str(found.ipv4_mapped or found)

    @property
    def order(self) -> tuple[bool, bool, int]:
        """Sort key, best first: RoCE v2, then not link-local, then the lowest index."""
        return self.kind != "RoCE v2", ipaddress.IPv6Address(self.value).is_link_local, self.index


@dataclass(frozen=True)
class Port:
    """An active port of an adapter."""

    adapter: str
    number: int
    ethernet: bool
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return f"{self.adapter}:{self.number}"

    @property
    def best(self) -> Gid:
        return min(self.gids, key=lambda gid: gid.order) if self.ethernet else self.gids[0]

    def __str__(self) -> str:
        return (
            f"{self.name}"
            f" ({', '.join(f'GID {g.index} {g.address} {g.kind}' for g in self.gids) or 'no GID'})"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an unused entry has no type
        return ""


def _gids(port: Path) -> tuple[Gid, ...]:
    found, empty, index = [], 0, 0
    while empty < _EMPTY_IN_A_ROW and (value := _read(port / "gids" / str(index))):
        if int(value.replace(":", "") or "0", 16):
            found.append(
                Gid(
                    index,
                    value,
                    _read(port / "gid_attrs" / "types" / str(index)),
                    _read(port / "gid_attrs" / "ndevs" / str(index)),
                )
            )
            empty = 0
        else:
            empty += 1
        index += 1
    return tuple(found)


def ports(root: Path = _ROOT) -> list[Port]:
    """Return the active ports of this machine.

    Raises :class:`~bpsx.errors.TransportError`, which says what is missing, if there is none.
    """
    names = sorted(os.listdir(root)) if root.is_dir() else []
    if not names:
        raise TransportError(
            "this machine has no RDMA adapter (none in /sys/class/infiniband). If it should have"
            " one, load the adapter's driver; otherwise set DMLC_ENABLE_RDMA to 0 or tcp"
        )
    found, silent = [], []
    for name in names:
        for number in sorted((root / name / "ports").iterdir(), key=lambda path: int(path.name)):
            if "ACTIVE" in _read(number / "state"):
                found.append(
                    Port(
                        name,
                        int(number.name),
                        _read(number / "link_layer") == "Ethernet",
                        _gids(number),
                    )
                )
            else:
                silent.append(
                    f"{name}:{number.name} is"
                    f" {_read(number / 'state').rpartition(' ')[2] or 'unknown'}"
                )
    if not found:
        raise TransportError(f"no port of an RDMA adapter is active: {', '.join(silent)}")
    return found


def choose(
    host: str, adapter: str = "", index: int | None = None, root: Path = _ROOT
) -> tuple[Port, Gid]:
    """Return the port and GID of the machine's address ``host``.

    ``adapter`` ("mlx5_0", or "mlx5_0:1" with a port) restricts the choice, if not empty. ``index``
    is the GID's index in the port's table, if not None.

    Raises :class:`~bpsx.errors.TransportError`, which lists the ports, if there is no match.
    """
    there = ports(root)
    wanted = [port for port in there if adapter in ("", port.adapter, port.name)]
    listed = "; ".join(map(str, there))
    if not wanted:
        raise TransportError(
            f"BPSX_RDMA_DEVICE={adapter}: no active port has that name; active ports: {listed}"
        )
    if index is not None:
        for port in wanted:
            for gid in port.gids:
                if gid.index == index:
                    return port, gid
        raise TransportError(
            f"BPSX_RDMA_GID_INDEX={index}: no GID has that index; active ports: {listed}"
        )
    own = _plain(host)
    matching = [(port, gid) for port in wanted for gid in port.gids if gid.address == own]
    if matching:
        return min(matching, key=lambda pair: pair[1].order)
    if len(wanted) == 1 and wanted[0].gids:
        return wanted[0], wanted[0].best
    raise TransportError(
        f"cannot tell which RDMA adapter belongs to {host}, because no GID matches: name the"
        f" adapter with BPSX_RDMA_DEVICE; active ports: {listed}"
    )


def _plain(host: str) -> str:
    try:
        found = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)
