"""Converts trace records to Chrome's trace JSON, and merges the files of a job.

Pure, apart from reading and writing the files.

``python -m bpsx.telemetry.timeline merge DIR [-o FILE]`` merges the files that the processes of a
job have written.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpsx.planning.stages import Stage
from bpsx.telemetry.clock_sync import Estimate, offset_at

_RECORD = struct.Struct("<qqQQIIBBhI")
#: The same layout for NumPy.
LAYOUT = [
    ("begin", "<i8"),
    ("end", "<i8"),
    ("key", "<u8"),
    ("nbytes", "<u8"),
    ("step", "<u4"),
    ("peer", "<u4"),
    ("what", "u1"),
    ("flags", "u1"),
    ("status", "<i2"),
    ("spare", "<u4"),
]
TOTAL, RECEIVE, SUM, SEND, ROUND = 0, 64, 65, 66, 67
WINDOW, LIVE = 1, 2
#: Code of a record -> name: the stages by their own names, and the steps of servers.
NAMES: dict[int, str] = {
    **{s.value: s.name for s in Stage if s is not Stage.END},
    RECEIVE: "RECEIVE",
    SUM: "SUM",
    SEND: "SEND",
    ROUND: "ROUND",
}
FILE = "comm.json"
#: Row of what happens to the job.
JOB = "Job"
#: Likely reason for a timeline without events, for messages.
NO_EVENTS = (
    "did the job reach BYTEPS_TRACE_START_STEP, 10 by default? A tensor's step is its number of"
    " push_pulls"
)


class Record(NamedTuple):
    """``Record`` of ``core/trace/recorder.pxd``. Times in ns of the process's monotonic clock."""

    begin: int
    end: int
    key: int
    nbytes: int
    step: int
    peer: int
    what: int
    flags: int
    status: int


def unpack(data: bytes) -> Iterator[Record]:
    """Decode the records in ``data``, from :meth:`bpsx.telemetry._recorder.Watcher.take`."""
    for fields in _RECORD.iter_unpack(data):
        yield Record(*fields[:9])


def pack(begin: int, end: int, key: int, nbytes: int, step: int, what: int, flags: int) -> bytes:
    """Encode a record made in Python."""
    return _RECORD.pack(begin, end, key, nbytes, step, 0, what, flags, 0, 0)


def event(r: Record, tensor: str, ts: int, end: int) -> dict[str, Any]:
    """Return a complete event (Chrome's phase "X").

    ``ts`` and ``end``: whole microseconds, so that nested events stay nested and no digit is lost.
    """
    name = f"Comm.{tensor}"
    args: dict[str, Any] = {"name": name, "step": r.step, "bytes": r.nbytes}
    tid = str(r.key)
    if r.what == TOTAL:
        tid = "total"
    elif r.what in (RECEIVE, SUM):
        # Records of one key and worker follow each other. Of one key alone, a push may arrive while
        # another one is summed.
        tid += f" worker {r.peer}"
        args["worker"] = r.peer
    elif r.what == ROUND:
        args["last"] = r.peer
    if r.status < 0:
        args["status"] = r.status
    full = name if r.what == TOTAL else f"{name}.{NAMES.get(r.what, f'STAGE_{r.what}')}"
    return {
        "ph": "X",
        "args": args,
        "pid": name,
        "name": full,
        "ts": ts,
        "dur": end - ts,
        "tid": tid,
    }


def events(
    records: Sequence[Record], names: Mapping[int, str], estimates: list[Estimate]
) -> list[dict[str, Any]]:
    """Convert records to events, ordered by time.

    ``names``: key -> tensor. ``estimates``: of the scheduler's clock, in order, at least one.

    A push_pull submitted while an earlier one of the same tensor was under way is drawn from that
    one's end on, as events of one row must not overlap. ``args.submitted`` then has its submission
    time.
    """
    made = []
    busy: dict[str, int] = {}
    for r in sorted(records, key=lambda r: r.end if r.what == TOTAL else r.begin):
        tensor = names.get(r.key, f"key {r.key}")
        # Convert begin and end separately: the scheduler's time is monotonic in our own, so nested
        # events stay nested. One offset for both would shift neighbours that begin at different
        # times against each other.
        ts, end = ((t + offset_at(estimates, t)) // 1000 for t in (r.begin, r.end))
        made.append(event(r, tensor, ts, end))
        if r.what == TOTAL:
            if busy.get(tensor, ts) > ts:
                made[-1]["args"]["submitted"] = ts
                ts = min(busy[tensor], end)
                made[-1].update(ts=ts, dur=end - ts)
            busy[tensor] = end
    return sorted(made, key=lambda e: (e["ts"], -e["dur"]))


class Mark(NamedTuple):
    """Something that has happened to the job. Times as in :class:`Record`."""

    begin: int
    end: int
    name: str
    args: dict[str, Any]


def mark_events(
    marks: Sequence[Mark], estimates: list[Estimate], made: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Convert the marks that lie within the time of the events ``made``.

    A mark that began before the end of an earlier one is drawn from that end on, as events of one
    row must not overlap. ``args.begun`` then has its begin.
    """
    if not made:
        return []
    first, last = made[0]["ts"], max(e["ts"] + e["dur"] for e in made)
    found: list[dict[str, Any]] = []
    busy = 0
    for mark in sorted(marks, key=lambda m: (m.end, m.begin)):
        ts, end = ((t + offset_at(estimates, t)) // 1000 for t in (mark.begin, mark.end))
        if ts <= last and end >= first:
            args = {**mark.args, "begun": ts} if ts < busy else mark.args
            ts = max(ts, busy)
            event = {"name": mark.name, "ts": ts, "dur": end - ts, "args": args}
            found.append({"ph": "X", "pid": JOB, "tid": "events", **event})
            busy = end
    return found


def document(made: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Format the whole file, one event per line; ``about`` identifies the process."""
    lines = ",\n".join(json.dumps(e, separators=(", ", ": ")) for e in made)
    return (
        f'{{"traceEvents": [\n{lines}\n],\n"displayTimeUnit": "ms",\n"otherData":'
        f" {json.dumps(dict(about))}}}\n"
    )


def write(path: Path, text: str) -> None:
    """Write the file atomically: a crash half-way leaves the earlier file.

    File and new folders are accessible to the user only.

    Raises :class:`OSError`.
    """
    _make_folder(path.parent)
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w"
        ) as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _make_folder(folder: Path) -> None:
    for each in reversed([folder, *folder.parents]):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def write_own(path: Path, text: str, about: dict[str, Any]) -> Path:
    """:func:`write`, unless another process of the same job has its timeline at ``path``.

    That happens where machines share a file system, as their local ranks are equal. The file then
    goes to a folder named after role and rank. Returns the path.

    Raises :class:`OSError`.
    """
    elsewhere = (
        path.parent.with_name(f"{about['role']}-{about['rank']}") / path.parent.name / path.name
    )
    claim = path.with_name(f".{path.name}.{about['job']}")
    _make_folder(path.parent)
    try:
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:  # another process of this job is writing there now
        write(elsewhere, text)
        return elsewhere
    try:
        where = elsewhere if _of_another(path, about) else path
        write(where, text)
        return where
    finally:
        claim.unlink(missing_ok=True)


def _of_another(path: Path, about: dict[str, Any]) -> bool:
    """Whether ``path`` holds the timeline of another process of the same job."""
    try:
        found = json.loads(path.read_text())["otherData"]
        return bool(
            found["job"] == about["job"]
            and (found["role"], found["rank"]) != (about["role"], about["rank"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def merge(folder: Path) -> dict[str, Any]:
    """Merge the files below ``folder`` into the job's timeline.

    It has one process per role and rank, and one row per tensor and partition.

    Raises :class:`ValueError` if there is no file, or naming a file that bpsx did not write.
    """
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    titles: dict[tuple[int, int], str] = {}
    jobs: dict[str, Path] = {}
    for path in sorted(folder.rglob("comm*.json")):
        made, about = _read(path)
        jobs.setdefault(str(about.get("job", "")), path)
        if len(jobs) > 1:
            first, second = jobs.values()
            raise ValueError(
                f"{folder}: {first} and {second} come from different jobs: merge a folder that"
                " holds the timelines of one job"
            )
        who = (0 if about["role"] == "worker" else 1, int(about["rank"]))
        found.setdefault(who, []).extend(made)
        titles[who] = (
            f"{about['role']} {about['rank']} ({about.get('host', '?')}, pid"
            f" {about.get('pid', '?')})"
        )
    if not found:
        raise ValueError(f"{folder}: no comm.json in this folder or below")
    out: list[dict[str, Any]] = []
    for pid, who in enumerate(sorted(found), 1):
        out += _process(pid, titles[who], found[who], first_tid=len(found) + 1)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    try:
        text = json.loads(path.read_text())
        about, made = text["otherData"], text["traceEvents"]
        if not isinstance(made, list) or about["role"] not in ("worker", "server"):
            raise ValueError("not the timeline of a worker or a server")
        int(about["rank"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: not written by bpsx: {e}") from e
    return made, about


def _process(
    pid: int, title: str, made: list[dict[str, Any]], first_tid: int
) -> list[dict[str, Any]]:
    """One process's events with numeric pid and tid, which all viewers accept, and their names.

    ``first_tid`` is larger than all pids: a viewer labels a thread whose tid is the pid as the
    process's main thread.
    """
    out: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]
    made = sorted(made, key=lambda e: (e["ts"], -e["dur"]))
    # A tensor's rows stay together, its total first, in the order in which tensors appear. Perfetto
    # orders by tid, chrome://tracing by the index.
    tensors = {tensor: i for i, tensor in enumerate(dict.fromkeys(_row(e)[0] for e in made))}
    rows = sorted({_row(e) for e in made}, key=lambda row: (tensors[row[0]], _place(row[1])))
    tids = {row: first_tid + i for i, row in enumerate(rows)}
    for (tensor, part), tid in tids.items():
        out.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": tid,
                "args": {"name": f"{tensor}: {part}"},
            }
        )
        out.append(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
        )
    out += [{**e, "pid": pid, "tid": tids[_row(e)]} for e in made]
    return out


def _row(event: dict[str, Any]) -> tuple[str, str]:
    """The row of an event: tensor, and key or ``total``."""
    return str(event["pid"]).removeprefix("Comm."), str(event["tid"])


def _place(row: str) -> tuple[int, str]:
    """Sort key of a row within its tensor: total first, then by key, then by worker on servers."""
    key, _, rest = row.partition(" ")
    return (int(key) if key.isdigit() else -1, rest)


def merge_to(folder: Path, path: Path) -> int:
    """Merge the files below ``folder`` into ``path``; returns the number of events.

    Raises :class:`ValueError`, :class:`OSError`.
    """
    merged = merge(folder)
    write(path, json.dumps(merged))
    return sum(e["ph"] == "X" for e in merged["traceEvents"])


def tell_merge(folder: Path, output: Path | None, prefix: str) -> int:
    """Run :func:`merge_to` and print the result, or an error after ``prefix``.

    ``output``: by default, ``merged.json`` in ``folder``. Returns the exit status.
    """
    path = output or folder / "merged.json"
    try:
        found = merge_to(folder, path)
    except (ValueError, OSError) as e:
        print(f"{prefix}: {e}", file=sys.stderr)
        return 1
    print(f"{found} events in {path}" + ("" if found else f" ({NO_EVENTS})"))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``merge DIR [-o FILE]``; returns the exit status."""
    import argparse

    parser = argparse.ArgumentParser(
        "python -m bpsx.telemetry.timeline",
        description="Merge the timelines that the processes of a job have written.",
    )
    parser.add_argument("action", choices=["merge"])
    parser.add_argument(
        "folder",
        type=Path,
        help="the job's BYTEPS_TRACE_DIR; copy the timelines of other machines into it first",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write (default: merged.json in the folder)"
    )
    options = parser.parse_args(arguments)
    return tell_merge(options.folder, options.output, "bpsx.telemetry.timeline")


if __name__ == "__main__":
    sys.exit(main())
