"""Life of a session on a worker, as a table of transitions.

A broken data connection is not one of these states, since it may break in any of them:
``Lanes.broken`` notes it beside them, until the scheduler explains it or a deadline makes a death
of it.
"""

from __future__ import annotations

import threading
from enum import Enum, auto

from bpsx.system.transitions import Table


class Life(Enum):
    """State of a session."""

    GATHERING = auto()  #: the constructor waits for the other processes
    RUNNING = auto()
    JOINING = auto()  #: in join(), before JOIN was sent: this worker's push_pulls end first
    JOINED = auto()  #: in join(): the scheduler knows
    STOPPED = auto()  #: at a boundary: all workers wait for one that enters or leaves
    DEPARTED = auto()  #: the others go on without this worker, which has asked for it
    BROKEN = auto()  #: the core has failed by itself; the others hear of it when this worker leaves
    FAILED = auto()  #: the job has failed
    ENDING = auto()  #: close() waits for work in progress
    LEAVING = auto()  #: close() says goodbye and frees everything; failures no longer count
    CLOSED = auto()


class Event(Enum):
    """Event in the life of a session."""

    BEGUN = auto()
    CANNOT_BEGIN = auto()
    JOIN_CALLED = auto()
    JOIN_INTERRUPTED = auto()
    JOIN_SENT = auto()
    ALL_JOINED = auto()
    STOPPED = auto()
    GOES_ON = auto()
    LET_GO = auto()
    CORE_FAILS = auto()
    JOB_FAILS = auto()
    CLOSE_CALLED = auto()
    WORK_ENDS = auto()
    FREED = auto()


#: The states in which nothing may begin: this worker has called join(), and some others have not;
#: or it has stopped; or it is in the job no more.
HALTED = (Life.JOINING, Life.JOINED, Life.STOPPED, Life.DEPARTED)
#: The states in which join() cannot end well.
OVER = (Life.BROKEN, Life.FAILED, Life.ENDING, Life.LEAVING, Life.CLOSED)
#: The states after close() was called.
CLOSING = (Life.ENDING, Life.LEAVING, Life.CLOSED)

_JOIN_ENDS = {Event.JOIN_INTERRUPTED, Event.ALL_JOINED, Event.GOES_ON}
_LATE = {Event.JOIN_CALLED, *_JOIN_ENDS, Event.CORE_FAILS}


def _stays(state: Life, *events: Event) -> dict[Event, Life]:
    return dict.fromkeys(events, state)


SESSION: Table[Life, Event] = Table(
    "a session",
    {
        Life.GATHERING: {Event.BEGUN: Life.RUNNING, Event.CANNOT_BEGIN: Life.CLOSED},
        Life.RUNNING: {
            Event.JOIN_CALLED: Life.JOINING,
            Event.STOPPED: Life.STOPPED,
            Event.CORE_FAILS: Life.BROKEN,
            Event.JOB_FAILS: Life.FAILED,
            Event.CLOSE_CALLED: Life.ENDING,
        },
        Life.JOINING: {
            Event.JOIN_INTERRUPTED: Life.RUNNING,
            Event.JOIN_SENT: Life.JOINED,
            Event.CORE_FAILS: Life.BROKEN,
            Event.JOB_FAILS: Life.FAILED,
            Event.CLOSE_CALLED: Life.ENDING,
            **_stays(Life.JOINING, Event.JOIN_CALLED),
        },
        Life.JOINED: {
            Event.ALL_JOINED: Life.RUNNING,
            Event.CORE_FAILS: Life.BROKEN,
            Event.JOB_FAILS: Life.FAILED,
            Event.CLOSE_CALLED: Life.ENDING,
            **_stays(Life.JOINED, Event.JOIN_CALLED, Event.JOIN_INTERRUPTED),
        },
        Life.STOPPED: {
            Event.GOES_ON: Life.RUNNING,
            Event.LET_GO: Life.DEPARTED,
            Event.CORE_FAILS: Life.BROKEN,
            Event.JOB_FAILS: Life.FAILED,
            Event.CLOSE_CALLED: Life.ENDING,
        },
        Life.DEPARTED: {
            Event.CLOSE_CALLED: Life.LEAVING,
            **_stays(Life.DEPARTED, *_LATE, Event.JOB_FAILS),
        },
        Life.BROKEN: {
            Event.JOB_FAILS: Life.FAILED,
            Event.CLOSE_CALLED: Life.LEAVING,
            **_stays(Life.BROKEN, *_LATE),
        },
        Life.FAILED: {
            Event.CLOSE_CALLED: Life.LEAVING,
            **_stays(Life.FAILED, *_LATE, Event.JOB_FAILS),
        },
        Life.ENDING: {
            Event.JOB_FAILS: Life.LEAVING,
            Event.WORK_ENDS: Life.LEAVING,
            Event.FREED: Life.CLOSED,
            **_stays(Life.ENDING, *_LATE, Event.CLOSE_CALLED),
        },
        Life.LEAVING: {
            Event.FREED: Life.CLOSED,
            **_stays(Life.LEAVING, *_LATE, Event.JOB_FAILS, Event.CLOSE_CALLED, Event.WORK_ENDS),
        },
        Life.CLOSED: _stays(Life.CLOSED, *_LATE, Event.JOB_FAILS, Event.CLOSE_CALLED),
    },
)


class Lifetime:
    """State of one session. Thread-safe.

    ``lock`` guards it; holders of the lock know that the state does not change. ``changed`` is
    notified of every event. ``halted``: whether the state is in :data:`HALTED`, kept for the
    path of each push_pull, where a look at the state would cost more.
    """

    def __init__(self) -> None:
        # Re-entrant: a user's signal handler may shut down while the main thread holds the lock.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.state = Life.GATHERING
        self.halted = False

    def move(self, event: Event) -> Life:
        """Go to the state that follows ``event``, and return it."""
        with self.changed:
            self.state = SESSION.after(self.state, event)
            self.halted = self.state in HALTED
            self.changed.notify_all()
            return self.state
