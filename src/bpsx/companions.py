"""A job's scheduler and servers, started by its workers where no launcher has: as processes that end with the job.

They end as all schedulers and servers do, when the job is over. Before it has begun, nobody would tell them that their worker is gone: so each holds
the reading end of a pipe, the lifeline, whose other end only that worker has.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bpsx.config import child_environment
from bpsx.errors import RendezvousError

#: Roles that are modules of ours: each has a ``__main__`` with ``main() -> int``.
MODULES = {"scheduler": "bpsx.rendezvous", "server": "bpsx.server"}
#: How often the scheduler's port file is looked for. It is there before one could notice.
_LOOK = 0.01


def module_command(role: str) -> list[str]:
    """The command that runs ``role``. ``-P``: the folder we happen to be in may hold a ``queue.py``."""
    return [sys.executable, "-P", "-m", MODULES[role]]


class Companions:
    """The processes that this worker has started for its present job. Not thread-safe."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[int] = []
        os.register_at_fork(after_in_child=self._let_go)

    def start_scheduler(self, host: str, environment: dict[str, str], timeout: float) -> int:
        """Start a scheduler that listens on ``host``, with ``environment`` beside our own; returns its port.

        Raises :class:`~bpsx.errors.RendezvousError` if it does not listen within ``timeout`` seconds.
        """
        with tempfile.TemporaryDirectory(prefix="bpsx-") as folder:
            file = Path(folder) / "port"
            process = self._start("scheduler", {**environment, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": "0", "BPSX_PORT_FILE": str(file)})
            end = time.monotonic() + timeout
            while not file.exists():
                if process.poll() is not None:
                    raise RendezvousError(f"the scheduler that this worker has started on {host} ended with status {process.returncode}; its "
                                          "output says why")
                if time.monotonic() >= end:
                    raise RendezvousError(f"the scheduler that this worker has started on {host} does not listen after {timeout:g} s")
                time.sleep(_LOOK)
            return int(file.read_text())

    def start_server(self, environment: dict[str, str]) -> None:
        """Start a server with ``environment`` beside our own."""
        self._start("server", environment)

    def _start(self, role: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._processes = [p for p in self._processes if p.poll() is None]      # reaps those of an earlier job
        theirs, ours = os.pipe()
        try:
            # In a session of its own, so that a signal to the workers' process group leaves it the time to tell how the job has ended.
            process = subprocess.Popen(
                module_command(role), env=child_environment(**environment, DMLC_ROLE=role, BPSX_LIFELINE_FD=str(theirs)), pass_fds=(theirs,),
                stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._lifelines.append(ours)
        self._processes.append(process)
        return process

    def release(self) -> None:
        """Cut the lifelines: what was started has a job that has begun, or will never have one. Not right after init: a server may be slower."""
        for descriptor in self._lifelines:
            os.close(descriptor)
        self._lifelines = []

    def _let_go(self) -> None:
        """In a forked child: it must not hold a lifeline, and the processes are its siblings."""
        with contextlib.suppress(OSError):
            self.release()
        self._processes = []
