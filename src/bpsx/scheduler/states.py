"""States of nodes, the job and lost servers' keys at the scheduler, as tables of transitions. Pure.

A node has three states at a time, each with a table of its own: where it is (:class:`Presence`),
whether it has confirmed the errors that it was sent (:class:`Hearing`), and whether it has called
``join()`` (:class:`Supply`). They do not depend on each other: RESET goes to workers in ``join()``,
too, and a worker that waits to leave may have joined. One table would need the product of all.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from bpsx.system.transitions import Table


class Presence(Enum):
    """Membership of a process in the job."""

    ABSENT = auto()  #: not in the job
    PRESENT = auto()  #: waits for the job to begin
    MISSED = auto()  #: gone or refused while the job gathers: its place is free
    COMING = auto()  #: a server that joins the running job: workers connect to it
    LIVE = auto()
    LEAVING = auto()  #: its BYE waits: others confirm errors, or need what this worker keeps
    LEFT = auto()  #: left the job, or died


class PresenceEvent(Enum):
    """Event that changes a :class:`Presence`."""

    ACCEPTED = auto()  #: its HELLO
    TURNED_AWAY = auto()  #: its HELLO was refused, or it said CANNOT, and its place is free
    RETURNED = auto()  #: its place is taken, by itself or by another
    WITHDREW = auto()  #: BYE while the job gathers, or HELLO on another connection
    VANISHED = auto()  #: its connection ended while the job gathers
    STARTED = auto()  #: the last node has come
    CAME_LATE = auto()  #: HELLO of a server to a running job
    REACHED = auto()  #: the last sender has connected to it
    ENTERED = auto()  #: a worker joins the running job
    ASKED_TO_LEAVE = auto()  #: BYE while others have not confirmed an error, or keys move
    WENT = auto()  #: BYE, or its connection ended


PRESENCE: Table[Presence, PresenceEvent] = Table(
    "a node",
    {
        Presence.ABSENT: {
            PresenceEvent.ACCEPTED: Presence.PRESENT,
            PresenceEvent.TURNED_AWAY: Presence.MISSED,
            PresenceEvent.CAME_LATE: Presence.COMING,
            PresenceEvent.ENTERED: Presence.LIVE,
        },
        Presence.PRESENT: {
            PresenceEvent.WITHDREW: Presence.ABSENT,
            PresenceEvent.VANISHED: Presence.MISSED,
            PresenceEvent.STARTED: Presence.LIVE,
            PresenceEvent.WENT: Presence.LEFT,  # the job failed before it began
        },
        Presence.MISSED: {
            PresenceEvent.TURNED_AWAY: Presence.MISSED,
            PresenceEvent.RETURNED: Presence.ABSENT,
        },
        Presence.COMING: {PresenceEvent.REACHED: Presence.LIVE, PresenceEvent.WENT: Presence.LEFT},
        Presence.LIVE: {
            PresenceEvent.ASKED_TO_LEAVE: Presence.LEAVING,
            PresenceEvent.WENT: Presence.LEFT,
        },
        Presence.LEAVING: {PresenceEvent.WENT: Presence.LEFT},
        Presence.LEFT: {},
    },
)


class Hearing(Enum):
    """Whether a worker has confirmed the errors that it was sent."""

    HEARD = auto()
    UNHEARD = auto()


class HearingEvent(Enum):
    """Event that changes a worker's :class:`Hearing`."""

    ERROR_SENT = auto()  #: FAILED or RESET
    ERROR_CONFIRMED = auto()  #: HEARD, and others are outstanding
    LAST_CONFIRMED = auto()  #: HEARD, and no other is outstanding
    EXCUSED = auto()  #: it leaves, or the job fails


HEARING: Table[Hearing, HearingEvent] = Table(
    "a worker's confirmations",
    {
        Hearing.HEARD: {
            HearingEvent.ERROR_SENT: Hearing.UNHEARD,
            HearingEvent.EXCUSED: Hearing.HEARD,
        },
        Hearing.UNHEARD: {
            HearingEvent.ERROR_SENT: Hearing.UNHEARD,
            HearingEvent.ERROR_CONFIRMED: Hearing.UNHEARD,
            HearingEvent.LAST_CONFIRMED: Hearing.HEARD,
            HearingEvent.EXCUSED: Hearing.HEARD,
        },
    },
)


class Supply(Enum):
    """Whether a worker still has data."""

    PUSHING = auto()
    JOINED = auto()


class SupplyEvent(Enum):
    """Event that changes a worker's :class:`Supply`."""

    JOINED = auto()  #: JOIN
    ALL_JOINED = auto()  #: all have joined, and all marks are cleared


SUPPLY: Table[Supply, SupplyEvent] = Table(
    "a worker's data",
    {
        Supply.PUSHING: {SupplyEvent.JOINED: Supply.JOINED},
        Supply.JOINED: {SupplyEvent.ALL_JOINED: Supply.PUSHING},
    },
)


class JobState(StrEnum):
    """State of the job. Observers get the values."""

    WAITING = auto()  #: for nodes
    RUNNING = auto()
    DONE = auto()  #: all workers have left in good order
    FAILED = auto()


class JobEvent(Enum):
    """Event in the life of the job."""

    COMPLETE = auto()  #: all nodes are present
    REBUILT = auto()  #: all workers of a job are back whose scheduler has died
    EXPIRED = auto()  #: the deadline is over, or a missed node did not come back
    ABORTED = auto()  #: the scheduler has to end
    LOST = auto()  #: a death, a failure, or an error after which workers cannot go on
    EMPTY = auto()  #: the last worker has left
    EMPTY_AFTER_DEATHS = auto()  #: the same, and workers of the asynchronous job have died


JOB: Table[JobState, JobEvent] = Table(
    "the job",
    {
        JobState.WAITING: {
            JobEvent.COMPLETE: JobState.RUNNING,
            JobEvent.REBUILT: JobState.RUNNING,
            JobEvent.EXPIRED: JobState.FAILED,
            JobEvent.ABORTED: JobState.FAILED,
        },
        JobState.RUNNING: {
            JobEvent.ABORTED: JobState.FAILED,
            JobEvent.LOST: JobState.FAILED,
            JobEvent.EMPTY: JobState.DONE,
            JobEvent.EMPTY_AFTER_DEATHS: JobState.FAILED,
        },
        JobState.DONE: {},
        JobState.FAILED: {},
    },
)


class Handover(Enum):
    """Progress of other servers in taking over a lost server's keys."""

    SETTLED = auto()  #: no server has been lost, or its keys are at home on other servers
    STARVED = auto()  #: the last server has been lost, and the job waits for a new one
    MOVING = auto()  #: some senders have not sent MOVED
    SETTLING = auto()  #: all have; one that is late may still get a result from another


class HandoverEvent(Enum):
    """Event that changes a :class:`Handover`."""

    LAST_SERVER_LOST = auto()  #: no other can take its keys over yet
    SERVER_LOST = auto()  #: the next term begins
    KEYS_YIELDED = auto()  #: the next term begins: living servers yield keys to others
    WORKER_LOST = auto()  #: the same: all lanes take their own keys over anew
    ALL_MOVED = auto()  #: the last MOVED
    TIME_OVER = auto()  #: late senders have had the time that they need
    ALL_LEAVE = auto()  #: all workers that are left have said BYE, and need no key


HANDOVER: Table[Handover, HandoverEvent] = Table(
    "the keys of lost servers",
    {
        Handover.SETTLED: {
            HandoverEvent.LAST_SERVER_LOST: Handover.STARVED,
            HandoverEvent.SERVER_LOST: Handover.MOVING,
            HandoverEvent.KEYS_YIELDED: Handover.MOVING,
            HandoverEvent.WORKER_LOST: Handover.MOVING,
        },
        Handover.STARVED: {
            HandoverEvent.SERVER_LOST: Handover.MOVING,
            HandoverEvent.WORKER_LOST: Handover.STARVED,
            HandoverEvent.ALL_LEAVE: Handover.SETTLED,
        },
        Handover.MOVING: {
            HandoverEvent.LAST_SERVER_LOST: Handover.STARVED,
            HandoverEvent.SERVER_LOST: Handover.MOVING,
            HandoverEvent.WORKER_LOST: Handover.MOVING,
            HandoverEvent.ALL_MOVED: Handover.SETTLING,
            HandoverEvent.ALL_LEAVE: Handover.SETTLED,
        },
        Handover.SETTLING: {
            HandoverEvent.LAST_SERVER_LOST: Handover.STARVED,
            HandoverEvent.SERVER_LOST: Handover.MOVING,
            HandoverEvent.KEYS_YIELDED: Handover.MOVING,
            HandoverEvent.WORKER_LOST: Handover.MOVING,
            HandoverEvent.TIME_OVER: Handover.SETTLED,
            HandoverEvent.ALL_LEAVE: Handover.SETTLED,
        },
    },
)
