"""What leaving a job waits for: a framework's engine first; in total BPSX_SHUTDOWN_TIMEOUT."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from bpsx.api import lifecycle
from bpsx.api.states import Process


@pytest.mark.parametrize("leave", [lifecycle.shutdown, lifecycle.suspend])
def test_time_spent_on_the_engine_counts_towards_the_timeout(
    monkeypatch: pytest.MonkeyPatch, leave: Any
) -> None:
    """Time spent waiting for the engine counts towards the timeout.

    The engine never ends. Its wait returns at once, and each time the clock advances by 2 seconds.
    """
    clock, closed = iter(range(0, 1000, 2)), []
    session = SimpleNamespace(
        config=SimpleNamespace(shutdown_timeout=5.0),
        failure="",
        told=True,
        order={},
        local_rank=0,
        local_size=1,
        compressing=SimpleNamespace(remembered=dict),
        close=lambda failure, waited: closed.append(waited),
    )
    monkeypatch.setattr(lifecycle, "_session", session)
    monkeypatch.setattr(lifecycle, "_owner_pid", os.getpid())
    monkeypatch.setattr(lifecycle, "_engines", [lambda seconds: 1])
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(lifecycle, "_state", Process.INSIDE)
    monkeypatch.setattr(lifecycle, "_kept", None)
    monkeypatch.setattr(lifecycle, "_leaver", 0)
    leave()
    assert closed == [8.0] and not lifecycle.initialised()
