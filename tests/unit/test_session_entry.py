"""How a worker enters a job: the number that a newcomer takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bpsx.config import Config
from bpsx.local.neighbourhood import Neighbourhood
from bpsx.session import entry

WORKER = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "4",
    "DMLC_NUM_SERVER": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "1",
    "DMLC_NODE_HOST": "127.0.0.1",
    "BPSX_ELASTIC": "shrink",
}


def welcome(rank: int, meeting: int) -> dict:
    return {
        "type": "WELCOME",
        "rank": rank,
        "meeting": meeting,
        "servers": [],
        "job": 9,
        "again": False,
        "shrinks": True,
        "living": [0, 1, 2],
    }


@pytest.mark.parametrize("second", [3, 1])
def test_a_newcomer_that_is_welcomed_again_takes_the_number_given_then(monkeypatch, second):
    """The first meeting is called off, and the scheduler may have lost this newcomer meanwhile."""
    said, reached = [], []
    link = SimpleNamespace(
        enter_job=lambda role, rank, host, lanes, again: welcome(3, 1),
        await_welcome=lambda: welcome(second, 2),
        say=lambda kind, **fields: said.append((kind, fields)),
        early=[{"type": "TERM", "entered": [second]}],
        stop=lambda: None,
    )

    def reach(config, near, reporter, link, welcome, opened):
        reached.append((config.rank, near.sender, reporter._about["rank"]))
        if len(reached) == 1:
            raise entry._MeetingOff
        return None, None, None

    monkeypatch.setattr(entry, "_reach_lanes", reach)
    config = Config(WORKER)
    assert config.asks_for_number
    found = entry._enter_job(config, Neighbourhood(config), link, False)
    with found.opened:
        assert reached == [(3, 3, 3), (second, second, second)]
        assert found.config.rank == second and said == [("READY", {"meeting": 2})]
