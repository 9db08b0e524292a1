"""Data that a process without the job secret sends to a port: nothing, arbitrary bytes, and the
beginnings of ZeroMQ's handshake.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"


def greeting(version: int, mechanism: bytes, as_server: bool = False) -> bytes:
    """Return the first 64 bytes of ZMTP 3."""
    return (
        _SIGNATURE
        + bytes([version, 0])
        + mechanism.ljust(20, b"\0")
        + bytes([as_server])
        + bytes(31)
    )


def command(name: bytes, body: bytes = b"", claimed: int | None = None) -> bytes:
    """Return a handshake command in a long frame whose header claims ``claimed`` bytes."""
    content = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(content) if claimed is None else claimed) + content


SCAN = [
    b"",
    b"\0",
    b"\xff" * 10_000,
    bytes(range(256)) * 40,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    bytes.fromhex("1603010200010001fc0303") + bytes(508),  # a TLS hello
    # ZMTP 1 and 2
    b"\x01\0",
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05",
    _SIGNATURE + b"\0",
    *(
        greeting(v, m)
        for v in (3, 4, 255)
        for m in (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20)
    ),
    greeting(3, b"PLAIN") + command(b"HELLO", b"\x010\x040000"),
    greeting(3, b"PLAIN") + command(b"HELLO", b"\xff" + b"0" * 300),
    greeting(3, b"PLAIN") + command(b"INITIATE"),
    greeting(3, b"CURVE") + command(b"HELLO", b"\x01\0" + bytes(192)),
    greeting(3, b"CURVE") + command(b"HELLO", bytes(10)),
    greeting(3, b"CURVE") + command(b"INITIATE", bytes(500)),
    *(
        greeting(3, m) + command(b"HELLO", bytes(64), n)
        for m in (b"PLAIN", b"CURVE")
        for n in (2**20, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
    ),
    greeting(3, b"NULL")
    + command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER")
    + b"\0\x05hello" * 1000,
]


def scan(port: int, host: str = "127.0.0.1") -> None:
    """Send each entry of :data:`SCAN` to a port on a separate connection, and read the reply."""
    for data in SCAN:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 10) as s:
            s.sendall(data)
            s.settimeout(0.02)
            s.recv(1000)


_HOLD = """
import json, socket, sys
ports, n, first = json.loads(sys.argv[1])
held = []
for i in range(n):
    s = socket.socket()
    s.bind((f"127.0.{first + i // 20000}.2", 0))
    s.settimeout(60)
    s.connect(("127.0.0.1", ports[i % len(ports)]))
    if i % 3 == 1:
        s.send(b"\\xff\\0\\0\\0\\0\\0\\0\\0\\x01\\x7f")
    if i % 3 == 2:
        s.send(b"\\xff\\0\\0\\0\\0\\0\\0\\0\\x01\\x7f\\x03\\0PLAIN" + bytes(47))
    held.append(s)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def half_open(ports: list[int], n: int) -> Iterator[None]:
    """Hold ``n`` connections open, spread over ``ports``, that never finish their handshake."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, json.dumps([ports, n, 1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield
    finally:
        holder.kill()
        holder.communicate()


def descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memory(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100
