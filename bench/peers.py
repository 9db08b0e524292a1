"""Peers of bpsx and upper bounds of the machine, measured in processes that this one drives."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.jobs import Child, ask_all, closing_all
from bench.network import Links


@contextlib.contextmanager
def gloo(
    size: int = 2, module: str = "bench.gloo_peer", links: Links | None = None
) -> Iterator[list[Child]]:
    """Context manager of a gloo job of ``size`` processes.

    Between commands its processes block in a read, so that the job may stay up while bpsx is
    measured. ``links``: the network in which they run in the workers' places.
    """
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if links is None else "net0"}
    made = (
        Child(
            module,
            f"gloo {i}",
            prefix=() if links is None else links.prefix(f"worker {i}"),
            **quiet,
        )
        for i in range(size)
    )
    with tempfile.TemporaryDirectory(prefix="bpsx-bench-") as folder, closing_all(made) as group:
        store = str(Path(folder) / "store")
        for rank, child in enumerate(group):
            child.tell("init", store=store, rank=rank, size=size)
        for child in group:
            child.answer()
        yield group


@contextlib.contextmanager
def walls() -> Iterator[tuple[Child, Child]]:
    """Start two processes of :mod:`bench.wall_peer`: one serves, the other measures."""
    with closing_all(Child("bench.wall_peer", f"wall {i}") for i in range(2)) as (server, client):
        yield server, client


def echo(server: Child, client: Child, size: int, flight: int, count: int) -> list[float]:
    """Return the seconds per round trip of a bare ZeroMQ echo.

    ``flight`` messages of ``size`` bytes are in flight at a time.
    """
    port = server.ask("echo_bind")
    server.tell("echo")
    seconds = client.ask("echo_client", port=port, size=size, flight=flight, count=count)
    server.answer()
    return [float(s) for s in seconds]


def tcp_rate(server: Child, client: Child, seconds: float) -> float:
    """Return the bytes per second, one way, through a plain socket on loopback, written 1 MiB at a
    time.
    """
    port = server.ask("tcp_bind")
    server.tell("tcp_receive")
    client.ask("tcp_send", port=port, seconds=seconds)
    return float(server.answer())


def tcp_together(pairs: Sequence[tuple[Child, Child]], seconds: float) -> float:
    """Return the bytes per second of all ``pairs``, as :func:`tcp_rate`, at the same time."""
    ports = [server.ask("tcp_bind") for server, _ in pairs]
    for server, _ in pairs:
        server.tell("tcp_receive")
    for port, (_, client) in zip(ports, pairs):
        client.tell("tcp_send", port=port, seconds=seconds)
    for _, client in pairs:
        client.answer()
    return sum(float(server.answer()) for server, _ in pairs)


def memcpy_rate(client: Child, size: int, count: int) -> float:
    """Return the bytes per second of copying ``size`` bytes on one core, between buffers no cache
    holds.
    """
    return float(client.ask("memcpy", size=size, count=count))


def memcpy_together(processes: int, size: int, count: int) -> float:
    """Return the total bytes per second of several processes that copy at once."""
    with closing_all(Child("bench.wall_peer", f"wall {i}") for i in range(processes)) as children:
        return sum(map(float, ask_all(children, "memcpy", size=size, count=count)))


def slowest(children: list[Child], op: str, **arguments: Any) -> list[float]:
    """Return, for each call, the seconds of the slowest child."""
    return [max(both) for both in zip(*ask_all(children, op, **arguments))]
