"""A session that learns of a failure while it leaves."""

from __future__ import annotations

import pytest

from bpsx.config import Config
from bpsx.session.session import Session


@pytest.mark.parametrize("given", ["", "ValueError: out of luck"])
def test_a_failure_that_arrives_while_leaving_is_kept(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """The failure arrives after the last check for one, before this worker counts as leaving."""
    ours = Session(Config(role="worker", num_worker=1, num_server=0))
    looks = iter(["nothing to wait for", "nothing left behind"])

    def unfinished() -> int:
        if given or next(looks) == "nothing left behind":
            ours._peer_lost("worker 1 is gone")
        return 0

    monkeypatch.setattr(ours, "_unfinished", unfinished)
    ours.close(failure=given)
    assert ours.failure == (given or "worker 1 is gone")


def test_a_failure_that_arrives_after_close_is_ignored() -> None:
    ours = Session(Config(role="worker", num_worker=1, num_server=0))
    ours.close()
    ours._peer_lost("worker 1 is gone")
    assert ours.failure == ""
