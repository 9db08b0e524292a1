"""Foreign processes on the machine and the network: they occupy names, use up descriptors, and
replay overheard greetings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket
import threading
import time
from argparse import ArgumentTypeError

import pytest

from bpsx.launch.ssh.backend import assignment
from bpsx.transports.shm import handshake
from bpsx.transports.sockets import listener
from cluster.strangers import command, greeting, memory
from support.jobs import Job

_KEY = b"a secret for these tests"


def test_an_occupied_name_that_accepts_no_connection_does_not_delay_a_worker(caplog):
    address = f"127.0.0.1:{os.getpid()}-held"
    with socket.socket(socket.AF_UNIX) as squatter, contextlib.ExitStack() as stack:
        squatter.bind(f"\0bpsx-lane {address}")
        squatter.listen(0)
        for _ in range(4):  # until its queue is full
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            if waiting.connect_ex(f"\0bpsx-lane {address}"):
                break
        else:
            raise AssertionError("the queue of connections has no end")
        found: list[object] = []

        def visit() -> None:
            with handshake.visit(address, _KEY, 1, 0, 0) as visited:
                found.append(visited)

        with caplog.at_level(logging.WARNING):
            visitor = threading.Thread(target=visit, daemon=True)
            visitor.start()
            visitor.join(60)
        assert not visitor.is_alive() and found == [None]
    assert "accepts no connections, so messages go through the network" in caplog.text


def test_an_overheard_greeting_cannot_be_used_again():
    taken: list[int] = []
    with opened_gate(taken) as address, contextlib.ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        worker, thief = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(2)
        )
        near, far = socket.socketpair()
        with near, far:
            # The worker's side of the greeting, up to its proof.
            far.sendall(worker.recv(32, socket.MSG_WAITALL))
            listener.greet(near, _KEY, 7, address, 3)
            overheard = far.recv(4096)
        thief.recv(32, socket.MSG_WAITALL)
        thief.sendall(overheard)
        assert thief.recv(1) == b""  # refused, although it came first
        assert taken == []
        worker.sendall(overheard)
        assert worker.recv(1) == b"" and taken == [3]  # `taken` closes each socket that it gets


@contextlib.contextmanager
def opened_gate(taken: list[int]) -> object:
    bound = listener.listen("127.0.0.1")
    made = listener.Acceptor(bound, _KEY, lambda s, rank: (taken.append(rank), s.close()))
    address = f"127.0.0.1:{bound.getsockname()[1]}"
    made.open(7, address)
    try:
        yield address
    finally:
        made.close()


def readable(*sockets: socket.socket) -> bool:
    """Return whether a socket has data or is closed. Descriptors may exceed select's 1024."""
    asked = select.poll()
    for s in sockets:
        asked.register(s, select.POLLIN)
    return bool(asked.poll(0))


def test_connections_that_do_not_greet_are_capped_far_below_the_limit_of_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2048, 2048))
    taken: list[int] = []
    with opened_gate(taken) as address, contextlib.ExitStack() as stack:
        before, port = len(os.listdir("/proc/self/fd")), int(address.rpartition(":")[2])
        strangers = []
        for i in range(200):
            s = stack.enter_context(socket.socket())
            s.bind((f"127.0.{1 + i % 2}.7", 0))
            s.connect(("127.0.0.1", port))
            strangers.append(s)
        # At most 128 connections, 32 of each address: those of other addresses are closed, oldest
        # first.
        for s in strangers[: 200 - 64]:
            s.settimeout(20)
            assert len(s.recv(32, socket.MSG_WAITALL)) == 32 and s.recv(1) == b""
        # And the acceptor's own descriptors.
        assert len(os.listdir("/proc/self/fd")) - before <= 200 + 64 + 8
        for s in strangers[200 - 64 :]:
            assert len(s.recv(32, socket.MSG_WAITALL)) == 32 and not readable(s)
        listener.dial(address, _KEY, 7, 5).close()  # a worker is admitted nevertheless
        end = time.monotonic() + 60
        while not taken and time.monotonic() < end:
            time.sleep(0.01)
        assert taken == [5]


def test_clients_of_the_metrics_port_are_capped():
    from bpsx.scheduler import metrics
    from bpsx.scheduler.membership import Membership
    from bpsx.scheduler.observers import Observers

    members = Membership(1, 1, 1, 5, stall_warn=30, deadlock_after=60)
    exporter = metrics.Exporter("127.0.0.1", 0, Observers(members, "127.0.0.1"))
    try:
        with contextlib.ExitStack() as stack:
            idle = [
                stack.enter_context(socket.create_connection(("127.0.0.1", exporter.port), 20))
                for _ in range(100)
            ]
            for s in idle[:68]:  # the oldest are closed long before their time-out of 10 s
                assert s.recv(1) == b""
            assert not readable(*idle[-10:])
            with socket.create_connection(("127.0.0.1", exporter.port), 20) as fine:
                fine.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert fine.recv(100).startswith(b"HTTP/1.0 200")
    finally:
        exporter.close()


@pytest.mark.parametrize(
    "text", ["BPSX_SECRET=nobody may read this one", "BPSX_SECRET:nobody may read this one"]
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(text):
    with pytest.raises(ArgumentTypeError, match="BPSX_SECRET_FILE") as caught:
        assignment(text)
    assert "nobody may" not in str(caught.value)
    assert assignment("BPSX_SECRET_FILE=/x") == ("BPSX_SECRET_FILE", "/x")


def test_a_handshake_of_many_mebibytes_is_not_kept_by_the_scheduler():
    with (
        Job("", workers=0, env={"DMLC_NUM_WORKER": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"}) as job,
        contextlib.ExitStack() as stack,
    ):
        job.servers[0].end()
        before = memory(job.scheduler.popen.pid)
        head, body = greeting(3, b"CURVE") + command(b"HELLO", b"", 40 << 20), bytes(1 << 20)
        for _ in range(5):
            s = stack.enter_context(socket.create_connection(("127.0.0.1", int(job.port)), 20))
            with contextlib.suppress(OSError):  # the connection closes as soon as the size is known
                s.sendall(head)
                for _ in range(39):
                    s.sendall(body)
        assert memory(job.scheduler.popen.pid) - before < 60 << 20
