"""How bpsx-run top fits its output to the terminal."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
from pathlib import Path

import pytest

from bpsx.launch import top


def drawn(text: list[str], rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that are written to a terminal of that size."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    try:
        with open(theirs, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            top._draw(text)
            found = ""
            while not found.endswith("\x1b[J"):  # a terminal may pass it on in pieces
                found += os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
    return [line.replace("\x1b[K", "").replace("\x1b[H", "") for line in found.split("\r\n")[:-1]]


@pytest.mark.parametrize(
    ("columns", "shown"), [(80, 80), (132, 132), (300, 200), (0, 200)]
)  # 0: a terminal that does not know its size
def test_lines_are_cut_at_the_terminals_width(
    columns: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drawn(["x" * 200, "short"], 10, columns, monkeypatch) == ["x" * shown, "short"]


def test_rows_beyond_the_screen_height_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn([str(i) for i in range(50)], 5, 80, monkeypatch) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("workers", "servers", "counts"),
    [(1, 1, "1 worker, 1 server, 0 tensors"), (2, 3, "2 workers, 3 servers, 0 tensors")],
)
def test_counts_are_singular_or_plural(workers: int, servers: int, counts: str) -> None:
    view = {
        "state": "running",
        "workers": workers,
        "servers": servers,
        "tensors": 0,
        "seconds": 1.0,
        "nodes": [],
        "missing": [],
        "failure": "",
    }
    assert top.lines(view, "h:1")[0] == f"job at h:1: running, {counts}, up 1 s"


_VIEW = {
    "state": "running",
    "workers": 2,
    "servers": 3,
    "tensors": 0,
    "seconds": 1.0,
    "nodes": [],
    "missing": [],
    "failure": "",
}


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, []),
        ({"term": 0, "servers_lost": 0}, []),
        ({"term": 1, "servers_lost": 1}, ["term 1: 1 server lost"]),
        ({"term": 2, "servers_lost": 2}, ["term 2: 2 servers lost"]),
        ({"term": 2, "workers_left": 1, "workers_lost": 0}, ["term 2: 1 worker left"]),
        (
            {"term": 5, "workers_left": 2, "servers_left": 1, "servers_joined": 1, "again": 4096},
            ["term 5: 2 workers, 1 server left; 1 server joined; 4096 bytes pushed again"],
        ),
    ],
)
def test_lost_nodes_are_shown(more: dict[str, int], shown: list[str]) -> None:
    view = {**_VIEW, **more}
    assert [line for line in top.lines(view, "h:1") if line.startswith("term ")] == shown


def test_the_latest_changes_are_shown_one_a_line() -> None:
    def change(term, what, who, why="", **more):
        known = {"ago": 12.3, "seconds": None, "again": 0, **more}
        return {"term": term, "what": what, "who": who, "why": why, **known}

    server, worker = "server 1 (h, pid 7)", "worker 1 (h, pid 8)"
    changes = [change(0, "joined", f"worker {i} (h, pid {i})") for i in range(9)]
    changes += [
        change(1, "lost", server, "its connection broke", seconds=0.01234, again=4096),
        change(2, "left", worker, "SIGTERM", ago=None),
        change(3, "moved", "server 2 (h, pid 9)"),
    ]
    view = {**_VIEW, "changes": changes}
    shown = top.lines(view, "h:1")
    assert shown[4:10] == [
        "term  s ago  gap s  bytes again  change",
        "   3     12      -            -  keys move to server 2 (h, pid 9)",
        "   2      -      -            -  left: worker 1 (h, pid 8), SIGTERM",
        "   1     12  0.012         4096  lost: server 1 (h, pid 7), its connection broke",
        "   -     12      -            -  joined: worker 8 (h, pid 8)",
        "   -     12      -            -  joined: worker 7 (h, pid 7)",
    ]


@pytest.mark.parametrize(("now", "shown"), [(2, "2 workers"), (1, "1 worker (2 at the beginning)")])
def test_the_workers_of_a_running_job_are_counted(now: int, shown: str) -> None:
    view = {
        "state": "running",
        "workers": 2,
        "workers_now": now,
        "servers": 1,
        "tensors": 1,
        "seconds": 1.0,
        "nodes": [],
        "missing": [],
        "failure": "",
    }
    title = top.lines(view, "h:1")[0]
    assert title == f"job at h:1: running, {shown}, 1 server, 1 tensor, up 1 s"


def test_a_file_gets_whole_lines(tmp_path: Path) -> None:
    """Without a terminal, whole lines are written, whatever their width."""
    view = {
        "state": "failed",
        "workers": 1,
        "servers": 1,
        "tensors": 0,
        "seconds": 1.0,
        "nodes": [],
        "missing": [],
        "failure": "y" * 500,
    }
    assert "failed: " + "y" * 500 in top.lines(view, "h:1")
