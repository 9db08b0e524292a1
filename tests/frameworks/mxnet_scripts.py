"""Runs scripts that use bpsx.mxnet, for tests of their output and exit status."""

from __future__ import annotations

import re

from support.running import train

HEAD = (
    "import os, sys\nimport bpsx, bpsx.mxnet as bps, mxnet as mx, numpy as np\nfrom mxnet import"
    " autograd, gluon\n"
)


def lines_of(output: str) -> dict[int, list[str]]:
    """Return the lines that each worker has printed, by rank."""
    found: dict[int, list[str]] = {}
    for rank, line in re.findall(r"^\[worker (\d+)\] (.*)$", output, re.MULTILINE):
        found.setdefault(int(rank), []).append(line)
    return found


def run(script: str, workers: int = 2, **environment: str) -> tuple[int, dict[int, list[str]], str]:
    """Run ``script`` in ``workers`` workers; return the status, their lines, and all output."""
    status, output = train(["-c", HEAD + script], workers, 1, **environment)
    return status, lines_of(output), output
