"""Runs the processes of any back end's plan as children until all have ended.

One thread waits for all events: output, ended children, signals, deadlines.
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
from dataclasses import replace
from pathlib import Path
from types import FrameType

from bpsx.config import Config, child_environment, runtime_dir
from bpsx.launch import job_registry
from bpsx.launch.backend import Plan, Process
from bpsx.launch.child import Child, Ending, signals
from bpsx.launch.job_status import JobStatus
from bpsx.launch.output_mux import Pump
from bpsx.launch.restarts import Restarts
from bpsx.launch.scheduler_state import AGAIN
from bpsx.launch.spawn import ENDING, cannot_run, child_setup, passed_on
from bpsx.launch.stragglers import Stragglers

#: Interval in seconds for polling the scheduler's port file. The file appears within moments, and
#: watching a folder is not portable.
_LOOK = 0.01
#: Interval in seconds for asking whether the job goes on without a server that has died. The
#: scheduler says so within moments, unless it is busy.
_LOOK_FOR_LOSS = 0.1
#: Interval in seconds for asking whether the job goes on without a process that still runs.
_LOOK_FOR_STRAGGLERS = 1.0
#: Seconds for which output stays open after all children have ended, for what they left behind,
#: such as a resource tracker that cleans up.
_LINGER = 2.0
#: Seconds to wait for killed processes to disappear. It usually takes a moment, but where no
#: process reaps orphans they stay for ever.
_DYING = 1.0


class Job:
    """Runs the processes of a plan, once. Only for the main thread.

    ``commands``: role -> command that replaces the plan's.
    """

    def __init__(self, plan: Plan, commands: Mapping[str, Sequence[str]] | None = None) -> None:
        self._plan = plan
        self._commands = commands or {}
        self._status = JobStatus(plan.forgiving)
        # Schedules of the signals that end workers, and scheduler and servers.
        self._worker_ending = Ending(plan.grace + plan.telling, plan.kill_after)
        self._helper_ending = Ending(plan.grace, plan.kill_after)
        self._stragglers = Stragglers(self._status.scheduler, plan.grace, plan.kill_after)
        self._record: int | None = None
        self._may_lose: list[str] = []  # roles of processes without which the job may go on
        self._restarts = Restarts(plan.max_restarts)

    def run(self) -> int:
        """Run the job to its end.

        Returns bpsx-run's exit status: see :meth:`JobStatus.exit_status`. Raises ConfigError before
        any process is started.
        """
        self._plan.check()
        config = Config()
        self._asynchronous, self._term_grace = (
            config.asynchronous,
            max(config.term_grace, self._plan.grace),
        )
        if config.state_fd >= 0 and config.role == "worker":
            self._status.scheduler.hear(config.state_fd)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with signals(self._on_signal) as wake:
            self._pump = Pump(wake, child_environment())
            try:
                self._start_all()
                while any(child.status is None for child in self._status.children):
                    self._step()
                self._drain_output()
            finally:
                self._sweep()
                if self._record is not None:
                    job_registry.remove(self._record)
        return self._status.exit_status(self._pump.written)

    # Starting

    def _start_all(self) -> None:
        needed = self._plan.needed
        # Check now, before starting other processes in vain.
        if shutil.which(needed[0]) is None:
            there = "/" in needed[0] and os.path.exists(needed[0])
            code = errno.EACCES if there else errno.ENOENT
            self._give_up(*cannot_run(needed, OSError(code, os.strerror(code))))
            return
        port = self._plan.port
        if scheduler := self._plan.scheduler():
            port = self._start_scheduler(scheduler)
            if scheduler.here and (again := replace(self._plan, port=port).scheduler()):
                self._restarts.started(again, time.monotonic())
            self._make_record(port)
        if self._status.halted:
            return
        for process in self._plan.others(port):
            if self._status.halted:
                return
            if child := self._start(process):
                self._stragglers.started(child, process)
        self._status.complete = not self._status.trouble

    def _make_record(self, port: int) -> None:
        """Record the job for bpsx-run top. The job runs without the record, too."""
        if self._status.halted:
            return
        environment = self._plan.environment("worker", 0, port)
        try:
            self._record = job_registry.write(
                environment["DMLC_PS_ROOT_URI"],
                port,
                environment.get("BPSX_SECRET", ""),
                self._plan.command,
            )
        except OSError as error:
            self._pump.say(f"bpsx-run top cannot find this job, as its record failed: {error}")

    def _start_scheduler(self, scheduler: Process) -> int:
        """Start the scheduler. Returns its port, or 0 if the job halted before it was known."""
        timeout = Config(scheduler.environment).rendezvous_timeout
        environment = self._plan.environment("server", 0, self._plan.port)
        config = Config(environment)
        self._may_lose = ["server"] * config.may_lose_servers + ["worker"] * config.may_lose_workers
        if not scheduler.here:
            if child := self._start(scheduler):
                child.listen(self._status.scheduler.far.append)
            return self._plan.port or self._await_port(
                lambda: max((child.port for child in self._status.children), default=0), timeout
            )
        with self._status.scheduler.writer() as state, self._port_file() as file:
            environment = {**scheduler.environment, "BPSX_STATE_FD": str(state)}
            if file:
                environment["BPSX_PORT_FILE"] = str(file)
            self._start(replace(scheduler, environment=environment), state)
            # The file is renamed into place, so it is complete once it exists.
            return (
                self._await_port(lambda: int(file.read_text()) if file.exists() else 0, timeout)
                if file
                else self._plan.port
            )

    @contextlib.contextmanager
    def _port_file(self) -> Iterator[Path | None]:
        """Yield a file for the scheduler's port, whose folder is removed afterwards.

        None if the plan has a port.
        """
        if self._plan.port:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="bpsx-run-", dir=runtime_dir()) as folder:
            yield Path(folder, "port")

    def _await_port(self, look: Callable[[], int], timeout: float) -> int:
        """Wait until ``look`` returns the scheduler's port; return it, or 0 if the job halted.

        The job halts after ``timeout`` seconds, or if a child ends.
        """
        deadline = time.monotonic() + timeout
        while not self._status.halted:
            if port := look():
                return port
            if self._status.ended:
                first = self._status.ended[0]
                self._give_up(f"{first.story()} before it listened", first.status or 1)
            elif time.monotonic() >= deadline:
                self._give_up(
                    f"the scheduler did not listen within {timeout:g} s (BPSX_RENDEZVOUS_TIMEOUT)"
                )
            else:
                self._step(_LOOK)
        return 0

    def _start(self, process: Process, *kept: int) -> Child | None:
        """Start a process; returns None, with the job halted, if that failed."""
        command = self._commands.get(process.role, process.command)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on())
        try:
            child = process.child(
                subprocess.Popen(
                    command,
                    env=process.environment,
                    stdin=process.stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    pass_fds=kept,
                    preexec_fn=child_setup(self._mask, process.cpus, process.ignored),
                )
            )
            self._status.children.append(child)
            self._restarts.started(process, time.monotonic())
            child.begin()
        except OSError as error:
            self._give_up(*cannot_run(command, error, process.environment))
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child.forward_output(self._pump)
        return child

    # Running

    def _step(self, longest: float | None = None) -> None:
        """Wait at most ``longest`` seconds for events, and handle them."""
        now = time.monotonic()
        waits = [
            max(0.0, due - now)
            for due in (
                self._worker_ending.due,
                self._helper_ending.due,
                self._stragglers.due,
                self._restarts.due,
                *(child.due for child in self._status.children if child.status is None),
            )
            if due is not None
        ]
        if self._undecided():
            waits.append(_LOOK_FOR_LOSS)
        scheduler = self._status.scheduler
        if (scheduler.tells and self._may_lose) or scheduler.hears:
            waits.append(_LOOK_FOR_STRAGGLERS)
        self._pump.step(min([*waits, *([] if longest is None else [longest])], default=None))
        scheduler.listen()
        self._pass_on_news()
        self._handle_exits(time.monotonic())
        self._escalate(time.monotonic())
        self._start_again(time.monotonic())

    def _pass_on_news(self) -> None:
        """Tell each bpsx-run elsewhere which workers are lost or have joined.

        Of the processes of its machine, the job may have lost only some.
        """
        for line in self._status.scheduler.news():
            for child in self._status.workers:
                if child.status is None:
                    child.tell(line)

    def _start_again(self, now: float) -> None:
        """Start the processes that are due, unless the job ends."""
        seen = self._status
        ends = self._worker_ending.begun or self._helper_ending.begun or seen.scheduler.over()
        if seen.halted or ends:
            self._restarts.stop()
        for process in self._restarts.take(now):
            start = self._start_writer if process.role == "scheduler" else self._start
            before = self._stragglers.entries(process)
            self._pass_on_news()
            if child := start(process):
                child.tell(AGAIN)
                seen.again.append(child)
                self._stragglers.started(child, process, before)

    def _start_writer(self, scheduler: Process) -> Child | None:
        """Start a scheduler again, which tells bpsx-run of the job."""
        with self._status.scheduler.writer() as state:
            environment = {**scheduler.environment, "BPSX_STATE_FD": str(state)}
            return self._start(replace(scheduler, environment=environment), state)

    def _handle_exits(self, now: float) -> None:
        """Record ended children, and begin to end the rest if the job is over, failed or cannot
        form.
        """
        seen = self._status
        ended: list[Child] = []
        while fresh := [child for child in seen.children if child.poll_exit()]:
            ended += fresh
            # step(0) reads their last messages, but may consume the SIGCHLD of another child that
            # ends meanwhile, so check all children again.
            self._pump.step(0)
        for child in ended:
            reached = child.up or child in seen.again
            if not reached and not seen.stop and not self._worker_ending.due:
                self._give_up(child.story(), child.status or 1)
        # Of children that ended at the same time, a killed one, then a worker, is the likelier
        # cause.
        seen.ended += sorted(ended, key=lambda child: (not child.killed, child.role != "worker"))
        # All workers have ended.
        done = seen.complete and all(child.status is not None for child in seen.workers)
        lost = [child for child in ended if self._may_go_on_without(child)]
        seen.lost += lost
        late = [child for child in ended if self._stragglers.is_late(child)]
        seen.late += late
        seen.hung += [child for child in ended if child in self._stragglers and child not in late]
        over = done or seen.scheduler.over()
        for child in lost:
            then = "" if over else self._restarts.ended(child.name, now)
            if then or (child.overdue and not over):
                self._pump.say("; ".join(filter(None, [child.story(), then])))
        seen.restarted += [child for child in ended if self._starts_again(child, done, now)]
        # A child failed that the others need. An asynchronous job goes on without a lost worker.
        fatal = self._cannot_go_on() or any(
            (child.status or child in seen.hung)
            and not (self._asynchronous and child.role == "worker")
            and child not in [*seen.lost, *seen.restarted, *seen.late]
            for child in ended
        )
        # A child ended that the job needs to form, so the others would wait for ever.
        cannot_form = (
            not seen.stop
            and (done or any(child.status for child in ended))
            and seen.scheduler.forming()
        )
        # Workers that ended well without joining the job.
        early = [
            child
            for child in ended
            if child.role == "worker"
            and not child.status
            and not done
            and not seen.stop
            and seen.scheduler.forming()
        ]
        for child in early:
            self._pump.say(
                f"{child.name} exited with status 0 without joining the job, which cannot form"
                " without it"
            )
        if cannot_form:
            self._end_all(now)
        elif seen.stop:
            self._worker_ending.begin(
                now, self._term_grace if seen.stop[-1] == signal.SIGTERM else None
            )
        elif fatal or early:
            self._worker_ending.begin(now)
        self._stragglers.look(now)
        if done or early:  # workers do not need scheduler and servers any more, or never will
            self._helper_ending.begin(now)

    def _may_go_on_without(self, child: Child) -> bool:
        """Whether the job may have survived the death of ``child``, as the scheduler will say."""
        seen = self._status
        return (
            child.role in self._may_lose
            and (child in self._stragglers or (bool(child.status) and not child.overdue))
            and seen.complete
            and not (seen.stop or self._worker_ending.begun or seen.scheduler.forming())
            and not any(
                c.status and c not in seen.restarted for c in seen.helpers if c.role == "scheduler"
            )
        )

    def _starts_again(self, child: Child, done: bool, now: float) -> bool:
        """Plan the restart of a scheduler that has died in a running job; return whether it comes.

        A scheduler that has ended the job says so. One that was started again, and could not go on
        with the job (its port may be in use for a moment), is tried again, too. So is one that was
        silent, as when its machine slept.
        """
        seen = self._status
        ran, before = seen.scheduler.runs(), len(seen.restarted)
        if (
            child.role != "scheduler"
            or not (child.status and seen.complete and seen.scheduler.may_die())
            or child.overdue
            or done
            or seen.stop
            or self._worker_ending.begun
            or seen.scheduler.over()
            or seen.scheduler.blame() is not None
            or not (child.killed or ran <= before or seen.scheduler.deserted())
        ):
            return False
        if then := self._restarts.ended(child.name, now):
            self._pump.say(f"{child.story()}; {then}")
        return self._restarts.is_due(child.name)

    def _undecided(self) -> bool:
        """Whether the scheduler has yet to say what follows from the death of a process."""
        seen = self._status
        return (
            seen.scheduler.tells
            and not self._worker_ending.begun
            and any(child not in seen.survived for child in seen.lost)
        )

    def _cannot_go_on(self) -> bool:
        """Whether a process has died and the scheduler has ended the job."""
        return self._undecided() and self._status.scheduler.blame() is not None

    def _end_all(self, now: float) -> None:
        """Make SIGTERM due now for all children."""
        for ending in (self._worker_ending, self._helper_ending):
            ending.begin(now, 0)

    def _escalate(self, now: float) -> None:
        if number := self._worker_ending.take(now):
            self._send_overdue(number, self._status.workers)
            # Scheduler and servers must outlive the workers that they serve.
            self._helper_ending.begin(now, self._plan.kill_after)
        self._stragglers.send(now)
        if number := self._helper_ending.take(now):
            self._send_overdue(number, self._status.helpers)
        for child in self._status.children:
            if child.status is None and (text := child.abandon(now)):
                self._pump.say(text)

    def _send_overdue(self, number: signal.Signals, children: Sequence[Child]) -> None:
        seen = self._status
        seen.scheduler.freeze()
        terminated = seen.stop and seen.stop[-1] == signal.SIGTERM
        for child in children:
            ended = child.has_ended()
            child.send(number)
            if not ended and not child.overdue:
                grace = (
                    self._term_grace if terminated and child.role == "worker" else self._plan.grace
                )
                waited = (
                    "waiting for the job to form"
                    if seen.scheduler.forming()
                    else f"running after the grace time ({grace:g} s)"
                )
                child.overdue = f"was still {waited}, got {number.name} and "

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on at once, as the loop may be in the middle of a step."""
        seen = self._status
        kill = number == signal.SIGINT and number in seen.stop
        to_all = kill or (number in ENDING and (not seen.complete or seen.scheduler.forming()))
        for child in seen.children if to_all else seen.workers:
            child.send(signal.SIGKILL if kill else number)
        if number in ENDING:
            self._pump.interrupted = self._pump.interrupted or number == signal.SIGINT
            seen.stop.append(number)

    def _give_up(self, text: str, status: int = 1) -> None:
        """Halt the job: record the cause, unless there is one, and make SIGTERM due now.

        Does not raise: the caller returns, and :meth:`run` waits for the children. ``status``: exit
        status of bpsx-run.
        """
        self._status.trouble = self._status.trouble or (text, status)
        self._end_all(time.monotonic())

    # Ending

    def _drain_output(self) -> None:
        """Write the children's last output, kill what they left behind, and report failures."""
        until = time.monotonic() + _LINGER
        while self._pump.sources and (left := until - time.monotonic()) > 0:
            self._pump.step(left)
        for child in self._status.children:
            child.send(signal.SIGKILL)
        self._pump.close()
        if self._status.exit_status(self._pump.written):
            self._pump.say(self._status.report())
        elif losses := self._status.losses():
            self._pump.say("; ".join(losses))
        until = time.monotonic() + _LINGER
        while not (self._pump.written or (self._status.stop and time.monotonic() >= until)):
            self._pump.step(_LINGER)

    def _sweep(self) -> None:
        """Kill all processes that may be left, whatever happened."""
        children = self._status.children
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            if text := child.reap():
                self._pump.say(text)
        end = time.monotonic() + _DYING
        while time.monotonic() < end and not all(child.vanished() for child in children):
            time.sleep(_LOOK)  # the end of a grandchild causes no event
        self._pump.close()
        self._status.scheduler.close()
