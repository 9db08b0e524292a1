"""Messages of processes that wait for a scheduler, and of a scheduler whose address others cannot
reach.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from bpsx.config import Config
from bpsx.scheduler.waiting import doubtful_name
from support.jobs import Process

_JOB = {
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_NUM_WORKER": "1",
    "DMLC_NUM_SERVER": "1",
    "BYTEPS_FORCE_DISTRIBUTED": "1",
    "BPSX_RENDEZVOUS_TIMEOUT": "1",
}


def environment(role: str, port: int) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_", "PS_")) or k == "BPSX_CACHE_DIR"
    }
    return {
        **kept,
        **_JOB,
        "DMLC_ROLE": role,
        "DMLC_WORKER_ID": "0",
        "DMLC_PS_ROOT_PORT": str(port),
    }


@contextlib.contextmanager
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made.getsockname()[1]


@contextlib.contextmanager
def nobody() -> Any:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield closed.getsockname()[1]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            nobody,
            (
                "no process listens there yet, or a firewall rejects the connection; 127.0.0.1 is"
                " a loopback address, which means this machine"
            ),
        ),
        (listener, "the process that listens there is not a scheduler"),
    ],
)
@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_scheduler_that_does_not_reply_has_a_message_of_its_own(role, what, said):
    command = {"worker": ["-c", "import bpsx; bpsx.init()"], "server": ["-m", "bpsx.server"]}[role]
    with what() as port:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment(role, port),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (
        done.returncode
        and f"no reply from the scheduler at 127.0.0.1:{port}: {said}" in done.stderr
    ), done.stderr


def test_a_role_started_by_hand_says_what_it_is_and_what_it_waits_for():
    with nobody() as port:
        pass
    roles = [
        Process(
            role,
            [sys.executable, "-m", module],
            environment(role, port) | {"BPSX_RENDEZVOUS_TIMEOUT": "60"},
        )
        for role, module in (("scheduler", "bpsx.scheduler"), ("server", "bpsx.server"))
    ]
    try:
        roles[0].wait_for_line(
            f"bpsx scheduler: listening on 127.0.0.1:{port}, waiting for 1 worker machine and 1"
            " server for at most 60 s"
        )
        roles[1].wait_for_line(
            "bpsx server: joining the job of 1 worker machine and 1 server at the scheduler"
            f" 127.0.0.1:{port}"
        )
        # After ten seconds, both sides report that others cannot reach a loopback address.
        roles[0].wait_for_line(
            "(the scheduler listens on loopback, DMLC_PS_ROOT_URI=127.0.0.1, which other machines"
            " cannot reach)",
            30,
        )
        roles[1].wait_for_line("which other machines cannot reach)", 30)
    finally:
        for process in roles:
            process.end()


def test_a_name_of_this_machine_that_resolves_to_loopback_gets_a_warning(monkeypatch):
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))],
    )
    assert "DMLC_PS_ROOT_URI=node7 is a loopback address on this machine" in doubtful_name(
        Config({"DMLC_PS_ROOT_URI": "node7"})
    )
    for fine in ("localhost", "127.0.0.1", "::1"):
        assert not doubtful_name(Config({"DMLC_PS_ROOT_URI": fine}))
