"""Checks of a trace: the rules of the Trace Event Format for the events that bpsx writes, and the
documented names and fields.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

STAGES = {
    "COORDINATE_REDUCE",
    "REDUCE",
    "COPYD2H",
    "PCIE_REDUCE",
    "COORDINATE_PUSH",
    "COMPRESS",
    "PUSH",
    "PULL",
    "DECOMPRESS",
    "COPYH2D",
    "COORDINATE_BROADCAST",
    "BROADCAST",
    "COPY",
}
SERVER = {"RECEIVE", "SUM", "SEND", "ROUND"}


def load(path: Path) -> list[dict[str, Any]]:
    """Load the events of a file and check them."""
    text = path.read_text()
    document = json.loads(
        text,
        parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(f"{name} is not JSON")),
    )
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}, set(document)
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert_valid(event)
    assert_no_overlaps(document["traceEvents"])
    return document["traceEvents"]


def assert_valid(event: dict[str, Any]) -> None:
    """Check one event on its own."""
    assert event["ph"] in ("X", "M"), event
    assert isinstance(event["pid"], str | int) and isinstance(event["name"], str)
    assert isinstance(event["args"], dict)
    if event["ph"] == "M":
        assert event["name"] in (
            "process_name",
            "thread_name",
            "process_sort_index",
            "thread_sort_index",
        )
        return
    assert isinstance(event["tid"], str | int)
    assert (
        type(event["ts"]) is int
        and type(event["dur"]) is int
        and event["ts"] > 0
        and event["dur"] >= 0
    ), event
    if event["pid"] == "Job":
        assert event["tid"] == "events" and event["name"], event
        return
    assert event["args"]["name"].startswith("Comm.")
    rest = event["name"].removeprefix(event["args"]["name"])
    assert rest == "" or rest[1:] in STAGES | SERVER, event
    assert type(event["args"]["step"]) is int and event["args"]["step"] >= 1


def assert_no_overlaps(events: list[dict[str, Any]]) -> None:
    """Check that events of one row are disjoint or nested; viewers cannot draw others."""
    rows = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            rows[e["pid"], e["tid"]].append((e["ts"], -e["dur"], e["name"]))
    for row in rows.values():
        open_until: list[int] = []
        for ts, minus, name in sorted(row):
            while open_until and open_until[-1] <= ts:
                open_until.pop()
            assert not open_until or ts - minus <= open_until[-1], (name, ts, open_until)
            open_until.append(ts - minus)


def about(path: Path) -> dict[str, Any]:
    """Return the file's metadata: role, rank and more of its process."""
    found: dict[str, Any] = json.loads(path.read_text())["otherData"]
    return found
