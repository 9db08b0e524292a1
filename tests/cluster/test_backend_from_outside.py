"""A launcher back end that is no part of the package, the one that CONTRIBUTING.md shows, starts
whole jobs.
"""

from __future__ import annotations

import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PY, Launcher, finish, launching, python, wait_for

from support.places import ROOT

#: bpsx-run with one more entry in its table.
RUN = """
import sys
from bpsx.launch.backend_table import BACKENDS
from wrapped import Wrapped
BACKENDS.append(Wrapped())
from bpsx.launch.__main__ import main
sys.exit(main())
"""
WORK = """
import bpsx, numpy as np, os
bpsx.init()
total = bpsx.push_pull(np.full(5, bpsx.rank() + 1, np.float32), "x", average=False)
print(os.environ["WRAPPED"], bpsx.size(), total[4], flush=True)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


class Wrapper:
    """bpsx-run with the back end, and a wrapper command that notes the role of what it starts."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        text = (ROOT / "CONTRIBUTING.md").read_text()
        section = text[text.index("## Add a launcher back end\n") :]
        (source,) = re.findall(
            r"^```python\n(.*?)^```$", section[: section.index("\n## ")], re.M | re.S
        )
        modules = folder / "modules"
        modules.mkdir()
        (modules / "wrapped.py").write_text(source)
        self._launcher, self._noted = launcher, folder / "noted"
        self.script = folder / "wrapper.sh"
        self.script.write_text(
            f'#!/bin/sh\necho "$DMLC_ROLE" >> {self._noted}\nWRAPPED=yes exec "$@"\n'
        )
        self.script.chmod(self.script.stat().st_mode | stat.S_IXUSR)
        launcher.environment["PYTHONPATH"] = str(modules)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return self._launcher.start([PY, "-c", RUN, *words])

    def roles(self) -> list[str]:
        """The roles of all processes that the wrapper has started."""
        return sorted(self._noted.read_text().split())


@pytest.fixture
def wrapper(tmp_path: Path, launcher: Launcher) -> Wrapper:
    return Wrapper(tmp_path, launcher)


def test_a_job_runs_and_each_process_is_wrapped(wrapper: Wrapper) -> None:
    job = wrapper.start("--wrapper", str(wrapper.script), *python(WORK + "bpsx.shutdown()"))
    out = [f"[worker {rank}] yes 2 3.0" for rank in (0, 1)]
    assert finish(job) == (0, out, [])
    assert wrapper.roles() == ["scheduler", "server", "worker", "worker"]


def test_options_of_other_back_ends_that_it_names(wrapper: Wrapper) -> None:
    job = wrapper.start(
        "--wrapper", str(wrapper.script), "--workers", "1", *python(WORK + "bpsx.shutdown()")
    )
    assert finish(job) == (0, ["[worker 0] yes 1 1.0"], [])
    assert wrapper.roles() == ["scheduler", "server", "worker"]


def test_a_failure_ends_the_job_and_the_last_line_names_it(wrapper: Wrapper) -> None:
    fails = "if bpsx.rank() == 1: os._exit(7)\nbpsx.push_pull(np.ones(9), 'y')\n"
    job = wrapper.start("--wrapper", str(wrapper.script), *python(WORK + fails))
    _, err = job.communicate()
    assert job.returncode == 7
    assert err.decode().splitlines()[-1].startswith("bpsx-run: worker 1 exited with status 7")


def test_a_signal_reaches_the_workers_through_the_wrapper(wrapper: Wrapper) -> None:
    waits = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (bpsx.shutdown(), os._exit(0)))\n"
        "print('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    job = wrapper.start("--wrapper", str(wrapper.script), *python(WORK + waits))
    wait_for(job, "[worker 0] ready", "[worker 1] ready")
    job.send_signal(signal.SIGTERM)
    job.communicate()
    assert job.returncode == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--wrapper", "x", "--local", "true"], "--local and --wrapper exclude each other"),
        (["--wrapper", "x", "--servers", "2", "true"], "--servers needs --local"),
        (["--workers", "3", "true"], "--workers needs --local or --wrapper"),
        (["--wrapper", "x"], "--wrapper needs the workers' COMMAND"),
        (["--wrapper", "", "true"], "--wrapper is empty"),
    ],
)
def test_a_mistake_is_named(wrapper: Wrapper, words: list[str], named: str) -> None:
    status, out, err = finish(wrapper.start(*words))
    assert (status, out) == (2, [])
    assert any("error: " in line and named in line for line in err)


def test_a_wrapper_that_is_not_there(wrapper: Wrapper) -> None:
    job = wrapper.start("--wrapper", "no-such-wrapper", "true")
    assert finish(job)[0] == 127


def test_help_shows_its_option(wrapper: Wrapper) -> None:
    status, out, _ = finish(wrapper.start("--help"))
    assert status == 0
    assert any("--wrapper WORDS" in line for line in out)
