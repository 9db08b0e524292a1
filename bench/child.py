"""The far end of :class:`bench.jobs.Child`: a process that blocks in a read until it is told to
measure something.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(operations: Mapping[str, Callable[..., Any]]) -> None:
    """Answer commands (a JSON object per line on stdin: ``op`` and its arguments) until ``quit`` or
    end of file.

    The answer is ``{"result": ...}`` or ``{"error": text}`` on what was standard output; from here
    on anything that is printed goes to standard error, so that a chatty library cannot break the
    protocol.
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
