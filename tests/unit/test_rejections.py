"""What the scheduler logs about connections that it refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import zmq

from bpsx.scheduler.rejections import Refusals
from bpsx.scheduler.sockets import REFUSED


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    logger = logging.getLogger("bpsx.scheduler")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keep = Keep()
    logger.addHandler(keep)
    yield lines
    logger.removeHandler(keep)


def turn_away(refusals: Refusals, descriptor: int) -> None:
    refusals.event({"event": REFUSED, "value": descriptor})
    assert refusals.event({"event": zmq.EVENT_DISCONNECTED, "value": descriptor}) is False


def test_later_warnings_count_from_the_last_one(said: list[str]) -> None:
    refusals = Refusals(every=0.0)
    assert refusals.hint() == ""
    for _ in range(
        3
    ):  # Peers that close at once have no known address; they are logged if they come repeatedly.
        turn_away(refusals, 99)
    assert len(said) == 1 and said[0].endswith("or speaks another protocol; 2 more before this one")
    for _ in range(3):
        turn_away(refusals, 99)
    assert len(said) == 2 and said[1].endswith(
        "or speaks another protocol; 2 more since the last such warning"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (
            1,
            (
                " (1 connection refused for not knowing the job secret, the last from an unknown"
                " address)"
            ),
        ),
        (
            2,
            (
                " (2 connections refused for not knowing the job secret, the last from an unknown"
                " address)"
            ),
        ),
    ],
)
def test_the_hint_has_the_number_of_refused_connections(count: int, text: str) -> None:
    refusals = Refusals()
    for _ in range(count):
        turn_away(refusals, 99)
    assert refusals.hint() == text
