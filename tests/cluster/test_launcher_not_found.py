"""bpsx-run with a command that cannot run ends with the status that a shell uses."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Launcher, finish, launching, local_words, words

WORKER = {"DMLC_ROLE": "worker"}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


def without_capabilities() -> None:
    """Drop root's right to search any folder, between fork and exec."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        # PR_CAPBSET_DROP; fails if the process does not have the capability
        prctl(24, capability, 0, 0, 0)


@pytest.mark.parametrize("kind", [words, local_words], ids=["worker", "local"])
def test_a_folder_of_path_that_may_not_be_searched(
    launcher: Launcher, tmp_path: Path, kind: Callable[..., list[str]]
) -> None:
    """As in a shell the command is not found (127).

    The folder's own status, 126, would lead the user to look in that folder.
    """
    (closed := tmp_path / "closed").mkdir(mode=0)
    environment = {**WORKER, "PATH": f"{closed}{os.pathsep}{os.environ['PATH']}"}
    job = launcher.start(
        kind("no-such-command-of-anybody"),
        environment if kind is words else {"PATH": environment["PATH"]},
        preexec_fn=without_capabilities,
    )
    status, _, err = finish(job)
    closed.rmdir()
    assert status == 127, err
    assert err[0].endswith("cannot run 'no-such-command-of-anybody': No such file or directory")


def test_a_file_on_path_that_may_not_be_run(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "no-program").write_text("text")
    environment = {**WORKER, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    status, _, err = finish(launcher.start(words("no-program"), environment))
    assert status == 126 and err[0].endswith("cannot run 'no-program': Permission denied")
