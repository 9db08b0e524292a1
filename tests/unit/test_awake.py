"""The clock that does not count the time in which its process was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from bpsx.system.awake import AwakeClock


def test_it_counts_what_passes_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bpsx.system.awake.time.monotonic", lambda: now[0])
    clock = AwakeClock(60.0)
    assert clock.now() == 0.0
    for passed, counted in ((0.5, 0.5), (1.0, 1.5), (3600.0, 2.5), (0.0, 2.5), (0.25, 2.75)):
        now[0] += passed
        assert clock.now() == counted


_STOPPED = """
import sys, time
from bpsx.system.awake import AwakeClock

clock, began = AwakeClock(60.0), time.monotonic()
print("ready", flush=True)
while sys.stdin.readline() == "read\\n":
    print(clock.now(), time.monotonic() - began, flush=True)
"""


def test_a_stopped_process_does_not_count() -> None:
    """A real process, stopped for two seconds."""
    with subprocess.Popen(
        [sys.executable, "-c", _STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("read\n")
        process.stdin.flush()
        counted, passed = map(float, process.stdout.readline().split())
        process.stdin.close()
    assert counted == 1.0 and passed >= 2.0


def test_a_short_patience_takes_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("bpsx.system.awake.time.monotonic", lambda: now[0])
    clock = AwakeClock(1.0)
    for counted in (0.5, 1.0):
        now[0] += 3600.0
        assert clock.now() == counted
