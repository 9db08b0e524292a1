"""``bpsx-run doctor``: report findings on this machine, and try a push_pull in a job of its own."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bpsx.config import child_environment
from bpsx.launch import checks
from bpsx.launch.checks import Report

_TRY_SECONDS = 120.0
_TOLD = 10
#: Variables that apply to the trial, too: they say where files are kept. The trial drops all other
#: variables of the job.
_KEPT = ("BPSX_CACHE_DIR", "BYTEPS_SOCKET_PATH")
_OURS = ("DMLC_", "BYTEPS_", "BPSX_", "PS_")


def _trial_environment() -> dict[str, str]:
    kept = {k: v for k, v in child_environment().items() if not k.startswith(_OURS) or k in _KEPT}
    return {**kept, "BPSX_RENDEZVOUS_TIMEOUT": "60", "PYTHONUNBUFFERED": "1"}


def try_push_pull(report: Report, seconds: float = _TRY_SECONDS) -> None:
    """Run a job of a scheduler, a server and two workers on loopback.

    With a single worker, the server would have nothing to sum.
    """
    python = [sys.executable, "-P", "-m"]
    job = ["--local", "--workers", "2", "--servers", "1", "--processes", "1", "--grace", "2"]
    command = [*python, "bpsx.launch", *job, "--", *python, "bpsx.launch.selftest"]
    with subprocess.Popen(
        command,
        env=_trial_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as trial:
        try:
            out, err = trial.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            trial.send_signal(signal.SIGTERM)
            report.add("push_pull to itself", "result", f"no result within {seconds:g} s")
            report.problems.append(
                f"a push_pull on this machine did not end within {seconds:g} s: check whether a"
                " firewall blocks loopback"
            )
            return
        except BaseException:
            trial.send_signal(signal.SIGTERM)
            raise
    _judge(report, trial.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def _judge(report: Report, status: int, out: str, err: str) -> None:
    result: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("[worker 0] {"):
            result = json.loads(line.removeprefix("[worker 0] "))
    for name, value in result.items():
        report.add("push_pull to itself", name.replace("_", " "), value)
    if status or not result.get("right"):
        report.add(
            "push_pull to itself",
            "result",
            "wrong sums" if result and not result["right"] else f"failed with status {status}",
        )
        lines = err.splitlines()
        # Quote the last lines of tracebacks, which name the error; without any, the end of the
        # output.
        telling = [
            line for line in lines if re.search(r"\w(Error|Exception): |ERROR|^bpsx-run: ", line)
        ] or lines[-_TOLD:]
        said = "; ".join(dict.fromkeys(telling[:_TOLD])) or "it printed nothing"
        report.problems.append(f"a push_pull on this machine failed (status {status}): {said}")
    else:
        report.add("push_pull to itself", "result", "the sums are right")


def examine() -> Report:
    """Run all checks."""
    report = Report()
    checks.software(report)
    checks.devices(report)
    config = checks.options(report)
    checks.network(report, config)
    checks.limits(report)
    checks.folders(report)
    try_push_pull(report)
    return report


def text(report: Report) -> str:
    """Format the report as text."""
    lines = []
    for section, entries in report.found.items():
        lines += [f"{section}:", *(f"  {name}: {_shown(value)}" for name, value in entries.items())]
    lines += [f"hint: {hint}" for hint in report.hints]
    lines += [f"problem: {problem}" for problem in report.problems]
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: Report) -> str:
    """Return the last line, which must point to any hints above it."""
    if report.problems:
        return _count(report.problems, "problem")
    return "no problems" + (f"; {_count(report.hints, 'hint')} (above)" if report.hints else "")


def _count(lines: Sequence[str], noun: str) -> str:
    return f"{len(lines)} {noun}{'s' if len(lines) > 1 else ''}"


def _shown(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def main(arguments: Sequence[str]) -> int:
    """Run ``bpsx-run doctor``; returns the exit status: 0 if there is no problem, else 1."""
    parser = argparse.ArgumentParser(
        "bpsx-run doctor",
        description="Check what this machine has, and try a push_pull on it.",
        epilog=(
            "If the variables of a job are set (DMLC_PS_ROOT_URI, ...), doctor also checks its"
            " scheduler and this machine's address. Exit status: 0 if there is no problem, else 1."
        ),
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: ok, problems, hints, found"
    )
    options = parser.parse_args(arguments)
    report = examine()
    if options.json:
        print(
            json.dumps(
                {
                    "ok": not report.problems,
                    "problems": report.problems,
                    "hints": report.hints,
                    "found": report.found,
                },
                indent=1,
            )
        )
    else:
        print(text(report))
    sys.stdout.flush()
    return 1 if report.problems else 0
