"""``bpsx-run doctor``: report findings on this machine, and try a push_pull in a job of its own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from bpsx.launch import checks, trial
from bpsx.launch.checks import CheckReport

_TRY_SECONDS = 120.0


def try_push_pull(report: CheckReport, seconds: float = _TRY_SECONDS) -> None:
    """Run a job of a scheduler, a server and two workers on loopback.

    With a single worker, the server would have nothing to sum.
    """
    job = ["--local", "--workers", "2", "--servers", "1", "--processes", "1"]
    ended = trial.run(job, ["bpsx.launch.selftest"], trial.environment(), seconds)
    if ended.status is None:
        report.add("push_pull to itself", "result", f"no result within {seconds:g} s")
        report.problems.append(
            f"a push_pull on this machine did not end within {seconds:g} s: check whether a"
            " firewall blocks loopback"
        )
        return
    _judge(report, ended)


def _judge(report: CheckReport, ended: trial.TrialResult) -> None:
    result = ended.answer
    for name, value in result.items():
        report.add("push_pull to itself", name.replace("_", " "), value)
    if ended.status or not result.get("right"):
        report.add(
            "push_pull to itself",
            "result",
            "wrong sums"
            if result and not result["right"]
            else f"failed with status {ended.status}",
        )
        report.problems.append(
            f"a push_pull on this machine failed (status {ended.status}): {ended.telling}"
        )
    else:
        report.add("push_pull to itself", "result", "the sums are right")


def examine() -> CheckReport:
    """Run all checks."""
    report = CheckReport()
    checks.software(report)
    checks.devices(report)
    config = checks.options(report)
    checks.network(report, config)
    checks.limits(report)
    checks.folders(report)
    try_push_pull(report)
    return report


def text(report: CheckReport) -> str:
    """Format the report as text."""
    lines = []
    for section, entries in report.found.items():
        lines += [f"{section}:", *(f"  {name}: {_shown(value)}" for name, value in entries.items())]
    lines += [f"hint: {hint}" for hint in report.hints]
    lines += [f"problem: {problem}" for problem in report.problems]
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: CheckReport) -> str:
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
