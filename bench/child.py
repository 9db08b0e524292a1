"""The other end of :class:`bench.jobs.Child`: a process that executes commands from stdin.

Between commands it blocks in a read.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(operations: Mapping[str, Callable[..., Any]]) -> None:
    """Execute commands until ``quit`` or end of file.

    A command is a JSON object on one line of stdin: ``op`` and its arguments. The reply is
    ``{"result": ...}`` or ``{"error": text}`` on the original standard output. From here on
    anything printed goes to standard error, so that a library's output cannot break the protocol.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        while line := sys.stdin.readline():
            command = json.loads(line)
            name = command.pop("op")
            if name == "quit":
                return
            try:
                answer = {"result": operations[name](**command)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)
