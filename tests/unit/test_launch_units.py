"""The launcher's pure parts: lines, deadlines, command line."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpsx.errors import ConfigError
from bpsx.launch.child import Ending
from bpsx.launch.cli import split
from bpsx.launch.local import LocalPlan, overlooked
from bpsx.launch.output_mux import Prefixer, Sink, is_live, label


def prefixed(chunks: list[bytes], live: bool = False) -> bytes:
    prefixer = Prefixer(b"> ", live)
    return b"".join([prefixer.feed(chunk) for chunk in chunks]) + prefixer.finish()


@given(st.lists(st.binary(max_size=40)), st.booleans())
def test_output_does_not_depend_on_where_chunks_end(chunks: list[bytes], live: bool) -> None:
    assert prefixed(chunks, live) == prefixed([b"".join(chunks)], live)


@given(st.binary().map(lambda data: data.replace(b">", b"")))
def test_no_byte_is_lost_and_each_line_has_its_label(data: bytes) -> None:
    text = prefixed([data])
    lines = (
        text.splitlines(keepends=True)
        if b"\r" not in data
        else [line + b"\n" for line in text.split(b"\n")[:-1]]
    )
    assert all(line.startswith(b"> ") for line in lines)
    whole = b"".join(line[2:] for line in lines)
    assert whole == (data if data.endswith(b"\n") or not data else data + b"\n")


def test_a_progress_bar_moves_on_a_terminal_only() -> None:
    assert Prefixer(b"> ", live=True).feed(b"10%\r20%\r") == b"> 10%\r"
    assert Prefixer(b"> ").feed(b"10%\r20%\r") == b""
    assert prefixed([b"a\r", b"\nb\r\n"], live=True) == b"> a\r\n> b\r\n"


def test_an_endless_line_is_broken() -> None:
    text = prefixed([b"x" * 65536] * 40)
    assert text.count(b"\n") == 3
    assert text.count(b"x") == 40 * 65536


def test_colour_per_role() -> None:
    assert label("worker 0", "worker", False) == b"[worker 0] "
    coloured = {label("p", role, True) for role in ("worker", "server", "scheduler")}
    assert len(coloured) == 3
    assert all(b"[p] " in text and text.endswith(b"\x1b[0m") for text in coloured)


def test_a_file_and_a_dumb_terminal_are_not_live() -> None:
    ours, theirs = os.openpty()
    try:
        assert is_live(theirs, {})
        assert not is_live(theirs, {"TERM": "dumb"})
    finally:
        os.close(ours)
        os.close(theirs)
    reading, writing = os.pipe()
    os.close(reading)
    assert not is_live(writing, {})
    os.close(writing)


def test_a_sink_never_blocks_and_notices_a_missing_reader() -> None:
    reading, writing = os.pipe()
    try:
        sink = Sink(writing)
        sink.write(bytes(1 << 20))
        sink.flush()
        assert sink.waiting
        assert not sink.full
        assert not sink.broken
    finally:
        os.close(reading)
    sink.flush()
    assert sink.broken
    assert not sink.waiting
    sink.write(b"more")
    assert not sink.waiting
    os.close(writing)


def test_processes_get_a_grace_time_then_sigterm_then_sigkill() -> None:
    ending = Ending(10, 5)
    assert ending.due is None
    assert ending.take(1000) is None
    ending.begin(100)
    ending.begin(105)  # the clock is already running
    assert [ending.take(t) for t in (109, 110, 111, 114, 115, 116, 999)] == [
        None,
        signal.SIGTERM,
        None,
        None,
        signal.SIGKILL,
        None,
        None,
    ]


def test_a_job_without_grace_is_terminated_at_once() -> None:
    ending = Ending(10, 5)
    ending.begin(100)
    ending.begin(101, 0)
    assert ending.take(101) is signal.SIGTERM
    ending.begin(102, 0)
    assert ending.due == 106
    assert ending.take(106) is signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        ("", "", ""),
        ("python train.py --lr 1", "", "python train.py --lr 1"),
        ("--local --workers 2 python -u x", "--local --workers 2", "python -u x"),
        ("--workers=2 --local x --workers 3", "--workers=2 --local", "x --workers 3"),
        ("--local -- --odd -- y", "--local", "--odd -- y"),
        ("x -- y", "", "x -- y"),
        ("--local --grace", "--local --grace", ""),
    ],
)
def test_where_the_command_begins(words: str, options: str, command: str) -> None:
    assert split(words.split()) == (options.split(), command.split())


def test_several_workers_need_a_server() -> None:
    with pytest.raises(ConfigError, match="--servers 0: 2 workers"):
        LocalPlan(("x",), workers=2, servers=0)
    assert (
        LocalPlan(("x",), workers=1, servers=0).environment("worker", 0, 0)[
            "BYTEPS_FORCE_DISTRIBUTED"
        ]
        == "0"
    )


@pytest.mark.parametrize(
    ("environment", "chosen", "named"),
    [
        (
            {"DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "4"},
            "",
            ["DMLC_NUM_WORKER --workers 2", "DMLC_NUM_SERVER --servers 1"],
        ),
        (
            {"BYTEPS_LOCAL_SIZE": "4", "NVIDIA_VISIBLE_DEVICES": "all"},
            "",
            ["BYTEPS_LOCAL_SIZE --processes 1", "NVIDIA_VISIBLE_DEVICES --processes 1"],
        ),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, "workers", ["NVIDIA_VISIBLE_DEVICES --processes 1"]),
        # Equal values, values without meaning, and values that were given as options, too.
        ({"DMLC_NUM_WORKER": "2", "NVIDIA_VISIBLE_DEVICES": "5"}, "", []),
        ({"NVIDIA_VISIBLE_DEVICES": "void", "BYTEPS_LOCAL_SIZE": ""}, "", []),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "BYTEPS_LOCAL_SIZE": "4"}, "processes", []),
    ],
)
def test_variables_without_effect_under_local_are_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], chosen: str, named: list[str]
) -> None:
    for name in (
        "DMLC_NUM_WORKER",
        "DMLC_NUM_SERVER",
        "BYTEPS_LOCAL_SIZE",
        "NVIDIA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wanted = [
        f"{n.split()[0]} has no effect with --local: use {n.split()[1]} N (now {n.split()[2]})"
        for n in named
    ]
    assert overlooked(LocalPlan(("x",)), chosen.split()) == wanted
