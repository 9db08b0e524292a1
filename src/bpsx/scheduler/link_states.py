"""States of a node's link to the scheduler, as a table of transitions. Pure.

docs/internals/elastic-scheduler.md says what a node does in each.
"""

from __future__ import annotations

from enum import Enum, auto

from bpsx.system.transitions import Table


class LinkState(Enum):
    """State of a link."""

    ENTERING = auto()  #: the node enters the job
    CONNECTED = auto()
    ORPHANED = auto()  #: no scheduler is there; the node waits for another one
    RETURNING = auto()  #: introduced to another scheduler, which waits for the other nodes
    OVER = auto()  #: the node has left, or the job is over for it


class LinkEvent(Enum):
    """Event in the life of a link."""

    STARTED = auto()
    CONNECTION_ENDED = auto()
    CONNECTION_MADE = auto()
    RESUMED = auto()
    REFUSED = auto()  #: by a scheduler that does not fit; another one may come
    JOB_OVER = auto()  #: refused, and waiting on is in vain
    WAIT_OVER = auto()
    GOODBYE = auto()


LINK: Table[LinkState, LinkEvent] = Table(
    "a link to the scheduler",
    {
        LinkState.ENTERING: {LinkEvent.STARTED: LinkState.CONNECTED},
        LinkState.CONNECTED: {
            LinkEvent.CONNECTION_ENDED: LinkState.ORPHANED,
            LinkEvent.GOODBYE: LinkState.OVER,
        },
        LinkState.ORPHANED: {
            LinkEvent.CONNECTION_MADE: LinkState.RETURNING,
            LinkEvent.CONNECTION_ENDED: LinkState.ORPHANED,
            LinkEvent.WAIT_OVER: LinkState.OVER,
        },
        LinkState.RETURNING: {
            LinkEvent.RESUMED: LinkState.CONNECTED,
            LinkEvent.CONNECTION_ENDED: LinkState.ORPHANED,
            LinkEvent.REFUSED: LinkState.ORPHANED,
            LinkEvent.JOB_OVER: LinkState.OVER,
            # This worker has left, and had not heard so from the scheduler before.
            LinkEvent.GOODBYE: LinkState.OVER,
        },
        LinkState.OVER: {
            LinkEvent.CONNECTION_ENDED: LinkState.OVER,
            LinkEvent.GOODBYE: LinkState.OVER,
        },
    },
)
