"""Helpers of the failure matrix: bring workers to a named stage, strike a process, and check what
must hold afterwards.

Three workers and a server. Workers 0 and 1 are *at* the stage, worker 2 is behind: it has not been
started (init), has not pushed (pull, shutdown), or acts like the others (connect, push, idle). In
the stages connect and push, SIGSTOP stops the server. The victim is worker 1, server 0 or the
scheduler.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from support.jobs import Job, Process

STAGES = ("init", "connect", "push", "pull", "idle", "shutdown")
ROLES = ("worker", "server", "scheduler")
#: Ways to strike: name -> signal. The worker script handles the last three itself.
WAYS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "stop": signal.SIGSTOP,
    "raise": signal.SIGALRM,
    "exit": signal.SIGUSR2,
    "_exit": signal.SIGUSR1,
}
FOR_ALL = ("kill", "term", "int", "stop")
#: Seconds within which all processes must have ended. The promised limits are shorter; `python -m
#: bench trust` measures them.
DEADLINE = 40.0
#: Longer than any test, for tests in which silence must not count as death.
PATIENT = {"PS_HEARTBEAT_INTERVAL": "0.3", "PS_HEARTBEAT_TIMEOUT": "60"}
#: For processes that stay stopped.
SHORT = {"PS_HEARTBEAT_INTERVAL": "0.3", "PS_HEARTBEAT_TIMEOUT": "2", "BPSX_GATHER_GRACE": "1"}

_WORKER = """
    import itertools, signal, threading, time
    import numpy as np
    import bpsx

    def throw(_, frame):
        # `logging`, pyzmq's socket constructor and import callbacks swallow any Exception: try
        # again later.
        while frame is not None:
            if frame.f_globals.get("__name__") in (
                "logging", "zmq.sugar.socket", "importlib._bootstrap", "_frozen_importlib"
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                return
            frame = frame.f_back
        raise RuntimeError("the data is gone")

    signal.signal(signal.SIGALRM, throw)
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
    stage, rounds, behind = {stage!r}, {rounds!r}, os.environ["DMLC_WORKER_ID"] == "2"
    length = 8_000_000 if stage == "push" else 1000
    array = np.full(length, 1 + int(os.environ["DMLC_WORKER_ID"]), np.float32)

    def begin(name):
        from bpsx.api.verbs import session
        before = session().counters()["messages_sent"]
        handle = bpsx.push_pull_async(array, name=name, average=False)
        while session().counters()["messages_sent"] == before and not bpsx.poll(handle):
            time.sleep(0.001)
        if stage == "shutdown":
            threading.Thread(target=tell_of_shutdown, daemon=True).start()
        else:
            report("staged")
        return handle

    def tell_of_shutdown():
        # Reported from inside shutdown(): a worker struck earlier would call it at the
        # interpreter's exit, and wait there for exchanges under way.
        inside = False
        while not inside:
            frame = sys._current_frames()[threading.main_thread().ident]
            while frame is not None and not inside:
                inside, frame = frame.f_code.co_name == "_take_leave", frame.f_back
            time.sleep(0.001)
        report("staged")

    def check(found):
        assert (found == 6).all(), found

    def stages():
        if stage == "connect" and behind:
            report("ready")
            hear()
        report("joining")
        bpsx.init()
        assert bpsx.push_pull(np.ones(1), name="first", average=False) == 3
        bpsx.barrier()
        report("running")
        hear()
        if stage == "push" or stage in ("pull", "shutdown") and not behind:
            handle = begin("x")
            if stage != "shutdown":
                check(bpsx.synchronize(handle))
        else:
            report("staged")
            hear()
            check(bpsx.push_pull(array, name="x", average=False))
        if stage != "shutdown":
            for _ in range(rounds) if rounds else itertools.count():
                check(bpsx.push_pull(array, name="x", average=False))
        bpsx.shutdown()
        if stage == "shutdown":
            if not behind:
                check(handle.wait())
        report("done")

    try:
        stages()
    except bpsx.BpsxError as e:
        report([type(e).__name__, str(e)])
        sys.exit(7)
"""


class Matrix:
    """One job that is brought to ``stage``.

    A context manager; at the end no process or file of the job may be left.
    """

    def __init__(self, stage: str, env: dict[str, str], rounds: int = 0) -> None:
        self.stage = stage
        self._folder = tempfile.TemporaryDirectory(prefix="bpsx-matrix-")
        self.places = [Path(self._folder.name, name) for name in ("tmp", "runtime")]
        for place in self.places:
            place.mkdir(mode=0o700)
        self.mark = f"BPSX_MATRIX_{uuid.uuid4().hex}"
        env = {
            "BYTEPS_LOG_LEVEL": "info",
            "BPSX_TERM_GRACE": "0.5",  # instead of 30: no process here saves anything after SIGTERM
            "BPSX_SHUTDOWN_TIMEOUT": "120" if stage == "shutdown" else "1",
            "TMPDIR": str(self.places[0]),
            "XDG_RUNTIME_DIR": str(self.places[1]),
            "MATRIX_MARK": self.mark,
            **env,
        }
        self.job = Job(_WORKER.format(stage=stage, rounds=rounds), workers=3, servers=1, env=env)

    def __enter__(self) -> Matrix:
        try:
            self.job.start_scheduler()
            self.job.start_server(0)
            for i in range(2 if self.stage == "init" else 3):
                self.job.start_worker(i)
            self._reach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.job.__exit__()
        self._folder.cleanup()

    @property
    def server(self) -> Process:
        return self.job.servers[0]

    @property
    def scheduler(self) -> Process:
        assert self.job.scheduler is not None
        return self.job.scheduler

    def victim(self, role: str) -> Process:
        return {"worker": self.job.workers[1], "server": self.server, "scheduler": self.scheduler}[
            role
        ]

    def _reach(self) -> None:
        if self.stage in ("init", "connect"):
            for p in (self.server, *self.job.workers[:2]):
                p.wait_for_line("known to the scheduler")
            if self.stage == "connect":
                self.job.workers[2].wait_for_line("ready")
                self.server.signal(signal.SIGSTOP)  # it cannot reply to the workers' greetings
                self.job.workers[2].say("go")
                for worker in self.job.workers:
                    worker.wait_for_line("the job is complete")
            return
        for worker in self.job.workers:
            worker.wait_for_line("running")
        if self.stage == "push":
            self.server.signal(signal.SIGSTOP)  # pushes now stay in flight
        self.go()
        for worker in self.job.workers:
            worker.wait_for_line("staged")

    def go(self, *but: Process) -> None:
        """Let the workers that wait for a line continue, except ``but``."""
        for worker in self.job.workers:
            if worker not in but:
                with contextlib.suppress(OSError):
                    worker.say("go")

    def strike(self, role: str, way: str) -> Process:
        """Strike ``role``; after that has taken effect, the others continue as far as they can."""
        victim = self.victim(role)
        name = name_of(role, victim, self.job.port)
        # Workers may already have named the scheduler when they connected early.
        named = [sum(name in line for line in w.lines + w.errors) for w in self.job.workers]
        victim.signal(WAYS[way])
        if self.stage in ("connect", "push") and (
            victim is not self.server or way not in ("kill", "stop")
        ):
            self.server.signal(signal.SIGCONT)
        if way == "stop" or role == "scheduler":
            # The victim ends later or not at all. Until the other workers know, their calls could
            # succeed.
            self.job.workers[0].wait_for_line(name, DEADLINE, named[0] + 1)
        else:
            victim.wait(DEADLINE)
        # The worker behind has only its own push left, and waits for no other worker.
        if self.stage == "shutdown":
            self.job.workers[2].wait_for_line(name, DEADLINE, named[2] + 1)
        self.go(victim)
        # The victim may already have completed the others' calls, so they call again.
        if self.stage == "connect":
            self.go(victim)
        return victim

    def told(self, worker: Process) -> str:
        """Return the text of the exception that ended ``worker``'s waiting call."""
        found = [r for r in worker.reports() if isinstance(r, list)]
        assert len(found) == 1, worker.text()
        assert found[0][0] in ("PeerLostError", "PeerLeftError", "RendezvousError"), worker.text()
        return str(found[0][1])

    def left(self) -> list[str]:
        """Return the processes and files of the job that still exist."""
        found = [str(p) for place in self.places for p in place.rglob("*") if not p.is_dir()]
        found += [
            f"somebody who has the output of {p.name}" for p in self.job.processes if not p.silent
        ]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_text(errors="replace"))
        return found

    def text(self) -> str:
        return "\n".join(p.text() for p in self.job.processes)

    def ended(self, but: tuple[Process, ...] = ()) -> dict[str, int]:
        """Wait until all processes except ``but`` have ended; return exit statuses by name."""
        end = time.monotonic() + DEADLINE
        statuses: dict[str, Any] = {}
        for p in self.job.processes:
            if p not in but:
                try:
                    statuses[p.name] = p.wait(max(0.1, end - time.monotonic()))
                except AssertionError:
                    raise AssertionError(
                        f"{p.name} has not ended {DEADLINE:g} s after the strike\n{self.text()}"
                    ) from None
        return statuses


def name_of(role: str, victim: Process, port: str) -> str:
    """Return the name of the process in exceptions: role, rank and address."""
    own = {"worker": "worker 1 (127.0.0.1, pid %d)", "server": "server 0 (127.0.0.1, pid %d)"}
    return own[role] % victim.popen.pid if role in own else f"scheduler at 127.0.0.1:{port}"
