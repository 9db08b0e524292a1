"""Which RDMA adapter, port and GID to use: read from the kernel's table in /sys, without any
library.

An Ethernet port (RoCE) has GIDs that stand for the addresses of its network interfaces, one for
each version of RoCE; on InfiniBand the first GID is the port's own. What is chosen is the GID of
the own address, RoCE v2 before v1; where no GID stands for it, as with a loopback address, the best
one of the only port there is.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from bpsx.errors import TransportError

_ROOT = Path("/sys/class/infiniband")
#: GID tables have up to some thousand entries, nearly all of them empty; used ones come first.
_EMPTY_IN_A_ROW = 16


@dataclass(frozen=True)
class Gid:
    """An entry of a port's table."""

    index: int
    value: str  # as an IPv6 address
    kind: str  # "RoCE v2", "IB/RoCE v1"
    interface: str  # the network interface that it belongs to; empty: none

    @property
    def address(self) -> str:
        """What it stands for: an IPv4 address if it is a mapped one."""
        found = ipaddress.IPv6Address(self.value)
        return str(found.ipv4_mapped or found)

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The best first: RoCE v2, addresses that leave the link, the first."""
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
    except OSError:  # an entry that is not used has no type
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
    """The active ports of this machine.

    Raises :class:`~bpsx.errors.TransportError` where there is none, saying what is missing.
    """
    names = sorted(os.listdir(root)) if root.is_dir() else []
    if not names:
        raise TransportError(
            "there is no RDMA adapter on this machine (/sys/class/infiniband has none): with one,"
            " is its driver loaded? Else DMLC_ENABLE_RDMA=0 or tcp"
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
    """The port and GID for who has the address ``host``; of ``adapter`` ("mlx5_0", or "mlx5_0:1"
    for a port), and number ``index`` of its table, where those are given.

    Raises :class:`~bpsx.errors.TransportError` listing what there is.
    """
    there = ports(root)
    wanted = [port for port in there if adapter in ("", port.adapter, port.name)]
    listed = "; ".join(map(str, there))
    if not wanted:
        raise TransportError(
            f"BPSX_RDMA_DEVICE={adapter}: no active port of that name; there are: {listed}"
        )
    if index is not None:
        for port in wanted:
            for gid in port.gids:
                if gid.index == index:
                    return port, gid
        raise TransportError(
            f"BPSX_RDMA_GID_INDEX={index}: no GID of that number; there are: {listed}"
        )
    own = _plain(host)
    matching = [(port, gid) for port in wanted for gid in port.gids if gid.address == own]
    if matching:
        return min(matching, key=lambda pair: pair[1].order)
    if len(wanted) == 1 and wanted[0].gids:
        return wanted[0], wanted[0].best
    raise TransportError(
        f"which RDMA adapter belongs to {host} cannot be seen from their GIDs: name it with"
        f" BPSX_RDMA_DEVICE; there are: {listed}"
    )


def _plain(host: str) -> str:
    try:
        found = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)
