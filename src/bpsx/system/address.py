"""Hosts and ports: parsing, formatting, resolving, and finding this machine's addresses.

No ZeroMQ here.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
# Default send buffers, in bytes. On loopback, data in flight stays in the caches
# (docs/decisions/0003); on a link, data queued in the buffer delays later data (0016).
_LOOPBACK_SEND_BUFFER = 448 << 10
NETWORK_SEND_BUFFER = 224 << 10


def is_ipv6(host: str) -> bool:
    """Whether ``host`` is an IPv6 literal (with or without brackets)."""
    return ":" in host


def bracketed(host: str) -> str:
    """Format ``host`` for a URL: IPv6 literals in brackets."""
    return f"[{host.strip('[]')}]" if is_ipv6(host) else host


def join_host_port(host: str, port: int) -> str:
    """Format ``host:port``, with brackets around an IPv6 literal."""
    return f"{bracketed(host)}:{port}"


def tcp_url(host: str, port: int | str) -> str:
    """Format a TCP address for ZeroMQ."""
    return f"tcp://{bracketed(host)}:{port}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` resolves to loopback addresses only."""
    try:
        infos = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(info[4][0]).split("%")[0]).is_loopback for info in infos)


def send_buffer_bytes(host: str, given: int | None) -> int:
    """Send buffer in bytes for a connection with ``host`` at one end; 0 lets the system decide.

    ``given`` takes precedence; None means the default for the address.
    """
    if given is not None:
        return given
    return _LOOPBACK_SEND_BUFFER if is_loopback(host) else NETWORK_SEND_BUFFER


def resolve(host: str, port: int) -> str:
    """Resolve ``host`` to an address. Raises :class:`OSError` if there is none."""
    infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return str(infos[0][4][0])


def interface_address(name: str, v6: bool = False) -> str:
    """The address of network interface ``name``: IPv4 if it has one, unless ``v6``.

    Raises :class:`OSError` naming the interfaces that exist.
    """
    second = [address for interface, address in inet6_addresses() if interface == name]
    if v6 and second:
        return second[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("256s", name.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as e:
            if second:
                return second[0]
            known = ", ".join(n for _, n in socket.if_nameindex())
            raise OSError(
                f"interface {name!r} has no address or does not exist; interfaces here: {known}"
            ) from e


def inet6_addresses() -> list[tuple[str, str]]:
    """(interface, address) of each IPv6 address of this machine, loopback's included.

    Leaves out link-local addresses, which others cannot reach without naming an interface.
    """
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []
    found = [
        (words[5], ipaddress.IPv6Address(int(words[0], 16)))
        for words in (line.split() for line in lines)
    ]
    return [(name, str(address)) for name, address in found if not address.is_link_local]


def own_address_towards(host: str, port: int) -> str:
    """The source address from which this machine reaches ``host``. Sends no packet."""
    family = socket.AF_INET6 if is_ipv6(resolve(host, port)) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((host.strip("[]"), port or 9))
        return str(s.getsockname()[0])


def is_here(address: str) -> bool:
    """Whether ``host:port`` is on this machine, so that data to it crosses no link.

    That is so if this machine's source address towards it is the same address. Sends no packet.
    """
    host, _, port = address.rpartition(":")
    try:
        target = ipaddress.ip_address(resolve(host, int(port)))
        return (
            target.is_loopback
            or ipaddress.ip_address(own_address_towards(str(target), int(port))) == target
        )
    except OSError:
        return False
