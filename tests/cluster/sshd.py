"""A private sshd on loopback, with its own port, host key and configuration in a test's folder.

It uses no files of the system or the user: the user's ~/.bashrc, which bash reads under sshd, could
print lines that a test would take for output of bpsx-run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher, words

_SERVER = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AllowAgentForwarding no
SetEnv HOME={folder}
"""


@dataclass
class Sshd:
    """A running sshd. ``ssh``: the command to reach it; ``known`` has its host key."""

    port: int
    known: Path
    words: list[str]

    @property
    def ssh(self) -> str:
        return shlex.join(self.words)


def _why_not() -> str:
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"no {program} here: apt-get install openssh-server"
    if _sshd() is None:
        return "no sshd here: apt-get install openssh-server"
    return ""


def _sshd() -> str | None:
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start sshd. It does not accept port 0, so another port is tried if one is taken."""
    program = _sshd()
    assert program
    for _ in range(5):
        port = _free_port()
        (folder / "sshd_config").write_text(_SERVER.format(port=port, folder=folder))
        log = (folder / "sshd.log").open("wb")
        process = subprocess.Popen(
            [program, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        log.close()
        for _ in range(200):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=5) as s,
            ):
                if s.recv(4) == b"SSH-":
                    return process, port
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                break
        process.kill()
        process.wait()
    pytest.skip(
        "sshd does not start here: " + (folder / "sshd.log").read_text(errors="replace")[-300:]
    )


@contextlib.contextmanager
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """Run an sshd; skips with the reason if that is not possible."""
    if reason := _why_not():
        pytest.skip(reason)
    if os.getuid() == 0:
        # Path that is compiled into sshd; the system creates it when it starts its own sshd.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    process, port = _start(folder)
    try:
        known = folder / "known_hosts"
        known.write_text(f"[127.0.0.1]:{port} " + (folder / "host_key.pub").read_text())
        config = folder / "config"
        config.write_text(
            f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nUserKnownHostsFile"
            f" {known}\nGlobalKnownHostsFile none\n"
        )
        yield Sshd(port, known, ["ssh", "-F", str(config)])
    finally:
        process.terminate()
        process.wait()


def start(
    launcher: Launcher,
    server: Sshd,
    hosts: str,
    *rest: str,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a job over ssh. HOST in ``hosts``, a hostfile's text, stands for the sshd."""
    file = launcher.folder.parent / "hosts"
    file.write_text(hosts.replace("HOST", f"127.0.0.1:{server.port}"))
    # The mark identifies remote processes; their temporary files go where the test looks.
    mine = ["--env", launcher.mark, "--env", f"TMPDIR:{launcher.folder}"]
    return launcher.start(
        words("--hostfile", str(file), "--ssh", server.ssh, *mine, *rest), environment, **options
    )
