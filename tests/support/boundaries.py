"""A session without a job, for tests of elastic training: they say what its boundaries report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bpsx.plugin import departure, elastic
from bpsx.session.boundaries import Change


def scripted_boundaries(monkeypatch: Any) -> list[Change]:
    """Replace the session; returns the list from which each boundary takes what it reports."""
    found: list[Change] = []
    fake = SimpleNamespace(
        pass_boundary=lambda: found.pop(0) if found else Change(),
        failure="",
        await_agreement=Change,
        expect_boundaries=lambda: None,
        may_leave=False,
        reporter=SimpleNamespace(on_sigterm=None),
        leave=lambda why: False,
    )
    for module in (elastic, departure):
        monkeypatch.setattr(module, "session", lambda: fake)
    return found
