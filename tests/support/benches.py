"""Runs a benchmark in pytest's process; its processes are forks, see :mod:`support.forking`.

To start a benchmark's six processes anew takes 20 s of a core for PyTorch, and more for TensorFlow.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

from bench import __main__ as bench
from bench import jobs
from bpsx.config import child_environment
from support.forking import Fork, Kind, nursery_for

_start_anew = jobs.start


class _Forked(Fork):
    """As :class:`subprocess.Popen` without ``text``; the output goes where bench.jobs wants it."""

    def __init__(
        self, command: list[str], env: dict[str, str], kind: Kind, pipes: bool, log: Path | None
    ) -> None:
        # In the log when the process has ended, as a thread might not have passed it on by then.
        super().__init__(command, env, kind, log)
        texts: tuple[Any, ...] = (self.stdin, self.stdout, self.stderr)
        self.stdin, self.stdout, self.stderr = (text.detach() for text in texts)
        passed_on: list[IO[bytes]] = [self.stderr]
        if not pipes:
            self.stdin.close()
            passed_on.append(self.stdout)
        for stream in passed_on:
            threading.Thread(target=self._pass_on, args=(stream, log), daemon=True).start()

    @staticmethod
    def _pass_on(stream: IO[bytes], log: Path | None) -> None:
        with open(log or "/dev/stderr", "ab", 0) as file, stream:
            shutil.copyfileobj(stream, file, 1)


def _start(
    module: str,
    environment: Mapping[str, str],
    *,
    pipes: bool = False,
    prefix: Sequence[str] = (),
    log: Path | None = None,
) -> _Forked | subprocess.Popen[bytes]:
    """Do what :func:`bench.jobs.start` does."""
    command = [*prefix, sys.executable, "-m", module]
    env = child_environment(**environment)
    kind = nursery_for(command, env)
    if kind is None:
        return _start_anew(module, environment, pipes=pipes, prefix=prefix, log=log)
    with contextlib.chdir(jobs.ROOT):
        return _Forked(command, env, kind, pipes, log)


@contextlib.contextmanager
def _sigterm_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def forks() -> contextlib.AbstractContextManager[Any]:
    """A context in which :mod:`bench.jobs` starts processes as forks."""
    return mock.patch.object(jobs, "start", _start)


def cases(*words: str) -> dict[str, dict[str, Any]]:
    """Return the cases of ``python -m bench WORDS... --json``, by name."""
    out = io.StringIO()
    with _sigterm_stays(), forks(), contextlib.redirect_stdout(out):
        status = bench.main([*words, "--json"])
    assert status == 0, "the benchmark could not run; standard error says why"
    return {case["case"]: case for case in json.loads(out.getvalue())["cases"]}
