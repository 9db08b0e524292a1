"""Starts a job's scheduler and servers from its workers, if no launcher has started them.

They end as all schedulers and servers do, when the job is over. Before the job has begun, they
could not learn that their worker is gone. So each holds one end of a socket pair, the lifeline,
whose other end only that worker holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

from bpsx.config import child_environment
from bpsx.errors import RendezvousError
from bpsx.system.host import SCRIPT_SIGNALS

#: Roles that are modules of bpsx: each has a ``__main__`` with ``main() -> int``.
MODULES = {"scheduler": "bpsx.scheduler", "server": "bpsx.server"}


def module_command(role: str) -> list[str]:
    """Return the command that runs ``role``.

    ``-P`` keeps the current folder off the path, which may hold a ``queue.py``.
    """
    return [sys.executable, "-P", "-m", MODULES[role]]


class Companions:
    """The processes that this worker has started for its present job. Not thread-safe."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[socket.socket] = []
        os.register_at_fork(after_in_child=self._let_go)

    def start_scheduler(self, host: str, environment: dict[str, str], timeout: float) -> int:
        """Start a scheduler on ``host``; returns its port.

        ``environment``: variables added to this process's own. Waits for an earlier job's scheduler
        to end, as all workers have left it.

        Raises :class:`~bpsx.errors.RendezvousError` if it does not listen within ``timeout``
        seconds.
        """
        for earlier in self._processes:  # it may still hold BPSX_METRICS_PORT
            with contextlib.suppress(subprocess.TimeoutExpired):
                earlier.wait(timeout)
        process = self._start(
            "scheduler", {**environment, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": "0"}
        )
        lifeline = self._lifelines[-1]
        lifeline.settimeout(timeout)
        try:
            port = lifeline.recv(16)
        except TimeoutError:
            raise RendezvousError(
                f"the scheduler that this worker started on {host} does not listen after"
                f" {timeout:g} s"
            ) from None
        if not port:
            raise RendezvousError(
                f"the scheduler that this worker started on {host} ended with status"
                f" {process.wait()}; its output says why"
            )
        return int(port)

    def start_server(self, environment: dict[str, str]) -> None:
        """Start a server with ``environment`` added to this process's own."""
        self._start("server", environment)

    def _start(self, role: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        # poll() reaps the processes of an earlier job.
        self._processes = [p for p in self._processes if p.poll() is None]
        ours, theirs = socket.socketpair()
        self._lifelines.append(ours)
        with theirs:
            # A session of its own: a signal to the workers' process group then leaves the process
            # time to report how the job ended. The signals stay blocked until it ignores them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SCRIPT_SIGNALS)
            try:
                process = subprocess.Popen(
                    module_command(role),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=child_environment(
                        **environment,
                        DMLC_ROLE=role,
                        BPSX_ANNOUNCE="0",
                        BPSX_LIFELINE_FD=str(theirs.fileno()),
                    ),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        return process

    def release(self) -> None:
        """Close the lifelines: the job has begun, or will never begin.

        Not to be called right after init, as a server may be slower to join.
        """
        for lifeline in self._lifelines:
            lifeline.close()
        self._lifelines = []

    def _let_go(self) -> None:
        """In a forked child: close the lifelines and forget the processes, its siblings."""
        self.release()
        self._processes = []
