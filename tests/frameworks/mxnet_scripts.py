"""Scripts that use bpsx.mxnet, run by bpsx-run, for tests of what they print and how they end."""

from __future__ import annotations

import re
import sys

from support.running import launch

HEAD = (
    "import os, sys\nimport bpsx, bpsx.mxnet as bps, mxnet as mx, numpy as np\nfrom mxnet import"
    " autograd, gluon\n"
)


def lines_of(output: str) -> dict[int, list[str]]:
    """What each worker has printed."""
    found: dict[int, list[str]] = {}
    for rank, line in re.findall(r"^\[worker (\d+)\] (.*)$", output, re.MULTILINE):
        found.setdefault(int(rank), []).append(line)
    return found


def run(script: str, workers: int = 2, **environment: str) -> tuple[int, dict[int, list[str]], str]:
    status, output = launch([sys.executable, "-c", HEAD + script], workers, 1, **environment)
    return status, lines_of(output), output
