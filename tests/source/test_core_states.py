"""The states' tables agree: pages, code, and the lists of stages."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from bpsx.planning.stages import MachineRole, Stage, stages_for
from core.counted import Transitions, states, table
from support.places import ROOT

INTERNALS = ROOT / "docs" / "internals"
#: machine -> page, and the words before its table
TABLES = {
    "task": ("states.md", "A task (`Task.state`):"),
    "partition": ("states.md", "A partition (`Partition.stage`)"),
    "round": ("states-of-servers.md", "## 1. A round of a key"),
    "matrix": ("powersgd.md", "A matrix (`Matrix.state`"),
}


def on_page(machine: str) -> Transitions:
    """Return the transitions in the page's table, by the first and the last column."""
    page, begin = TABLES[machine]
    text = (INTERNALS / page).read_text().split(begin)[1]
    (rows, *_) = re.findall(r"(?:^\|.*\n)+", text, re.M)
    found: Transitions = set()
    for row in rows.splitlines()[2:]:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        sources, targets = (set(re.findall(r"`(\w+)`", cell)) for cell in (cells[0], cells[-1]))
        if cells[0].startswith("all but "):
            sources = set(states(machine).values()) - sources
        found |= {(before, after) for before in sources for after in targets}
    return found


@pytest.mark.parametrize("machine", TABLES)
def test_the_page_has_the_transitions_of_the_code(machine):
    assert on_page(machine) == table(machine)


def test_the_transitions_of_a_partition_are_those_of_the_lists_of_stages():
    names = states("partition")
    wanted: Transitions = {(name, "END") for name in names.values() if name != "END"}
    for device in ("cpu", "gpu"):
        for compressed in (False, True):
            for role in MachineRole:
                stages = [0, *stages_for(device, compressed, role), 0]
                without = [stage for stage in stages if stage != Stage.COPY]  # what the core skips
                for a, b in [*pairwise(stages), *pairwise(without)]:
                    wanted.add((names[a], names[b]))
    # The lane of a round under way is lost.
    wanted |= {("PUSH", "PUSH"), ("PULL", "PUSH")}
    assert table("partition") == wanted
