"""This worker's boundaries: moments of the script at which workers may enter or leave the job.

docs/internals/elastic-joins.md has the protocol and its table of states,
elastic-departures-workers.md what it adds for workers that leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from bpsx.session.states import OVER, Event, Life, Lifetime
from bpsx.system.transitions import Table


class Change(NamedTuple):
    """The workers, by number, that have entered the job or were lost since the last meeting.

    All workers that have met get the same. ``lost``: those that have left, too. ``leaving``: leave
    at the next boundary. ``left``: this worker has left; it alone knows.
    """

    entered: Sequence[int] = ()
    lost: Sequence[int] = ()
    leaving: Sequence[int] = ()
    left: bool = False


class Place(Enum):
    """Progress of this worker in a meeting."""

    FREE = auto()  #: there is no meeting
    ASKED = auto()  #: it has said AT, and passes no further boundary
    BOUND = auto()  #: it stops at the boundary of MEET
    HERE = auto()  #: it has stopped there


class PlaceEvent(Enum):
    """Event that changes a :class:`Place`."""

    SOON = auto()
    MEET = auto()
    STOPPED = auto()  #: HERE
    MET = auto()  #: TERM that ends the meeting
    ANNOUNCED = auto()  #: TERM that names the workers that leave at the next boundary
    LET_GO = auto()  #: GOODBYE
    OFF = auto()


PLACE: Table[Place, PlaceEvent] = Table(
    "a worker at its boundaries",
    {
        Place.FREE: {
            PlaceEvent.SOON: Place.ASKED,
            # This is a newcomer: for it there was no meeting.
            PlaceEvent.MET: Place.FREE,
            PlaceEvent.OFF: Place.FREE,
        },
        # SOON in a meeting: another scheduler calls the next one.
        Place.ASKED: {
            PlaceEvent.MEET: Place.BOUND,
            PlaceEvent.SOON: Place.ASKED,
            PlaceEvent.OFF: Place.FREE,
        },
        Place.BOUND: {
            PlaceEvent.STOPPED: Place.HERE,
            PlaceEvent.SOON: Place.ASKED,
            PlaceEvent.OFF: Place.FREE,
        },
        Place.HERE: {
            PlaceEvent.SOON: Place.ASKED,
            PlaceEvent.MET: Place.FREE,
            PlaceEvent.ANNOUNCED: Place.BOUND,
            PlaceEvent.LET_GO: Place.FREE,
            PlaceEvent.OFF: Place.FREE,
        },
    },
)


class Boundaries:
    """The boundaries of this worker.

    One thread of the script calls :meth:`pass_one`, the control thread the other methods. The
    session's lock guards all.
    """

    def __init__(self, life: Lifetime) -> None:
        self._life = life
        self._place = Place.FREE
        self._meeting = -1
        self._passed = 0  # boundaries that this worker has passed since a worker last entered
        self._stop = 0  # boundary of the meeting
        self._tells = False  # this worker tells newcomers which names there are
        self._cut_short = False  # an exception has ended the wait at the boundary passed last
        self._lost: list[int] = []
        self._change = Change()
        #: Whether the script has boundaries.
        self.used = False
        #: Whether this worker has asked to leave the job.
        self.asked = False
        #: Whether this worker has joined late and may not have got the model.
        self.fresh = False

    def pass_one(
        self, settle: Callable[[], None], send: Callable[..., None], names: Callable[[], str]
    ) -> Change:
        """Pass the next boundary; wait there if the workers meet.

        ``settle``: waits until nothing of this worker is under way. ``send``: sends a message to
        the scheduler. ``names``: what newcomers have to know of names. Returns at once if the job
        ends meanwhile. After an exception, such as that of a signal's handler, the next call goes
        on with the same boundary.
        """
        self.used, settled = True, False
        while True:
            with self._life.changed:
                if self._cut_short:
                    self._await_end()
                    return self._take_change()
                self._wait_for(lambda: self._place is not Place.ASKED)
                bound = self._place is Place.BOUND and self._life.state not in OVER
                stops = bound and self._passed + 1 == self._stop
                if settled or not stops:
                    if stops:
                        self._stay(send, names)
                    else:
                        self._passed += 1
                    return self._take_change()
            settle()
            settled = True

    def _take_change(self) -> Change:
        change, self._change = self._change, Change()
        return change

    def note_synced(self, send: Callable[..., None]) -> None:
        """Tell the scheduler that a newcomer has the model, once its script passes a boundary."""
        if self.fresh:
            self.fresh = False
            send("SYNCED")

    def _stay(self, send: Callable[..., None], names: Callable[[], str]) -> None:
        """Stop, until the meeting has ended or is off. The caller holds the lock."""
        self._move(PlaceEvent.STOPPED)
        send("HERE", meeting=self._meeting, names=names() if self._tells else "")
        self._passed, self._cut_short = self._passed + 1, True
        self._await_end()

    def _await_end(self) -> None:
        """Wait for the end of the meeting at which this worker has stopped."""
        if self._place is Place.HERE:
            self._life.move(Event.STOPPED)
            try:
                # Another meeting may have been called before this thread wakes up.
                self._wait_for(lambda: self._place is not Place.HERE)
            finally:
                self._life.move(Event.GOES_ON)
        self._cut_short = False

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        self._life.changed.wait_for(lambda: ready() or self._life.state in OVER)

    def _move(self, event: PlaceEvent) -> None:
        self._place = PLACE.after(self._place, event)
        self._life.changed.notify_all()

    def hear(self, message: dict[str, Any], send: Callable[..., None]) -> None:
        """Handle SOON, MEET or OFF."""
        kind = message["type"]
        with self._life.changed:
            if kind == "SOON":
                self._meeting = message["meeting"]
                self._move(PlaceEvent.SOON)
                send("AT", meeting=self._meeting, boundary=self._passed)
            elif kind == "MEET":
                self._stop, self._tells = message["boundary"], message["tells"]
                self._move(PlaceEvent.MEET)
            else:
                self._move(PlaceEvent.OFF)

    def meet(self, entered: Sequence[int], newcomer: bool, leaving: Sequence[int] = ()) -> None:
        """End the meeting: the script now hears of workers that were lost, entered or will leave.

        If some entered, all count boundaries from here. ``newcomer``: this worker is one of them,
        and begins with what the others do because of it. ``leaving``: workers that leave at the
        next boundary, where all stop again.
        """
        with self._life.changed:
            self._passed = 0 if entered else self._passed
            self.fresh, self.used = self.fresh or newcomer, self.used or newcomer
            told = Change(tuple(entered), tuple(self._lost), tuple(leaving))
            self._change = Change() if newcomer else told
            self._lost.clear()
            self._stop = self._passed + 1 if leaving else self._stop
            self._move(PlaceEvent.ANNOUNCED if leaving else PlaceEvent.MET)

    @property
    def awaits_goodbye(self) -> bool:
        """Whether this worker has stopped and wants to leave."""
        return self.asked and self._place is Place.HERE

    def let_go(self, tell: Callable[[], None]) -> None:
        """Handle GOODBYE: let a worker go on that leaves at a boundary, not because of its BYE.

        ``tell`` is called before: the script may end at once.
        """
        with self._life.changed:
            if self._life.state is not Life.STOPPED or self._place is not Place.HERE:
                return
            tell()
            self._life.move(Event.LET_GO)
            self._change = Change(left=True)
            self._move(PlaceEvent.LET_GO)

    def lose(self, numbers: Sequence[int]) -> None:
        """Workers are lost."""
        with self._life.changed:
            self._lost += numbers
