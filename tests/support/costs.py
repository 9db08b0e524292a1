"""What the tests cost, by folder and by cause; tests/README.md says how to run it.

As a plugin of pytest it notes for each test the seconds, the processor's seconds of all its
processes, and whose they were; as a script it adds up what has been noted.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Seconds = collections.Counter[str]


def of_process(pid: int) -> tuple[float, float]:
    """Processor seconds of a process, and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    own, theirs = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    tick = os.sysconf("SC_CLK_TCK")
    return own / tick, theirs / tick


def so_far() -> Seconds:
    """Processor seconds of this process and its children, by cause."""
    from support.forking import kinds

    own, started = of_process(os.getpid())
    found = Seconds({"pytest's own process": own, "processes started": started})
    for pid, kind in kinds().items():
        imports, forks = of_process(pid)
        found["imports, once for all forks"] += imports
        found[f"forks with {kind}"] += forks
    return found


class Plugin:
    """Appends a line to ``file`` for each test, and one for what was before the first."""

    def __init__(self, file: str) -> None:
        self._file = file

    def _note(self, name: str, seconds: float, before: Seconds) -> None:
        spent = {cause: s - before[cause] for cause, s in so_far().items() if s > before[cause]}
        with open(self._file, "a") as file:
            file.write(json.dumps([name, seconds, spent]) + "\n")

    def pytest_collection_finish(self) -> None:
        self._note("tests/collection", 0.0, Seconds())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        before, begun = so_far(), os.times().elapsed
        done = yield
        self._note(item.nodeid, os.times().elapsed - begun, before)
        return done


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist gives its workers the options of PYTEST_ADDOPTS a second time.
    if not config.pluginmanager.has_plugin("costs"):
        config.pluginmanager.register(Plugin(os.environ["TEST_COSTS"]), "costs")


def report(file: str) -> None:
    """Print two tables of what a run has noted."""
    tests, waits = collections.Counter[str](), Seconds()
    folders, causes = Seconds(), Seconds()
    for line in Path(file).read_text().splitlines():
        name, seconds, spent = json.loads(line)
        folder, used = name.split("/")[1], sum(spent.values())
        tests[folder] += 1
        folders[folder] += used
        waits[folder] += max(0.0, seconds - used)
        causes.update(spent)
    print(f"{'folder':14}{'tests':>7}{'processor s':>13}{'waited s':>10}")
    for folder, used in folders.most_common():
        print(f"{folder:14}{tests[folder]:7}{used:13.0f}{waits[folder]:10.0f}")
    print(f"\n{'cause':44}{'processor s':>13}")
    for cause, used in causes.most_common():
        print(f"{cause:44}{used:13.0f}")


if __name__ == "__main__":
    report(sys.argv[1])
