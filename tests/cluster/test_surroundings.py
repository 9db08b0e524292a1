"""Unusual environments: no home, no writable folder, few descriptors, and bytes that are not text.

Each works, or an error names the variable to set.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bpsx.config import Config, cache_dir, runtime_dir
from bpsx.errors import ConfigError
from support.jobs import Job

US = f"bpsx-{os.getuid()}"


def test_a_runtime_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after su: the variable belongs to the login, and its folder is gone."""
    monkeypatch.setattr("bpsx.config.folders.tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    absent, there = tmp_path / "run" / "1000", tmp_path / "there"
    there.mkdir()
    assert (
        runtime_dir({"XDG_RUNTIME_DIR": str(absent)}) == tmp_path / "tmp" / US
        and not absent.exists()
    )
    assert runtime_dir({"XDG_RUNTIME_DIR": "relative"}) == tmp_path / "tmp" / US
    assert runtime_dir({"XDG_RUNTIME_DIR": str(there)}) == there / US


def test_folders_are_found_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME and no entry in passwd, as with docker run --user 12345."""
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    monkeypatch.setattr("bpsx.config.folders.tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    assert cache_dir({}) == tmp_path / "tmp" / US
    for variable, make in (
        ("BPSX_CACHE_DIR", cache_dir),
        ("BYTEPS_SOCKET_PATH", runtime_dir),
        ("BYTEPS_TRACE_DIR", Config),
    ):
        with pytest.raises(ConfigError, match=f"{variable}='~/x': the user has no home folder"):
            make({variable: "~/x"})
    assert os.listdir(tmp_path) == ["tmp"]


def test_no_writeable_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("bpsx.config.folders.tempfile.gettempdir", none)
    for variable, make, environment in (
        ("BPSX_CACHE_DIR", cache_dir, {"XDG_CACHE_HOME": "/proc"}),
        ("BYTEPS_SOCKET_PATH", runtime_dir, {}),
    ):
        with pytest.raises(ConfigError, match=f"set {variable} or TMPDIR to a writeable folder"):
            make(environment)


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_few_descriptors(role: str, tmp_path: Path) -> None:
    """Without a check, libzmq would wait for ever and Numba would fail internally."""
    modules = {
        "scheduler": ["-m", "bpsx.scheduler"],
        "server": ["-m", "bpsx.server"],
        "worker": ["-c", "import bpsx; bpsx.init()"],
    }
    environment = {
        **os.environ,
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "1" if role != "scheduler" else "0",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_WORKER_ID": "0",
        "BPSX_PORT_FILE": str(tmp_path / "port"),
        "BYTEPS_SOCKET_PATH": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, *modules[role]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)),
    )
    assert (
        done.returncode in (1, 2)
        and "20 open files" in done.stderr
        and "ulimit -n 1024" in done.stderr
    ), done
    assert role == "worker" or len(done.stderr.splitlines()) == 1, done.stderr


def test_a_few_more_descriptors_are_enough() -> None:
    """For the smallest job, with the transport that needs the most."""
    with Job(
        """
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, 1024))
        import bpsx, numpy as np
        bpsx.init()
        report(bpsx.push_pull(np.ones(3, np.float32), "x", average=False).tolist())
    """,
        env={"BYTEPS_ENABLE_IPC": "1"},
    ) as job:
        assert job.results() == [[[2, 2, 2]]] * 2


@pytest.mark.parametrize("variable", ["BPSX_SECRET", "DMLC_PS_ROOT_URI", "DMLC_INTERFACE"])
def test_bytes_that_are_not_utf8_are_refused(variable: str) -> None:
    value = os.fsdecode(b"secret-\xff\xfe-of-more-than-16-bytes")
    with pytest.raises(ConfigError, match=f"^{variable}: not valid UTF-8$") as told:
        Config({variable: value})
    assert "secret-" not in str(told.value)
