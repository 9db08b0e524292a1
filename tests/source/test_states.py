"""Tables of states: each state can be reached, and docs/internals shows the tables as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bpsx.api.states import PROCESS
from bpsx.core.declared_state import DECLARED
from bpsx.errors import InternalError
from bpsx.scheduler.link_states import LINK
from bpsx.scheduler.meetings import MEETING
from bpsx.scheduler.states import HANDOVER, HEARING, JOB, PRESENCE, SUPPLY
from bpsx.session.boundaries import PLACE
from bpsx.session.states import SESSION
from bpsx.system.transitions import Table, in_words
from support.places import ROOT

#: Page and heading -> the table in the code.
SHOWN: dict[tuple[str, str], Table[Any, Any]] = {
    ("states-of-sessions", "1. A process"): PROCESS,
    ("states-of-sessions", "2. A session on a worker"): SESSION,
    ("states-of-sessions", "3. A declaration of a name on a worker"): DECLARED,
    ("elastic-scheduler", "A node without a scheduler"): LINK,
    ("states-of-servers", "Presence"): PRESENCE,
    ("states-of-servers", "Hearing"): HEARING,
    ("states-of-servers", "Supply"): SUPPLY,
    ("states-of-servers", "3. The job at the scheduler"): JOB,
    ("states-of-servers", "4. The keys of lost servers"): HANDOVER,
}
Row = tuple[str, str, str]


def words(cell: str) -> list[str]:
    return [word.strip() for word in re.sub(r"\(.*?\)", "", cell).split(",")]


def shown(text: str, states: list[str]) -> list[Row]:
    """Return (state, event, next state) of each row of the first table of transitions in a text."""
    table = text.partition("| state | event | action | next state |\n")[2].partition("\n\n")[0]
    rows = []
    for line in table.splitlines()[1:]:
        given, events, _, then = (cell.strip() for cell in line.strip("|").split("|"))
        but = given.removeprefix("all").removeprefix(" but ") if given.startswith("all") else None
        of = words(given) if but is None else [s for s in states if s not in words(but)]
        rows += [(s, e, s if then == "unchanged" else then) for s in of for e in words(events)]
    return rows


def written(table: Table[Any, Any]) -> list[Row]:
    return [
        (in_words(state), in_words(event), in_words(then))
        for state, events in table.rows.items()
        for event, then in events.items()
    ]


def section(page: Path, heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page.read_text(), re.M | re.S)
    assert found, f"{page.name}: no heading {heading!r}"
    return found[1]


@pytest.mark.parametrize(("page", "heading"), SHOWN, ids=" ".join)
def test_the_page_shows_the_table_as_it_is(page: str, heading: str) -> None:
    table = SHOWN[page, heading]
    text = section(ROOT / "docs" / "internals" / f"{page}.md", heading)
    assert sorted(shown(text, [in_words(s) for s in table.rows])) == sorted(written(table))


@pytest.mark.parametrize("table", [*SHOWN.values(), MEETING, PLACE], ids=lambda t: t.what)
def test_each_state_can_be_reached_and_has_its_events(table: Table[Any, Any]) -> None:
    states = list(table.rows)
    assert states == list(type(states[0])), "each state has an entry, in the order of the Enum"
    reached, new = set(), {states[0]}
    while new:
        reached |= new
        new = {then for state in new for then in table.rows[state].values()} - reached
    assert reached == set(states)
    events = {event for row in table.rows.values() for event in row}
    assert events == set(type(next(iter(events)))), "each event may happen"


def test_an_event_that_a_state_does_not_have_names_both() -> None:
    state, event = list(JOB.rows)[-1], next(iter(JOB.rows[next(iter(JOB.rows))]))
    with pytest.raises(InternalError, match="the job in state 'failed' .* the event 'complete'"):
        JOB.after(state, event)


def test_a_table_on_a_page_is_read_as_a_reader_reads_it() -> None:
    text = """
| state | event | action | next state |
|---|---|---|---|
| a | x (X, Y), y | does | b |
| all but a | z | | unchanged |
| all | w | | c |

| no | more |
"""
    assert shown(text, ["a", "b", "c"]) == [
        ("a", "x", "b"),
        ("a", "y", "b"),
        ("b", "z", "b"),
        ("c", "z", "c"),
        ("a", "w", "c"),
        ("b", "w", "c"),
        ("c", "w", "c"),
    ]
