"""Runs a job's processes as children until all have ended.

The children are a whole job on this machine, its workers only, or one ssh for each remote process.

One thread waits for all events: output, ended children, signals, deadlines. Each child leads its
own session, so that a signal reaches its descendants, too, and the terminal's Ctrl-C arrives only
through bpsx-run. An ended child is reaped only at the end of the job. Until then its process id
stays taken, and a signal cannot reach an unrelated process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from bpsx.config import Config, child_environment, runtime_dir
from bpsx.launch import job_registry
from bpsx.launch.output_mux import Pump
from bpsx.launch.roles import ENDING, Process, Processes, cannot_run, child_setup, heeded
from bpsx.launch.ssh.client import Far
from bpsx.system.host import SCRIPT_SIGNALS

#: Interval in seconds for polling the scheduler's port file. The file appears within moments, and
#: watching a folder is not portable.
_LOOK = 0.01
#: Seconds for which output stays open after all children have ended, for what they left behind,
#: such as a resource tracker that cleans up.
_LINGER = 2.0
#: Seconds to wait for killed processes to disappear. It usually takes a moment, but where no
#: process reaps orphans they stay for ever.
_DYING = 1.0
_PIPE = 4096


@dataclass(eq=False)
class Child:
    """A started process.

    ``status`` is None while it runs, then its exit status or 128 + the signal that killed it.
    """

    name: str
    role: str
    process: subprocess.Popen[bytes]
    far: Far | None = None
    status: int | None = None
    killed: bool = False
    overdue: str = ""

    def look(self) -> bool:
        """Check, without reaping it, whether it has ended since the last call."""
        if self.status is not None:
            return False
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return False
        self.killed = found.si_code != os.CLD_EXITED
        self.status = found.si_status + (128 if self.killed else 0)
        if self.far:
            self.far.close()
        return True

    def send(self, number: int) -> None:
        """Signal its process group, with descendants that outlive it.

        Over ssh, signals other than SIGKILL go to the remote process.
        """
        if self.far and number != signal.SIGKILL:
            return self.far.send(number)
        if self.process.returncode is None:  # not reaped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
        return None

    def vanished(self) -> bool:
        """Whether its process group is empty. For use once the child itself has been reaped."""
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return True
        return False

    def story(self) -> str:
        """Text that says how it ended."""
        assert self.status is not None
        if self.far and not self.far.told:
            return f"{self.name} {self.overdue}{self.far.story(self.status)}"
        if self.far:
            self.killed = self.far.killed
        how = (
            f"was killed by {signal_name(self.status - 128)}"
            if self.killed
            else f"exited with status {self.status}"
        )
        return f"{self.name} {self.overdue}{how}"


class Ending:
    """Schedule of the signals for children that should end. Pure.

    SIGTERM is due after a grace time, SIGKILL ``kill_after`` seconds later.
    """

    def __init__(self, grace: float, kill_after: float) -> None:
        self._grace = grace
        self._kill_after = kill_after
        self._signal = signal.SIGTERM
        self.due: float | None = None

    def begin(self, now: float, grace: float | None = None) -> None:
        """Make SIGTERM due in ``grace`` seconds, unless it is due earlier or has been taken.

        ``grace`` defaults to the constructor's.
        """
        if self._signal is signal.SIGTERM:
            due = now + (self._grace if grace is None else grace)
            self.due = due if self.due is None else min(self.due, due)

    def take(self, now: float) -> signal.Signals | None:
        """Return the signal that is due, once; else None."""
        if self.due is None or now < self.due:
            return None
        number = self._signal
        self.due = now + self._kill_after if number is signal.SIGTERM else None
        self._signal = signal.SIGKILL
        return number


class Job:
    """Runs the processes of a plan, once. Only for the main thread.

    ``commands``: role -> command that replaces the plan's.
    """

    def __init__(
        self, plan: Processes, commands: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._plan = plan
        self._commands = commands or {}
        self._complete = False  # whether all processes have been started
        self._state_fd = -1  # descriptor from which the scheduler's state is read
        self._state: list[bytes] = []
        # What the scheduler had written when an overdue child first got a signal.
        self._verdict: str | None = None
        self._children: list[Child] = []
        self._ended: list[Child] = []
        self._ending = Ending(plan.grace, plan.kill_after)  # for workers
        self._helpers = Ending(plan.grace, plan.kill_after)  # for scheduler and servers
        self._stop: list[int] = []  # signals that told bpsx-run to stop
        self._record: int | None = None
        # Why the job could not be started, and the exit status for it.
        self._trouble: tuple[str, int] | None = None

    def run(self) -> int:
        """Run the job to its end.

        Returns the largest exit status of the children that ended by themselves. Raises ConfigError
        before any process is started.
        """
        self._plan.check()
        config = Config()
        self._asynchronous, self._term_grace = (
            config.asynchronous,
            max(config.term_grace, self._plan.grace),
        )
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with signals(self._on_signal) as wake:
            self._pump = Pump(wake, child_environment())
            try:
                self._start_all()
                while any(child.status is None for child in self._children):
                    self._step()
                self._settle()
            finally:
                self._sweep()
                if self._record is not None:
                    job_registry.remove(self._record)
        return self._status()

    # Starting

    def _start_all(self) -> None:
        name = self._plan.command[0]
        # Check now, before starting other processes in vain.
        if shutil.which(name) is None:
            code = errno.EACCES if "/" in name and os.path.exists(name) else errno.ENOENT
            return self._give_up(*cannot_run(self._plan.command, OSError(code, os.strerror(code))))
        port = self._plan.port
        if scheduler := self._plan.scheduler():
            port = self._start_scheduler(scheduler)
            self._make_record(self._plan.environment("worker", 0, port), port)
        if self._stop or self._trouble:
            return None
        for process in self._plan.others(port):
            if self._stop or self._trouble:
                return None
            self._start(process)
        self._complete = not self._trouble
        return None

    def _make_record(self, environment: Mapping[str, str], port: int) -> None:
        """Record the job for bpsx-run top. The job runs without the record, too."""
        if self._stop or self._trouble:
            return
        try:
            self._record = job_registry.write(
                environment["DMLC_PS_ROOT_URI"],
                port,
                environment.get("BPSX_SECRET", ""),
                self._plan.command,
            )
        except OSError as error:
            self._pump.say(f"bpsx-run top will not find this job: {error}")

    def _start_scheduler(self, scheduler: Process) -> int:
        """Start the scheduler; returns its port."""
        timeout = Config(scheduler.environment).rendezvous_timeout
        if scheduler.request:
            self._start(scheduler)
            return self._plan.port or self._await_port(
                lambda: (far := self._children[0].far) and far.port or 0, timeout
            )
        self._state_fd, state = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._state_fd, False)
        scheduler = replace(
            scheduler, environment={**scheduler.environment, "BPSX_STATE_FD": str(state)}
        )
        try:
            if self._plan.port:
                self._start(scheduler, state)
                return self._plan.port
            # The folder is needed only until the port is known.
            with tempfile.TemporaryDirectory(prefix="bpsx-run-", dir=runtime_dir()) as folder:
                file = Path(folder, "port")
                self._start(
                    replace(
                        scheduler,
                        environment={**scheduler.environment, "BPSX_PORT_FILE": str(file)},
                    ),
                    state,
                )
                # The file is renamed into place, so it is complete once it exists.
                return self._await_port(
                    lambda: int(file.read_text()) if file.exists() else 0, timeout
                )
        finally:
            os.close(state)

    def _await_port(self, look: Callable[[], int], timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while not (self._stop or self._trouble):
            if port := look():
                return port
            if self._ended:
                self._give_up(
                    f"{self._ended[0].story()} before it listened", self._ended[0].status or 1
                )
            elif time.monotonic() >= deadline:
                self._give_up(
                    f"the scheduler did not listen within {timeout:g} s (BPSX_RENDEZVOUS_TIMEOUT)"
                )
            else:
                self._step(_LOOK)
        return 0

    def _start(self, process: Process, *kept: int) -> None:
        command = self._commands.get(process.role, process.command)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, heeded())
        try:
            started = subprocess.Popen(
                command,
                env=process.environment,
                stdin=subprocess.PIPE if process.request else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=kept,
                preexec_fn=child_setup(self._mask, process.cpus, _not_for(process)),
            )
            far = Far(process, started) if process.request else None
            self._children.append(Child(process.name, process.role, started, far))
            if far:
                far.begin()
        except OSError as error:
            return self._give_up(*cannot_run(command, error, process.environment))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert started.stdout and started.stderr
        for target, pipe in ((1, started.stdout), (2, started.stderr)):
            messages = (process.marker, far.heard) if far and target == 1 else None
            self._pump.add(
                os.dup(pipe.fileno()),
                target,
                process.name,
                process.role,
                messages,
                far.overheard if far and target == 2 else None,
            )
            pipe.close()
        return None

    # Running

    def _step(self, longest: float | None = None) -> None:
        """Wait at most ``longest`` seconds for events, and handle them."""
        now = time.monotonic()
        waits = [
            max(0.0, due - now) for due in (self._ending.due, self._helpers.due) if due is not None
        ]
        self._pump.step(min([*waits, *([] if longest is None else [longest])], default=None))
        self._look(time.monotonic())
        self._escalate(time.monotonic())

    def _look(self, now: float) -> None:
        ended = [child for child in self._children if child.look()]
        if any(child.far for child in ended):
            self._pump.step(0)  # read its last messages
        for child in ended:
            if child.far and not child.far.up and not self._stop and not self._ending.due:
                # No job can form without one of its hosts.
                self._give_up(child.story(), child.status or 1)
        # Of children that ended at the same time, a killed one, then a worker, is the likelier
        # cause.
        self._ended += sorted(ended, key=lambda child: (not child.killed, child.role != "worker"))
        done = self._complete and all(
            child.status is not None for child in self._children if child.role == "worker"
        )
        # In an asynchronous job, the other workers continue without a lost one.
        fatal = any(
            child.status and not (self._asynchronous and child.role == "worker") for child in ended
        )
        # Children that wait for a job that cannot form any more would wait in vain.
        in_vain = (
            not self._stop and (done or any(child.status for child in ended)) and self._forming()
        )
        early = [
            child
            for child in ended
            if child.role == "worker"
            and not child.status
            and not done
            and not self._stop
            and self._forming()
        ]
        for child in early:
            self._pump.say(
                f"{child.name} has ended (status 0) without joining the job, which cannot form"
                " without it"
            )
        if in_vain:
            self._end_all(now)
        elif self._stop:
            self._ending.begin(now, self._term_grace if self._stop[-1] == signal.SIGTERM else None)
        elif fatal or early:
            self._ending.begin(now)
        if done or early:  # workers do not need scheduler and servers any more, or never will
            self._helpers.begin(now)

    def _end_all(self, now: float) -> None:
        """Make SIGTERM due now for all children."""
        for ending in (self._ending, self._helpers):
            ending.begin(now, 0)

    def _forming(self) -> bool:
        """Whether the scheduler is known to be waiting for nodes."""
        return "waiting\n" in (told := self._hear()) and "running\n" not in told

    def _hear(self) -> str:
        """All text that the scheduler has written to the state descriptor."""
        if self._state_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                # Whole lines, as a signal's handler reads, too.
                self._state.append(os.read(self._state_fd, _PIPE))
        return b"".join(self._state).decode()

    def _blamed(self) -> tuple[Child | None, str]:
        """The child that the scheduler names as the cause of the job's end, and its exception.

        The child is None if there is none or bpsx-run itself was the cause. The exception is "" if
        unknown.
        """
        verdict = self._hear() if self._verdict is None else self._verdict
        told = [line.split(" ", 4) for line in verdict.splitlines() if line.startswith("blame ")]
        if not told or self._stop:
            return None, ""
        _, role, rank, pid, *cause = told[0]
        same = [child for child in self._children if child.role == role]
        if role == "worker":
            # Not by pid: a worker's command may be a shell script that runs the actual process.
            return (same[int(rank)], "".join(cause)) if int(rank) < len(same) else (None, "")
        return next((child for child in same if child.process.pid == int(pid)), None), ""

    def _escalate(self, now: float) -> None:
        if number := self._ending.take(now):
            self._send_overdue(
                number, [child for child in self._children if child.role == "worker"]
            )
            # Scheduler and servers must outlive the workers that they serve.
            self._helpers.begin(now, self._plan.kill_after)
        if number := self._helpers.take(now):
            self._send_overdue(
                number, [child for child in self._children if child.role != "worker"]
            )

    def _send_overdue(self, number: signal.Signals, children: Sequence[Child]) -> None:
        self._verdict = self._hear() if self._verdict is None else self._verdict
        told = self._stop and self._stop[-1] == signal.SIGTERM
        for child in children:
            child.send(number)
            if child.status is None and not child.overdue:
                grace = self._term_grace if told and child.role == "worker" else self._plan.grace
                waited = (
                    "running before the job had formed"
                    if self._forming()
                    else f"running after the grace time ({grace:g} s)"
                )
                child.overdue = f"was still {waited}, got {number.name} and "

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on at once, as the loop may be in the middle of a step."""
        kill = number == signal.SIGINT and number in self._stop
        everybody = kill or (number in ENDING and (not self._complete or self._forming()))
        for child in self._children:
            if everybody or child.role == "worker":
                child.send(signal.SIGKILL if kill else number)
        if number in ENDING:
            self._pump.interrupted = self._pump.interrupted or number == signal.SIGINT
            self._stop.append(number)

    def _give_up(self, text: str, status: int = 1) -> None:
        self._trouble = self._trouble or (text, status)
        self._end_all(time.monotonic())

    # Ending

    def _settle(self) -> None:
        """Write the children's last output, kill what they left behind, and report failures."""
        until = time.monotonic() + _LINGER
        while self._pump.sources and (left := until - time.monotonic()) > 0:
            self._pump.step(left)
        for child in self._children:
            child.send(signal.SIGKILL)
        self._pump.close()
        if self._status():
            self._pump.say(self._report())
        until = time.monotonic() + _LINGER
        while not (self._pump.written or (self._stop and time.monotonic() >= until)):
            self._pump.step(_LINGER)

    def _sweep(self) -> None:
        """Kill all processes that may be left, whatever happened."""
        for child in self._children:
            child.send(signal.SIGKILL)
        for child in self._children:
            child.process.wait()
        end = time.monotonic() + _DYING
        while time.monotonic() < end and not all(child.vanished() for child in self._children):
            time.sleep(_LOOK)  # the end of a grandchild causes no event
        self._pump.close()
        if self._state_fd >= 0:
            os.close(self._state_fd)

    def _status(self) -> int:
        if self._trouble:
            return self._trouble[1]
        if (
            self._plan.forgiving
            and not self._stop
            and not any(child.status for child in self._children if child.role == "worker")
        ):
            return 0
        # The status of a child that bpsx-run had to end says nothing about the cause.
        overdue = any(child.overdue for child in self._children)
        if self._stop:
            return (
                self._own()
                if self._complete and self._pump.written and not overdue
                else max(self._own(), 128 + self._stop[0])
            )
        return self._own() or int(overdue)

    def _own(self) -> int:
        """The largest status of the children that ended by themselves."""
        return max((child.status or 0 for child in self._children if not child.overdue), default=0)

    def _report(self) -> str:
        """Text that lists the failures, the cause first."""
        if self._trouble:
            return self._trouble[0]
        blamed, cause = self._blamed()
        parts = [
            child.story()
            for child in self._ended
            if (child.status or child.overdue) and child is not blamed
        ]
        if blamed is not None and blamed.status is not None:
            parts.insert(
                0, blamed.story() + ("" if blamed.status else " before the others were done")
            )
            if cause:
                parts.insert(0, f"{blamed.name} failed: {cause}")
        if self._stop:
            parts.insert(0, f"told to stop by {signal_name(self._stop[0])}")
        elif not self._own() and self._forming():
            parts.insert(0, self._absent())
        elif all(
            child.overdue and child.role != "worker"
            for child in self._children
            if child.status or child.overdue
        ):
            parts.append(
                "all workers had ended well"
                + ("" if self._hear() else ": does the command call bpsx.init()?")
            )
        return "; ".join(parts)

    def _absent(self) -> str:
        """Text for a job that cannot form, as workers ended with status 0 before it had formed."""
        workers = [child for child in self._children if child.role == "worker"]
        gone = [child.name for child in workers if child.status == 0 and not child.overdue]
        if len(gone) == len(workers):
            return "no worker called bpsx.init(): all ended with status 0 without joining the job"
        return (
            f"{', '.join(gone)} ended with status 0 without joining the job, which cannot form"
            " without it"
        )


def _not_for(process: Process) -> tuple[signal.Signals, ...]:
    """The signals that ``process`` ignores from its first instruction on.

    A batch system may send them to every process of a job.
    """
    if process.request:  # ssh: the remote process gets them through bpsx-run
        return (*ENDING, *SCRIPT_SIGNALS)
    return () if process.role == "worker" else SCRIPT_SIGNALS


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


@contextlib.contextmanager
def signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[int]:
    """Context manager that calls ``handler`` for the signals that end a job.

    Yields a descriptor that becomes readable after these signals and after SIGCHLD.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    replaced = {number: signal.signal(number, handler) for number in heeded()}
    # SIGCHLD must not stay ignored, as some callers leave it: the kernel would drop exit statuses.
    replaced[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, replaced)
    try:
        yield reading
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, old in replaced.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
