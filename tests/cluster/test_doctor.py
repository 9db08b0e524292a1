"""bpsx-run doctor: its report, the problems that it finds, and its own push_pull."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher, finish, launching, words

from bpsx.config import runtime_dir


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        made.environment.pop("NVIDIA_VISIBLE_DEVICES", None)
        made.environment["BYTEPS_SOCKET_PATH"] = str(tmp_path)
        yield made


def doctor(
    launcher: Launcher, environment: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    process = launcher.start(words("doctor", "--json"), environment)
    out, err = process.communicate()
    assert out, err
    return process.returncode, json.loads(out), err.decode()


def test_doctor_finds_no_problem_on_a_healthy_machine(launcher: Launcher, tmp_path: Path) -> None:
    import numpy
    import zmq

    from bpsx import __version__

    status, report, err = doctor(launcher)
    assert (status, report["ok"], report["problems"], err) == (0, True, [], "")
    found = report["found"]
    assert found["software"]["bpsx"].startswith(__version__)
    assert found["software"]["numpy"] == numpy.__version__
    assert (
        found["software"]["libzmq"].startswith(zmq.zmq_version())
        and "CURVE yes" in found["software"]["libzmq"]
    )
    assert set(found["frameworks"]) == {"torch", "tensorflow", "mxnet", "cupy"}
    assert found["network"]["lo"].startswith("127.0.0.1")
    assert (
        found["network"]["TCP congestion control"]
        == Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    )
    assert (found["limits"]["cores that may be used"], found["limits"]["cores"]) == (
        len(os.sched_getaffinity(0)),
        os.cpu_count(),
    )
    assert found["folders"]["sockets"] == str(runtime_dir({"BYTEPS_SOCKET_PATH": str(tmp_path)}))
    trial = found["push_pull to itself"]
    assert (trial["result"], trial["right"]) == ("the sums are right", True)
    assert trial["push pull 4 KiB us"] > 0 and trial["push pull 16 MiB ms"] > 0


def test_the_report_for_people(launcher: Launcher) -> None:
    secret = "nobody-may-read-this-anywhere-at-all"
    status, out, err = finish(
        launcher.start(words("doctor"), {"BPSX_SECRET": secret, "BYTEPS_PARTITION_BYTS": "1"})
    )
    assert (status, err) == (0, [])
    assert any(line.startswith("no problems; ") and line.endswith("(above)") for line in out)
    assert "  BPSX_SECRET: (set)" in out and "  right: yes" in out
    assert not any(secret in line for line in out)
    assert (
        "hint: BYTEPS_PARTITION_BYTS is not a known option; did you mean"
        " BYTEPS_PARTITION_BYTES?" in out
    )


def test_doctor_names_a_scheduler_that_does_not_answer(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    status, out, _ = finish(
        launcher.start(
            words("doctor"), {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port)}
        )
    )
    assert status == 1
    assert "1 problem" in out
    assert any(
        line.startswith(f"problem: the scheduler at 127.0.0.1:{port} does not answer")
        for line in out
    )


def test_a_failing_push_pull_is_reported(launcher: Launcher, tmp_path: Path) -> None:
    # An import of numba in the server's process gets this module instead. The server imports numba
    # as its cache of kernels is empty.
    (tmp_path / "numba.py").write_text("raise ImportError('broken numba of the test')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    cache = str(tmp_path / "cache")
    status, report, _ = doctor(launcher, {"PYTHONPATH": path, "BPSX_CACHE_DIR": cache})
    assert status == 1
    assert any(
        "a push_pull on this machine failed" in p and "broken numba of the test" in p
        for p in report["problems"]
    )


def test_an_option_it_does_not_have(launcher: Launcher) -> None:
    status, _, err = finish(launcher.start(words("doctor", "--jsn")))
    assert status == 2
    assert any("--jsn" in line for line in err)


def test_a_command_of_that_name_can_be_run(launcher: Launcher) -> None:
    status, _, err = finish(launcher.start(words("--", "doctor"), {"DMLC_ROLE": "worker"}))
    assert status == 127
    assert "cannot run 'doctor'" in err[0]
