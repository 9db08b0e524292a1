"""Core and lane compiled so that they count the transitions of their states.

The installed modules neither check nor count: see core/transitions.pxd.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from types import ModuleType

from support.compiling import build, load
from support.places import SOURCE

#: What can be counted: where its transitions are written, the function, and its number there.
MACHINES = {
    "task": (SOURCE / "core" / "transitions.pxd", "after_task_state", 0),
    "partition": (SOURCE / "core" / "transitions.pxd", "after_stage", 1),
    "round": (SOURCE / "server" / "store.pxd", "after_round_state", 2),
    "matrix": (SOURCE / "core" / "transitions.pxd", "after_matrix_state", 3),
}
_ENUMS = {
    "task": (SOURCE / "core" / "partition.pxd", "TaskState"),
    "partition": (SOURCE / "core" / "partition.pxd", "Stage"),
    "round": (SOURCE / "server" / "store.pxd", "RoundState"),
    "matrix": (SOURCE / "core" / "partition.pxd", "MatrixState"),
}

Transitions = set[tuple[str, str]]


def states(machine: str) -> dict[int, str]:
    """Return the states' names by number."""
    path, name = _ENUMS[machine]
    (body,) = re.findall(rf"^cdef enum {name}:.*\n((?:    .*\n)+)", path.read_text(), re.M)
    return {int(n): state for state, n in re.findall(r"^ +(\w+) = (\d+)", body, re.M)}


def table(machine: str) -> Transitions:
    """Return the transitions that the source lists."""
    path, function, _ = MACHINES[machine]
    text = path.read_text().split(f" {function}(")[1].split("    return 0\n")[0]
    found = re.findall(r"if sta[tg]e == (\w+):\s+return ([^:]*?)(?=\n    if|\Z)", text)
    return {(before, after) for before, row in found for after in re.findall(r"1 << (\w+)", row)}


class Counted:
    """A counting module, and what it has counted."""

    def __init__(self, name: str, library: Path) -> None:
        self.library = library
        self._symbols = ctypes.CDLL(str(library))
        self.module: ModuleType = load(name, library)

    def seen(self, machine: str, listed: bool = True) -> Transitions:
        """Return the transitions that have occurred, of those that are ``listed`` or not."""
        symbol = "bpsx_transitions" if listed else "bpsx_unlisted"
        counts = (ctypes.c_int64 * 16 * 16 * 4).in_dll(self._symbols, symbol)
        names, number = states(machine), MACHINES[machine][2]
        return {(names[a], names[b]) for a in range(16) for b in range(16) if counts[number][a][b]}


def compiled(source: str, folder: Path) -> Counted:
    """Compile a module of the package (``source``: its path there) into ``folder``."""
    copy = folder / Path(source).name
    copy.write_text((SOURCE / source).read_text())
    name = "bpsx." + source.removesuffix(".pyx").replace("/", ".")
    return Counted(name, build(copy, "-DBPSX_COUNT_TRANSITIONS"))


def install(name: str, library: Path) -> Counted:
    """Make a compiled module the one that later imports of this process find."""
    found = Counted(name, library)
    sys.modules[name] = found.module
    return found
