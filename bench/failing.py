"""Jobs that are brought to a stage and then hit by a signal.

Measured are the seconds from the signal to the exceptions on the other processes, and to their end.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.jobs import Child, end_role, port_in, start
from bench.report import BenchError
from bpsx.config import Config
from bpsx.launch.job_view import Observer

STAGES = ("init", "push", "pull", "idle", "shutdown")
ROLES = ("worker", "server", "scheduler")
_WORKERS = 3
_SECONDS = 120.0


@dataclass(frozen=True)
class Outcome:
    """Seconds from the signal until the last waiting call had raised, and until the last other
    process had ended.
    """

    raised: float
    gone: float


class Roles:
    """A scheduler, a server and workers of :mod:`bench.trust_worker` that have not joined yet.

    A context manager.
    """

    def __init__(self, workers: int, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bpsx-bench-")
        self._stack = contextlib.ExitStack()
        self._common = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": "1",
            "BYTEPS_FORCE_DISTRIBUTED": "1",
            "BYTEPS_LOG_LEVEL": "fatal",
            "BPSX_SHUTDOWN_TIMEOUT": "60",
            **environment,
        }
        self._count = workers
        self.workers: list[Child] = []

    def __enter__(self) -> Roles:
        try:
            self.start_roles()
            environment = {**self._common, "DMLC_ROLE": "worker"}
            for i in range(self._count):
                self.workers.append(
                    Child("bench.trust_worker", f"worker {i}", **environment, DMLC_WORKER_ID=str(i))
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_for(self, role: str, count: int) -> None:
        """Wait until the scheduler knows ``count`` nodes of a role.

        The death of a node that has not come is not noticed. Raises :class:`BenchError`.
        """
        config = Config({**self._common, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0"})
        end = time.monotonic() + _SECONDS
        with Observer(config) as observer:
            while sum(node["role"] == role for node in observer.ask()["nodes"]) < count:
                if time.monotonic() >= end:
                    raise BenchError(
                        f"no {count} {role}s joined the scheduler within {_SECONDS:g} s"
                    )
                time.sleep(0.02)

    def start_roles(self) -> int:
        """Start a scheduler and a server. Returns the scheduler's port.

        May be called again, for another job with the same workers.
        """
        file = Path(self._folder.name, "port")
        file.unlink(missing_ok=True)
        self.scheduler = start(
            "bpsx.scheduler",
            {
                **self._common,
                "DMLC_ROLE": "scheduler",
                "DMLC_PS_ROOT_PORT": "0",
                "BPSX_PORT_FILE": str(file),
            },
        )
        self._stack.callback(end_role, "scheduler", self.scheduler, quiet=True)
        port = port_in(file, self.scheduler)
        self._common["DMLC_PS_ROOT_PORT"] = str(port)
        self.server = start("bpsx.server", {**self._common, "DMLC_ROLE": "server"})
        self._stack.callback(end_role, "server", self.server, quiet=True)
        return port

    def end_roles(self) -> None:
        """End the scheduler and the server of a job that is over.

        Raises :class:`BenchError` if one of its processes ended with a failure.
        """
        for name, process in (("scheduler", self.scheduler), ("server", self.server)):
            if status := end_role(name, process):
                raise BenchError(f"{name} ended with status {status}")
        self._stack.pop_all()

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.process.kill()  # its replies have been read
            worker.close()
        self._stack.close()
        self._folder.cleanup()


def strike(role: str, stage: str, number: int = signal.SIGKILL, **environment: str) -> Outcome:
    """Send a signal to one process of a job of 3 workers and a server, and measure the effect.

    Workers 0 and 1 are at ``stage``, worker 2 is behind. The signal goes to worker 1, the server or
    the scheduler. Raises :class:`BenchError` if a call does not end, or ends with anything but an
    exception that names the struck process.
    """
    with Roles(_WORKERS, **environment) as job:
        waiting = job.workers[:2]
        if stage != "init":
            _all(job.workers, "init")
            _all(job.workers, "exchange")
        if stage == "push":
            job.server.send_signal(signal.SIGSTOP)
        _all(waiting, "begin", stage=stage)
        if stage == "init":
            job.wait_for("server", 1)
            job.wait_for("worker", len(waiting))
        victim = {
            "worker": job.workers[1].process,
            "server": job.server,
            "scheduler": job.scheduler,
        }[role]
        struck = time.monotonic()
        victim.send_signal(number)
        if stage == "push" and victim is not job.server:
            job.server.send_signal(signal.SIGCONT)
        survivors = [w for w in waiting if w.process is not victim]
        raised = max(_raised(w, role, stage) for w in survivors) - struck
        for worker in job.workers:
            if worker.process is not victim:
                worker.tell("quit")
        others = [
            p
            for p in (job.server, job.scheduler, *(w.process for w in job.workers))
            if p is not victim
        ]
        for process in others:
            process.wait(_SECONDS)
        return Outcome(raised, time.monotonic() - struck)


def _raised(worker: Child, role: str, stage: str) -> float:
    when, kind, text = worker.ask("ended", timeout=_SECONDS, timeout_s=_SECONDS - 10)
    if not kind.endswith("Error") or role not in text:
        raise BenchError(
            f"{stage}: {worker.name} did not report the death of the {role}, but {kind}: {text}"
        )
    return float(when)


def _all(workers: list[Child], op: str, **arguments: str) -> None:
    for worker in workers:
        worker.tell(op, **arguments)
    for worker in workers:
        worker.answer(_SECONDS)
