"""Records to trace files: times, names, rows, merging, and files that are not traces."""

from __future__ import annotations

import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpsx.planning.stages import Stage
from bpsx.telemetry import timeline
from bpsx.telemetry.clock_sync import Clock, Estimate, offset_at
from support.places import SOURCE
from support.traces import assert_no_overlaps, load

WALL = Estimate(0, 1_700_000_000_000_000_000, 0)
NAMES = {5: 'layer."quoted" \\ é\n', 6: "b"}


def record(begin, end, what, key=5, step=1, **more):
    return timeline.Record(
        begin,
        end,
        key,
        more.get("nbytes", 8),
        step,
        more.get("peer", 0),
        what,
        1,
        more.get("status", 0),
    )


def made(*records):
    return timeline.events(records, NAMES, [WALL])


def write(folder, role, rank, events):
    path = folder / f"{role}-{rank}" / "comm.json"
    timeline.write(
        path, timeline.document(events, {"role": role, "rank": rank, "host": "h", "pid": 7})
    )
    return path


def test_the_events_are_those_of_the_timeline_document(tmp_path):
    events = made(
        record(1_000_000, 9_000_000, timeline.TOTAL),
        record(2_000_000, 3_000_000, Stage.PUSH),
        record(3_000_000, 8_000_000, Stage.PULL),
    )
    assert load(write(tmp_path, "worker", 0, events)) == events
    name = "Comm." + NAMES[5]
    assert [(e["name"], e["tid"], e["pid"], e["args"]["name"]) for e in events] == [
        (name, "total", name, name),
        (name + ".PUSH", "5", name, name),
        (name + ".PULL", "5", name, name),
    ]
    assert [(e["ts"] - 1_700_000_000_000_000, e["dur"]) for e in events] == [
        (1000, 8000),
        (2000, 1000),
        (3000, 5000),
    ]


@pytest.mark.parametrize("stage", [s for s in Stage if s is not Stage.END])
def test_every_stage_has_its_own_name(stage):
    assert made(record(1, 2, stage.value))[0]["name"].endswith("." + stage.name)


def test_an_unknown_code_still_makes_an_event():
    assert made(record(1, 2, 40))[0]["name"].endswith(".STAGE_40")


def test_codes_and_layout_are_those_of_the_core():
    text = (SOURCE / "core" / "trace" / "watch.pxd").read_text()
    codes = dict(re.findall(r"^ {4}(TOTAL|RECEIVE|SUM|SEND|ROUND|WINDOW|LIVE) = (\d+)", text, re.M))
    assert {n: int(v) for n, v in codes.items()} == {
        n: getattr(timeline, n) for n in codes
    } and len(codes) == 7
    struct = text[text.index("cdef struct Record") : text.index("cdef struct Block")]
    sizes = {
        "int64_t": "<i8",
        "uint64_t": "<u8",
        "uint32_t": "<u4",
        "uint8_t": "u1",
        "int16_t": "<i2",
    }
    assert [(n, sizes[t]) for t, n in re.findall(r"^ {4}(u?int\d+_t) (\w+)", struct, re.M)] == [
        (
            ("begin", "end", "key", "nbytes", "step", "peer", "what", "flags", "status", "spare")[
                i
            ],
            t,
        )
        for i, (_, t) in enumerate(timeline.LAYOUT)
    ]


def test_a_packed_record_is_unpacked_unchanged():
    assert list(
        timeline.unpack(timeline.pack(1, 2, 2**64 - 1, 3, 4, timeline.TOTAL, timeline.LIVE))
    ) == [timeline.Record(1, 2, 2**64 - 1, 3, 4, 0, timeline.TOTAL, timeline.LIVE, 0)]


def test_push_pulls_of_one_tensor_that_overlap_are_drawn_one_after_the_other():
    first, second = made(
        record(0, 10_000, timeline.TOTAL), record(2_000, 20_000, timeline.TOTAL, step=2)
    )
    assert (second["ts"], second["dur"]) == (first["ts"] + 10, 10)
    assert second["args"]["submitted"] == first["ts"] + 2
    assert_no_overlaps([first, second])


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**6)), max_size=30))
def test_totals_never_overlap(spans):
    assert_no_overlaps(
        made(*(record(b, b + d, timeline.TOTAL, step=i + 1) for i, (b, d) in enumerate(spans)))
    )


def test_a_failed_push_pull_says_so():
    assert made(record(0, 1, timeline.TOTAL, status=-1))[0]["args"]["status"] == -1


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "comm.json"
    timeline.write(path, "one")
    timeline.write(path, "two")
    assert path.read_text() == "two" and os.listdir(path.parent) == ["comm.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        timeline.write(tmp_path / "file" / "comm.json", "x")


def test_merging_gives_each_process_a_number_and_each_row_a_name(tmp_path):
    write(
        tmp_path,
        "server",
        0,
        made(record(4, 5, timeline.SUM, peer=1), record(3, 9, timeline.ROUND)),
    )
    write(tmp_path, "worker", 1, made(record(0, 9, timeline.TOTAL)))
    write(
        tmp_path,
        "worker",
        0,
        made(
            record(0, 9000, timeline.TOTAL),
            record(1000, 2000, Stage.PUSH),
            record(1000, 2000, Stage.PUSH, key=6),
        ),
    )
    count = timeline.merge_to(tmp_path, tmp_path / "merged.json")
    events = load(tmp_path / "merged.json")
    assert count == 6 == sum(e["ph"] == "X" for e in events)
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles == {1: "worker 0 (h, pid 7)", 2: "worker 1 (h, pid 7)", 3: "server 0 (h, pid 7)"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    parts = ["total", "total", "5", "5", "5 worker 1"]
    assert sorted(rows.values()) == sorted(["b: 6", *(f"{NAMES[5]}: {p}" for p in parts)])
    assert all(
        (e["pid"], e["tid"]) in rows and type(e["pid"]) is type(e["tid"]) is int
        for e in events
        if e["ph"] == "X"
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"traceEvents": 3, "otherData": {"role": "worker", "rank": 0}}',
        '{"traceEvents": [], "otherData": {"role": "boss", "rank": 0}}',
    ],
)
def test_a_file_of_another_process_is_named(tmp_path, content, capsys):
    (tmp_path / "comm.json").write_text(content)
    assert timeline.main(["merge", str(tmp_path)]) == 1
    assert "comm.json: not written by bpsx" in capsys.readouterr().err


def test_nothing_to_merge_is_an_error(tmp_path, capsys):
    assert timeline.main(["merge", str(tmp_path)]) == 1
    assert "no comm.json" in capsys.readouterr().err


def test_nested_events_stay_nested_while_the_clock_estimate_changes():
    """The offset falls by 1 ms within 10 ms, a tenth of each duration.

    A separate offset for each event would put it between its neighbours.
    """
    estimates = [Estimate(0, 5_000_000, 0), Estimate(10_000_000, 4_000_000, 0)]
    records = [
        timeline.Record(0, 9_000_000, 1, 8, 1, 0, timeline.ROUND, 0, 0),
        timeline.Record(8_500_000, 9_000_000, 1, 8, 1, 0, timeline.SEND, 0, 0),
    ]
    outer, inner = timeline.events(records, {1: "x"}, estimates)
    assert outer["name"] == "Comm.x.ROUND" and inner["name"] == "Comm.x.SEND"
    assert (
        outer["ts"] <= inner["ts"]
        and inner["ts"] + inner["dur"] == outer["ts"] + outer["dur"] == 13_100
    )


def test_merged_rows_are_in_order_and_have_no_thread_id_of_a_main_thread(tmp_path):
    """Perfetto orders rows by tid; a row whose tid equals its pid is the main thread."""

    def event(tensor: str, tid: str, ts: int) -> dict:
        return {
            "ph": "X",
            "pid": f"Comm.{tensor}",
            "tid": tid,
            "name": f"Comm.{tensor}",
            "ts": ts,
            "dur": 1,
            "args": {"name": f"Comm.{tensor}", "step": 1},
        }

    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        events = [
            event("b", "10", 3),
            event("a", "2", 5),
            event("b", "9", 4),
            event("b", "total", 6),
            event("b", "9 worker 1", 7),
        ]
        (tmp_path / str(rank) / "comm.json").write_text(
            json.dumps(
                {"traceEvents": events, "otherData": {"role": "worker", "rank": rank, "job": "j"}}
            )
        )
    merged = timeline.merge(tmp_path)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in merged if e["name"] == "thread_name"}
    assert [names[k] for k in sorted(names) if k[0] == 1] == [
        "b: total",
        "b: 9",
        "b: 9 worker 1",
        "b: 10",
        "a: 2",
    ]
    assert {pid for pid, _ in names}.isdisjoint(tid for _, tid in names)
    assert all((e["pid"], e["tid"]) in names for e in merged if e["ph"] == "X")


# ---- the clock


def test_the_shortest_round_trip_of_a_burst_counts():
    clock = Clock()
    assert not clock.known and clock.error_ns == 0
    clock.exchange(0, 1_000_400, 1000)  # 500 each way, if both ways took equally long
    clock.exchange(2000, 1_002_050, 2100)
    clock.exchange(3000, 1_009_000, 9000)
    assert clock.known
    clock.settle()
    assert clock.estimates() == [Estimate(2050, 1_000_000, 50)] and clock.error_ns == 50


def test_a_clock_reply_older_than_its_request_is_ignored():
    clock = Clock()
    clock.exchange(10, 5, 9)
    clock.exchange(-1, 5, 9)
    clock.settle()
    assert clock.estimates() == []


def test_between_bursts_the_offset_is_interpolated():
    estimates = [Estimate(100, 1000, 1), Estimate(200, 1100, 1), Estimate(300, 900, 1)]
    assert [offset_at(estimates, at) for at in (0, 100, 150, 200, 250, 300, 999)] == [
        1000,
        1000,
        1050,
        1100,
        1000,
        900,
        900,
    ]


@given(
    st.integers(-(10**15), 10**15),
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1
    ),
)
def test_the_error_bound_holds(truth, trips):
    clock = Clock()
    for sent, there, back in trips:
        clock.exchange(sent, sent + there + truth, sent + there + back)
    clock.settle()
    (found,) = clock.estimates()
    assert abs(found.offset - truth) <= found.error + 1


def test_the_file_names_its_process(tmp_path):
    path = write(tmp_path, "worker", 3, [])
    assert json.loads(path.read_text())["otherData"] == {
        "role": "worker",
        "rank": 3,
        "host": "h",
        "pid": 7,
    }
    assert load(path) == []


def test_marks_lie_within_the_recording_and_do_not_overlap() -> None:
    estimates = [timeline.Estimate(0, 0, 0)]
    made = [{"ts": 100, "dur": 100}, {"ts": 150, "dur": 200}]
    marks = [
        timeline.Mark(1_000 * begin, 1_000 * end, name, {"why": "x"})
        for begin, end, name in [
            (10, 99, "early"),
            (90, 120, "a"),
            (110, 160, "b"),
            (351, 360, "z"),
        ]
    ]
    a, b = timeline.mark_events(marks, estimates, made)
    assert (a["name"], a["ts"], a["dur"], a["args"]) == ("a", 90, 30, {"why": "x"})
    assert (b["name"], b["ts"], b["dur"], b["args"]) == ("b", 120, 40, {"why": "x", "begun": 110})
    assert timeline.mark_events(marks, estimates, []) == []
