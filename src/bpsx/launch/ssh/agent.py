"""``python -m bpsx.launch.ssh.agent``: the remote end of an ssh connection.

Runs one process as its input says, until the process or the input ends.

The input ends with the connection, and the agent then ends the process. So nothing outlives a
launcher that was killed or a connection that was closed.

The agent reports the end of a killed process only when all of its descendants have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from bpsx.config import child_environment, runtime_dir
from bpsx.launch.child import Child, Ending, signals
from bpsx.launch.spawn import cannot_run, child_setup, passed_on
from bpsx.launch.ssh.descendants import adopt_orphans, kill_all, reap_orphans

_LOOK = 0.02


class Runner:
    """Runs the process that ``request`` describes; ``say`` sends a message to the launcher."""

    def __init__(self, request: dict[str, Any], say: Callable[[str], None]) -> None:
        self._request = request
        self._say = say
        self._child: Child | None = None
        self._ending = Ending(0, float(request["kill_after"]))
        self._rest = b""
        self._input_open = True
        # The pipe from a scheduler's BPSX_STATE_FD, or -1; and what came after its last full line.
        self._state, self._state_rest = -1, b""
        self._told = -1  # the pipe to the BPSX_STATE_FD of a worker machine's bpsx-run, or -1

    def run(self) -> int:
        """Run the process; returns its exit status, or 128 + n if signal n ended it."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        adopt_orphans()
        with (
            signals(self._on_signal) as wake,
            tempfile.TemporaryDirectory(prefix="bpsx-run-", dir=runtime_dir()) as folder,
        ):
            file = Path(folder, "port") if self._request["find_port"] else None
            try:
                self._start(file, mask)
            except OSError as error:
                environment = child_environment(**self._request["environment"])
                text, status = cannot_run(self._request["command"], error, environment)
                return self._over(text, status)
            assert self._child
            try:
                while self._child.status is None:
                    file = self._step(wake, file)
            finally:
                # It could not end its own children, or what they left behind has no launcher.
                if self._child.killed or not self._input_open:
                    kill_all()
                else:
                    self._child.send(signal.SIGKILL)  # to descendants that are left in its group
            self._pass_state_on()
            self._say(f"ended {self._child.status} {int(self._child.killed)}")
            self._child.process.wait()
        return int(self._child.status)

    def _start(self, file: Path | None, mask: set[int]) -> None:
        environment = child_environment(**self._request["environment"])
        if first := self._request["path"]:
            environment["PATH"] = os.pathsep.join([first, *filter(None, [environment.get("PATH")])])
        if file:
            environment["BPSX_PORT_FILE"] = str(file)
        theirs = -1
        if self._request["tells"]:
            self._state, theirs = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._state, False)
        elif self._request["hears"]:
            theirs, self._told = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._told, False)
        if theirs >= 0:
            environment["BPSX_STATE_FD"] = str(theirs)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on())
        try:
            process = subprocess.Popen(
                self._request["command"],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self._request["directory"] or None,
                pass_fds=[theirs] if theirs >= 0 else [],
                preexec_fn=child_setup(mask),
            )
            self._child = Child("", "", process)
            self._say(f"pid {process.pid}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if theirs >= 0:
                os.close(theirs)

    def _over(self, text: str, status: int) -> int:
        print(f"bpsx-run: error: {text}", file=sys.stderr, flush=True)
        self._say(f"ended {status} 0")
        return status

    def _step(self, wake: int, file: Path | None) -> Path | None:
        """Wait for an event and handle it; returns ``file`` until the port has been reported."""
        assert self._child
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if self._input_open:
            poll.register(0, select.POLLIN)
        if self._state >= 0:
            poll.register(self._state, select.POLLIN)
        due = self._ending.due
        waits = [_LOOK if file else None, None if due is None else max(0.0, due - time.monotonic())]
        timeout = min((w for w in waits if w is not None), default=None)
        for descriptor, _ in poll.poll(None if timeout is None else int(timeout * 1000) + 1):
            if descriptor == self._state:
                self._pass_state_on()
            else:
                self._read(descriptor)
        if number := self._ending.take(time.monotonic()):
            self._pass_on(number)
        self._child.poll_exit()
        if self._child.status is None:
            reap_orphans(self._child.process.pid)
        if file and file.exists():
            self._say(f"port {int(file.read_text())}")
            return None
        return file

    def _read(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(descriptor, 4096)
            if descriptor != 0:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line.isdigit():
                    self._pass_on(int(line))
                elif line.startswith(b"tell ") and self._told >= 0:
                    with contextlib.suppress(OSError):  # full, or a single worker reads nothing
                        os.write(self._told, line[5:] + b"\n")
            if not data:
                self._input_open = False
                self._ending.begin(time.monotonic())

    def _pass_state_on(self) -> None:
        """Pass on what the scheduler has written so far."""
        with contextlib.suppress(BlockingIOError):
            while self._state >= 0:
                data = os.read(self._state, 4096)
                *lines, self._state_rest = (self._state_rest + data).split(b"\n")
                for line in lines:
                    self._say(f"state {line.decode(errors='replace')}")
                if not data:
                    os.close(self._state)
                    self._state = -1

    def _pass_on(self, number: int) -> None:
        """Signal the process only, as it is a bpsx-run, which passes signals on itself.

        A second signal would abort its command's cleanup. SIGKILL is for all of its descendants.
        """
        if number == signal.SIGKILL:
            kill_all()
        elif self._child:
            with contextlib.suppress(ProcessLookupError):
                # The process has not been reaped, so the id is still its own.
                os.kill(self._child.process.pid, number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._pass_on(number)


def main() -> int:
    """Read the request and run it; returns the exit status."""
    line = b""
    while not line.endswith(b"\n"):  # unbuffered, as poll() must see what follows
        data = os.read(0, 1)
        if not data:
            return 1
        line += data
    request = json.loads(line)
    marker = str(request["marker"])

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(1, f"{marker}{text}\n".encode())

    say("up")
    directory = request["directory"]
    if directory and not os.path.isdir(directory):
        print(
            f"bpsx-run: error: {os.uname().nodename} has no folder {directory}; name another"
            " with --directory",
            file=sys.stderr,
            flush=True,
        )
        say("ended 2 0")
        return 2
    return Runner(request, say).run()


if __name__ == "__main__":
    sys.exit(main())
