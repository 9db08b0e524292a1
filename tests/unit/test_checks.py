"""Problems that bpsx-run doctor finds, one at a time, and its verdict on its own push_pull."""

from __future__ import annotations

import os
import threading

import pytest

from bpsx.config import OPTIONS, Config
from bpsx.launch import checks, doctor, trial
from bpsx.launch.checks import CheckReport
from bpsx.scheduler.hub import Hub


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.env, raising=False)


def examine(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> CheckReport:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    report = CheckReport()
    checks.network(report, checks.options(report))
    checks.folders(report)
    return report


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"BYTEPS_PARTITION_BYTES": "much"}, "BYTEPS_PARTITION_BYTES='much': expected"),
        (
            {"DMLC_PS_ROOT_URI": "no-such-host.invalid"},
            "DMLC_PS_ROOT_URI='no-such-host.invalid' does not resolve",
        ),
        (
            {"DMLC_NODE_HOST": "203.0.113.77"},
            "bpsx cannot listen on this machine's address 203.0.113.77",
        ),
        (
            {"DMLC_INTERFACE": "nosuch0"},
            "interface 'nosuch0' has no address or does not exist; interfaces here: ",
        ),
        (
            {"DMLC_NODE_HOST": "127.0.0.1", "DMLC_PS_ROOT_URI": "203.0.113.77"},
            "this machine's address 127.0.0.1 is loopback, but the scheduler",
        ),
        ({"BPSX_CACHE_DIR": "/dev/null/x"}, "BPSX_CACHE_DIR: compiled kernels need a folder"),
        ({"BYTEPS_SOCKET_PATH": "/dev/null/x"}, "BYTEPS_SOCKET_PATH: cannot create /dev/null/x"),
    ],
)
def test_each_problem_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    report = examine(monkeypatch, environment)
    assert len([p for p in report.problems if said in p]) == 1, report.problems


def test_schedulers_that_reply_do_not_reply_or_have_another_secret_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = {"BPSX_SECRET": "what the scheduler knows"}
    hub = Hub(
        Config(
            {
                "DMLC_PS_ROOT_URI": "127.0.0.1",
                "DMLC_PS_ROOT_PORT": "0",
                "DMLC_NUM_WORKER": "2",
                "DMLC_NUM_SERVER": "1",
                **secret,
            },
            role="scheduler",
        )
    )
    given = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(hub.port),
        "DMLC_ROLE": "worker",
    }
    running = threading.Thread(target=hub.run)
    running.start()
    try:
        report = examine(monkeypatch, {**given, **secret})
        assert report.problems == []
        assert report.found["network"]["scheduler answers"] == "yes, the job is waiting"
        assert report.found["network"]["own address"].startswith(
            "127.0.0.1 on lo: on the route to the scheduler at 127.0.0.1"
        )
        report = examine(monkeypatch, {**given, "BPSX_SECRET": "what somebody else knows"})
        assert (
            len(report.problems) == 1 and "does not share our job secret" in report.problems[0]
        ), report.problems
    finally:
        hub.interrupt("the test")
        running.join()
    report = examine(monkeypatch, given)
    assert (
        len(report.problems) == 1
        and f"the scheduler at 127.0.0.1:{hub.port} does not answer" in report.problems[0]
    )
    assert (
        examine(monkeypatch, {"DMLC_ROLE": "scheduler", "DMLC_NUM_SERVER": "1"}).problems == []
    )  # this process will be the scheduler itself


def test_the_values_of_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examine(monkeypatch, {"BPSX_SECRET": "nobody-may-read-this", "DMLC_NUM_WORKER": "3"})
    assert report.found["options"] == {"BPSX_SECRET": "(set)", "DMLC_NUM_WORKER": 3}
    assert "nobody-may-read-this" not in str(report)


def test_numbers_and_booleans_are_such(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "BYTEPS_TRACE_ON": "yes",
        "BYTEPS_PARTITION_BYTES": "8192",
        "BPSX_SPIN_US": "1.5",
        "DMLC_NODE_HOST": "127.0.0.1",
        "BYTEPS_LOCAL_RANK": "x",
    }
    found = examine(monkeypatch, given).found["options"]
    assert found == {
        **given,
        "BYTEPS_TRACE_ON": True,
        "BYTEPS_PARTITION_BYTES": 8192,
        "BPSX_SPIN_US": 1.5,
    }
    report = CheckReport()
    checks.limits(report)
    assert all(
        isinstance(value, int) or value == "unlimited" for value in report.found["limits"].values()
    ), report.found


_WORKER = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {**_WORKER, "DMLC_PS_ROOT_PORT": "0"},
            [
                "not set: DMLC_WORKER_ID (Index of this worker machine; 0..DMLC_NUM_WORKER-1):"
                " set it"
            ],
        ),
        (
            {**_WORKER, "DMLC_PS_ROOT_PORT": "0", "DMLC_WORKER_ID": "2"},
            ["DMLC_WORKER_ID=2: expected 0..1 (DMLC_NUM_WORKER=2): correct"],
        ),
        (
            {"DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "2"},
            ["DMLC_WORKER_ID=2: expected 0..1"],
        ),  # no role is set yet
        # All of them, without those that only follow from another.
        (
            {
                **_WORKER,
                "DMLC_NUM_WORKER": "two",
                "DMLC_WORKER_ID": "5",
                "BYTEPS_TRACE_ON": "perhaps",
                "BPSX_SECRET": "short",
            },
            [
                "DMLC_NUM_WORKER='two'",
                "BYTEPS_TRACE_ON='perhaps'",
                "BPSX_SECRET: the job secret has 5 bytes",
            ],
        ),
        (
            {**_WORKER, "DMLC_WORKER_ID": "one"},
            ["DMLC_WORKER_ID='one'", "not set: DMLC_PS_ROOT_PORT"],
        ),
        ({"DMLC_ROLE": "server"}, ["not set: DMLC_PS_ROOT_URI", "not set: DMLC_NUM_SERVER"]),
    ],
)
def test_all_bad_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: list[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    report = CheckReport()
    checks.options(report)
    assert len(report.problems) == len(said) and all(
        p.startswith(s) for p, s in zip(report.problems, said)
    ), report.problems


def test_a_package_that_is_not_there_and_one_without_version() -> None:
    assert checks._version("no_such_package_of_anybody") == ""
    assert checks._version("json") == "of unknown version"
    assert checks._version("numpy")


@pytest.mark.parametrize(
    ("status", "out", "err", "said"),
    [
        (0, '[worker 0] {"right": true}\n', "", ""),
        (
            0,
            '[worker 0] {"right": false}\n',
            "",
            "a push_pull on this machine failed (status 0): it printed nothing",
        ),
        (1, "", "[server 0] no library\n", "failed (status 1): [server 0] no library"),
        (0, "", "", "failed (status 0): it printed nothing"),
    ],
)
def test_the_trial_is_judged(status: int, out: str, err: str, said: str) -> None:
    report = CheckReport()
    doctor._judge(report, trial.TrialResult(status, out, err))
    assert said in " ".join(report.problems)
    assert bool(report.problems) == bool(said)
    assert ("no problems" in doctor.text(report)) == (not said)


def test_the_verdict_counts_hints() -> None:
    report = CheckReport(hints=["one"])
    assert doctor.text(report).splitlines()[-1] == "no problems; 1 hint (above)"
    report.hints.append("two")
    assert doctor.text(report).splitlines()[-1] == "no problems; 2 hints (above)"
    report.problems.append("three")
    assert doctor.text(report).splitlines()[-1] == "1 problem"


def test_shared_memory_that_nothing_needs_is_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one machine share memory without a name, which takes no space in /dev/shm."""
    full = os.statvfs_result((4096, 4096, 16, 0, 0, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    report = CheckReport()
    checks.limits(report)
    assert report.found["limits"]["/dev/shm, MiB free"] == 0
    assert not any("shm" in hint for hint in report.hints)


def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    report = CheckReport()
    doctor.try_push_pull(report, seconds=0.01)
    assert "did not end within 0.01 s" in report.problems[0]
