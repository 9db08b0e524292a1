"""The back end over ssh: a job on the hosts of a hostfile."""

from __future__ import annotations

import argparse
import re

from bpsx.launch.arguments import given, whole
from bpsx.launch.backend import Backend, Plan
from bpsx.launch.ssh.hostfile import read
from bpsx.launch.ssh.plan import Remote


class Ssh(Backend):
    """The back end over ssh. See :class:`~bpsx.launch.backend.Backend`."""

    label = "a hostfile"
    chosen_by = ("hostfile", "worker_hostfile", "server_hostfile")
    own = (
        "scheduler_ip",
        "env",
        "username",
        "ssh_port",
        "ssh",
        "interface",
        "python",
        "directory",
        "port",
        "max_restarts",
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """See :class:`~bpsx.launch.backend.Backend`."""
        add = parser.add_argument_group("over ssh").add_argument
        add("--hostfile", "-H", metavar="FILE", help="file of hosts and what they run, see below")
        add("--worker-hostfile", "-WH", metavar="FILE", help="file of hosts that run a worker each")
        add("--server-hostfile", "-SH", metavar="FILE", help="file of hosts that run a server each")
        add(
            "--scheduler-ip",
            metavar="A",
            help="the scheduler's address for the other hosts, and its host if no file names one",
        )
        add(
            "--env",
            action="append",
            type=assignment,
            metavar="K=V",
            help="a variable for all processes, also as K:V; may be repeated",
        )
        add("--username", metavar="U", help="the user's name on the hosts")
        add(
            "--ssh-port",
            "--scheduler-ssh-port",
            type=whole(1, 65535),
            metavar="P",
            help="ssh's port of hosts for which the file names none",
        )
        add(
            "--interface",
            metavar="I",
            help="the network interface to use on all hosts (DMLC_INTERFACE)",
        )
        add(
            "--python",
            metavar="PATH",
            help="the Python on the hosts that has bpsx (default: the path of this one)",
        )
        add(
            "--directory",
            metavar="D",
            help="the workers' folder (default: the folder of the same name as here)",
        )
        add("--ssh", metavar="WORDS", help='the ssh command and its options, such as "ssh -F FILE"')

    def plan(self, options: argparse.Namespace, command: tuple[str, ...]) -> Plan:
        """See :class:`~bpsx.launch.backend.Backend`."""
        files = [
            (file, role)
            for name, role in zip(self.chosen_by, ("", "worker", "server"))
            if (file := getattr(options, name)) is not None
        ]
        more = given(options, (*self.own, "grace"))
        address = more.pop("scheduler_ip", "")
        variables = dict(more.pop("env", ()))
        return Remote(command, read(files, address), address.strip("[]"), given=variables, **more)


def assignment(text: str) -> tuple[str, str]:
    """Split an ``--env`` argument into name and value; refuses the job secret."""
    match = re.fullmatch(r"([A-Za-z_]\w*)[=:](.*)", text, re.DOTALL | re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE or NAME:VALUE")
    if match[1] == "BPSX_SECRET":
        raise argparse.ArgumentTypeError(
            "every user of this machine can read BPSX_SECRET on a command line: export it before"
            " you start bpsx-run, or name a file with BPSX_SECRET_FILE; without either, bpsx-run"
            " makes a secret"
        )
    return match[1], match[2]
