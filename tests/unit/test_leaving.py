"""What leaving a job waits for: a framework's engine first; in total BPSX_SHUTDOWN_TIMEOUT."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from bpsx.api import verbs


@pytest.mark.parametrize("leave", [verbs.shutdown, verbs.suspend])
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
        close=lambda waited: closed.append(waited),
    )
    monkeypatch.setattr(verbs, "_session", session)
    monkeypatch.setattr(verbs, "_owner_pid", os.getpid())
    monkeypatch.setattr(verbs, "_engines", [lambda seconds: 1])
    monkeypatch.setattr(verbs, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(verbs, "_order", verbs._order)
    monkeypatch.setattr(verbs, "_remembered", verbs._remembered)
    monkeypatch.setattr(verbs, "_suspended", None)
    leave()
    assert closed == [8.0] and not verbs.initialised()
