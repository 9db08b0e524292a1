"""The launcher's back ends."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import NoReturn

from bpsx.launch.arguments import given
from bpsx.launch.backend import Backend
from bpsx.launch.local import Local
from bpsx.launch.ssh.backend import Ssh

#: In the order of their options in the help text.
BACKENDS: list[Backend] = [Local(), Ssh()]


def choose(options: Namespace, refuse: Callable[[str], NoReturn]) -> Backend | None:
    """Return the back end that ``options`` choose, or None: run a single role.

    Calls ``refuse`` with a message if they choose several, or name options of another one.
    """
    chosen = [backend for backend in BACKENDS if given(options, backend.chosen_by)]
    if len(chosen) > 1:
        refuse(f"{' and '.join(backend.label for backend in chosen)} exclude each other")
    for name in given(options, dict.fromkeys(n for backend in BACKENDS for n in backend.own)):
        takers = [backend for backend in BACKENDS if name in backend.own]
        if not set(chosen) & set(takers):
            needed = " or ".join(backend.label for backend in takers)
            refuse(f"--{name.replace('_', '-')} needs {needed}")
    return chosen[0] if chosen else None
