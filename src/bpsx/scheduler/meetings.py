"""A meeting: how all workers of a job agree when newcomers enter. Pure.

docs/internals/elastic-joins.md has the protocol. Owned by the hub's only thread; callers pass the
time.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import Any

from bpsx.system.transitions import Table


class MeetingState(Enum):
    """State of the present meeting."""

    IDLE = auto()  #: there is none
    ASKING = auto()  #: workers say which boundary they have passed
    GATHERING = auto()  #: they stop at the boundary of the meeting
    CONNECTING = auto()  #: newcomers connect to the lanes
    ENTERING = auto()  #: servers learn of the newcomers


class MeetingEvent(Enum):
    """Event in the life of a meeting."""

    CALLED = auto()  #: a newcomer waits, or a worker was lost
    ALL_SAID = auto()  #: the last AT
    ALL_HERE = auto()  #: the last HERE
    ALL_MET = auto()  #: the last HERE, and no newcomer waits: workers were lost, or leave
    ANNOUNCED = auto()  #: the last HERE; some will leave at the next boundary
    ALL_READY = auto()  #: the last READY
    ALL_CLEARED = auto()  #: the last CLEARED
    CALLED_OFF = auto()
    TAKEN_OVER = auto()  #: a scheduler before had told some servers


MEETING: Table[MeetingState, MeetingEvent] = Table(
    "a meeting",
    {
        MeetingState.IDLE: {
            MeetingEvent.CALLED: MeetingState.ASKING,
            MeetingEvent.TAKEN_OVER: MeetingState.ENTERING,
        },
        MeetingState.ASKING: {
            MeetingEvent.ALL_SAID: MeetingState.GATHERING,
            MeetingEvent.CALLED_OFF: MeetingState.IDLE,
        },
        MeetingState.GATHERING: {
            MeetingEvent.ALL_HERE: MeetingState.CONNECTING,
            MeetingEvent.ALL_MET: MeetingState.IDLE,
            MeetingEvent.ANNOUNCED: MeetingState.GATHERING,
            MeetingEvent.CALLED_OFF: MeetingState.IDLE,
        },
        MeetingState.CONNECTING: {
            MeetingEvent.ALL_READY: MeetingState.ENTERING,
            MeetingEvent.CALLED_OFF: MeetingState.IDLE,
        },
        MeetingState.ENTERING: {MeetingEvent.ALL_CLEARED: MeetingState.IDLE},
    },
)


class Meeting:
    """The present meeting, or none.

    ``number``: of the latest meeting. ``awaited``: connections whose answer is due. ``since``: when
    the state began. ``announced``: some workers leave at its second boundary.
    """

    def __init__(self) -> None:
        self.state = MeetingState.IDLE
        self.number = 0
        self.awaited: set[bytes] = set()
        self.since = 0.0
        self.guests = False  # whether newcomers enter
        self.names = ""  # declared names, which one of the workers tells the newcomers
        self.announced = False
        self._passed = 0  # the largest number of boundaries that a worker has passed

    def move(self, event: MeetingEvent, awaited: Collection[bytes], now: float) -> None:
        """Enter the state after ``event``. ``awaited``: connections that must answer in it."""
        self.state = MEETING.after(self.state, event)
        self.awaited, self.since = set(awaited), now
        if event is MeetingEvent.CALLED:
            self.number += 1
            self._passed, self.names, self.announced = 0, "", False
        elif event is MeetingEvent.ANNOUNCED:
            self.announced, self.names = True, ""  # there may be more names at the next boundary

    def answer(self, state: MeetingState, ident: bytes, m: dict[str, Any]) -> None:
        """Handle AT, HERE or READY; ignore those of other meetings."""
        if m["meeting"] != self.number or self.state is not state:
            return
        self.awaited.discard(ident)
        self.names = self.names or m.get("names", "")
        self._passed = max(self._passed, m.get("boundary", 0))

    @property
    def boundary(self) -> int:
        """The boundary at which the workers meet, once all have answered SOON."""
        return self._passed + 1
