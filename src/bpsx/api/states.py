"""Life of this process between jobs, as a table of transitions."""

from __future__ import annotations

from enum import Enum, auto

from bpsx.system.transitions import Table


class Process(Enum):
    """Relation of this process to a job."""

    OUTSIDE = auto()  #: before init(), after shutdown(), and in a forked child
    CONNECTING = auto()  #: in init() or resume(), after shutdown() or at first
    INSIDE = auto()
    LEAVING = auto()  #: shutdown() or the exit hook closes the session
    SUSPENDING = auto()  #: suspend() closes the session
    SUSPENDED = auto()  #: names, compression and place of the last job are kept
    RETURNING = auto()  #: in init() or resume(), after suspend()


class Event(Enum):
    """Event in the life of this process."""

    INIT_OR_RESUME = auto()
    SESSION_BEGINS = auto()
    SESSION_CANNOT_BEGIN = auto()
    SHUTDOWN = auto()
    SUSPEND = auto()
    SESSION_IS_CLOSED = auto()
    FORKED = auto()  #: seen in the child, at its first call


PROCESS: Table[Process, Event] = Table(
    "this process",
    {
        Process.OUTSIDE: {
            Event.INIT_OR_RESUME: Process.CONNECTING,
            Event.SHUTDOWN: Process.OUTSIDE,
            Event.SUSPEND: Process.OUTSIDE,
            Event.FORKED: Process.OUTSIDE,
        },
        Process.CONNECTING: {
            Event.SESSION_BEGINS: Process.INSIDE,
            Event.SESSION_CANNOT_BEGIN: Process.OUTSIDE,
            # A signal handler may interrupt init().
            Event.SHUTDOWN: Process.CONNECTING,
            Event.SUSPEND: Process.CONNECTING,
            Event.FORKED: Process.OUTSIDE,
        },
        Process.INSIDE: {
            Event.SHUTDOWN: Process.LEAVING,
            Event.SUSPEND: Process.SUSPENDING,
            Event.FORKED: Process.OUTSIDE,
        },
        Process.LEAVING: {
            Event.SESSION_IS_CLOSED: Process.OUTSIDE,
            Event.SHUTDOWN: Process.LEAVING,
            Event.SUSPEND: Process.LEAVING,
            Event.FORKED: Process.OUTSIDE,
        },
        Process.SUSPENDING: {
            Event.SESSION_IS_CLOSED: Process.SUSPENDED,
            Event.SHUTDOWN: Process.LEAVING,
            Event.SUSPEND: Process.SUSPENDING,
            Event.FORKED: Process.OUTSIDE,
        },
        Process.SUSPENDED: {
            Event.INIT_OR_RESUME: Process.RETURNING,
            Event.SHUTDOWN: Process.OUTSIDE,
            Event.SUSPEND: Process.SUSPENDED,
            Event.FORKED: Process.SUSPENDED,
        },
        Process.RETURNING: {
            Event.SESSION_BEGINS: Process.INSIDE,
            Event.SESSION_CANNOT_BEGIN: Process.SUSPENDED,
            Event.SHUTDOWN: Process.RETURNING,
            Event.SUSPEND: Process.RETURNING,
            Event.FORKED: Process.OUTSIDE,
        },
    },
)
