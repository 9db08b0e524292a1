"""Tables of states: which event leads from which state to which. A missing row is a defect."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from bpsx.errors import InternalError

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def in_words(name: Enum) -> str:
    """Return the name of a state or an event as the documentation writes it."""
    return name.name.replace("_", " ").lower()


class Table(Generic[State, Event]):
    """The states of one kind of thing. Immutable.

    ``what``: the thing, for messages. ``rows``: state -> event -> next state; the first state is
    the initial one.
    """

    def __init__(self, what: str, rows: Mapping[State, Mapping[Event, State]]) -> None:
        self.what, self.rows = what, rows

    def after(self, state: State, event: Event) -> State:
        """Return the state that follows ``event`` in ``state``.

        Raises :class:`~bpsx.errors.InternalError`, which names both, if the table has no such row.
        """
        try:
            return self.rows[state][event]
        except KeyError:
            raise InternalError(
                f"internal error: {self.what} in state {in_words(state)!r} cannot take the event"
                f" {in_words(event)!r}; please report it, with the log"
            ) from None
