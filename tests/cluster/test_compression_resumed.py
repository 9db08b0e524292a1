"""Compression's state: a job that restores the saved state has the same bits as a job that was not
interrupted.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.jobs import Job, run

STEPS, HALF = 6, 3
#: Name -> (dtype, elements, compression).
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "onebit": (
        "float32",
        40_001,
        {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov"},
    ),
    "topk": (
        "float16",
        40_001,
        {"compressor": "topk", "k": 0.01, "ef": "vanilla", "momentum": "nesterov"},
    ),
    "randomk": (
        "float32",
        40_001,
        {"compressor": "randomk", "k": 0.02, "ef": "corrected", "seed": 5},
    ),
    "dithering": (
        "float64",
        40_001,
        {"compressor": "dithering", "k": 3, "ef": "vanilla", "seed": 5},
    ),
    "without residual": ("float32", 40_001, {"compressor": "dithering", "k": 3}),
    "small": ("float32", 100, {"compressor": "onebit", "momentum": "nesterov", "ef": "vanilla"}),
}

WORKER = """
import bpsx, json, logging, numpy as np, os, pickle
from bpsx.api.verbs import session
bpsx.init()
steps, begin, end = (int(os.environ[k]) for k in ("STEPS", "BEGIN", "END"))
cases = json.loads(os.environ["CASES"])
rank, folder, whose = bpsx.rank(), os.environ["FOLDER"], int(os.environ.get("WHOSE", -1))
for name, (dtype, n, params) in cases.items():
    bpsx.declare(name, compression=params)
def restore():
    if begin:
        path = f"{folder}/{rank if whose < 0 else whose}.{begin}.pickle"
        session().compressing.restore(pickle.load(open(path, "rb")))
def go(name, dtype, n, step):
    g = np.random.default_rng([n, step, rank]).standard_normal(n).astype(dtype)
    return bpsx.push_pull(g, name, learning_rate=1 / (step + 1))
if os.environ.get("EARLY"):
    restore()
else:
    for name, (dtype, n, params) in cases.items():
        go(name, dtype, n, 99)      # there is state already, which must be replaced
    restore()
for step in range(begin, end):
    if step == int(os.environ.get("SUSPEND", -1)):
        bpsx.suspend()
        report("suspended")
        sys.stdin.readline()
        bpsx.resume(2, 2)
    for name, (dtype, n, params) in cases.items():
        out = go(name, dtype, n, step)
        np.save(f"{folder}/{name}.{rank}.{step}.{begin}.npy", out)
state = session().compressing.save(cases)
pickle.dump(state, open(f"{folder}/{rank}.{end}.pickle", "wb"))
report({name: sorted(s) for name, s in state.items()})
bpsx.shutdown()
"""


def environment(folder: Path, begin: int, end: int, **more: str) -> dict[str, str]:
    return {
        "CASES": json.dumps(CASES),
        "STEPS": str(STEPS),
        "BEGIN": str(begin),
        "END": str(end),
        "FOLDER": str(folder),
        "BYTEPS_PARTITION_BYTES": "65536",
        "BYTEPS_MIN_COMPRESS_BYTES": "1000",
        "BPSX_FIXED_ORDER": "1",
        **more,
    }


def part(
    folder: Path, begin: int, end: int, workers: int = 2, processes: int = 1, **more: str
) -> list[list[Any]]:
    return run(WORKER, workers, 2, processes=processes, env=environment(folder, begin, end, **more))


def differing(folder: Path, name: str, begin: int, workers: int) -> list[tuple[int, int]]:
    """Return (rank, step) of results that differ from those of the uninterrupted job."""

    def read(rank: int, step: int, begin: int) -> bytes:
        return (folder / f"{name}.{rank}.{step}.{begin}.npy").read_bytes()

    return [
        (rank, step)
        for rank in range(workers)
        for step in range(begin, STEPS)
        if read(rank, step, begin) != read(rank, step, 0)
    ]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """Run an uninterrupted job, and the first half of an interrupted one; also return the state
    that the former saved at its end.
    """
    folder = tmp_path_factory.mktemp("whole")
    whole = part(folder, 0, STEPS, EARLY="1")
    part(folder, 0, HALF, EARLY="1")
    return folder, whole


@pytest.fixture
def folder(first: tuple[Path, list[list[Any]]], tmp_path: Path) -> Path:
    """Return a copy of the saved files."""
    return Path(shutil.copytree(first[0], tmp_path / "copy"))


@pytest.mark.parametrize(
    "early", ["", "1"], ids=["while tensors are in use", "before the first push"]
)
def test_a_job_continues_from_the_state_of_an_earlier_one(folder: Path, early: str) -> None:
    part(folder, HALF, STEPS, EARLY=early)
    for name in CASES:
        assert differing(folder, name, HALF, 2) == []


def test_worker_0_speaks_for_the_servers(first: tuple[Path, list[list[Any]]]) -> None:
    for rank, report in enumerate(first[1]):
        for name, keys in report[0].items():
            assert ("server" in keys) == (rank == 0 and name != "small")
            assert ("momentum" in keys) == (name == "small")


@pytest.mark.parametrize("lost", ["all of worker 1", "the servers' part"])
def test_without_the_saved_state_the_results_differ(folder: Path, lost: str) -> None:
    """Without this, the test above could not fail."""
    path = folder / f"{1 if lost == 'all of worker 1' else 0}.{HALF}.pickle"
    state = pickle.loads(path.read_bytes())
    for saved in state.values():
        saved.pop("server", None)
    path.write_bytes(pickle.dumps({} if lost == "all of worker 1" else state))
    part(folder, HALF, STEPS, EARLY="1")
    for name in CASES:
        # Servers keep no state of small tensors, and no useful state of randomk: they reply at the
        # pushed places.
        assert (differing(folder, name, HALF, 2) != []) == (
            name not in ("small", "randomk") or lost == "all of worker 1"
        ), name


def test_the_state_of_another_worker_gives_counters_only_and_all_agree(folder: Path) -> None:
    """All workers load worker 0's state, as in scripts where worker 0 writes the checkpoints."""
    part(folder, HALF, STEPS, EARLY="1", WHOSE="0")
    for name in CASES:
        assert (
            len(
                {(folder / f"{name}.{rank}.{STEPS - 1}.{HALF}.npy").read_bytes() for rank in (0, 1)}
            )
            == 1
        )
    assert differing(folder, "without residual", HALF, 2) == [], "nothing of it belongs to a worker"


def test_compression_state_survives_suspend_and_resume(folder: Path) -> None:
    with Job(WORKER, 2, 2, env=environment(folder, 0, STEPS, EARLY="1", SUSPEND=str(HALF))) as job:
        for worker in job.workers:
            worker.wait_for_line("suspended")
        job.servers_anew(2)
        before = {path.name: path.read_bytes() for path in folder.glob("*.npy")}
        for path in folder.glob("*.0.npy"):
            path.unlink()
        for worker in job.workers:
            worker.say("go on")
        job.results()
    for name in CASES:
        for rank in (0, 1):
            for step in range(HALF, STEPS):
                assert (folder / f"{name}.{rank}.{step}.0.npy").read_bytes() == before[
                    f"{name}.{rank}.{step}.0.npy"
                ]


def test_machines_of_two_processes(tmp_path: Path) -> None:
    """The root keeps the residual of its machine's sum, each process the momentum of its own
    gradients.
    """
    part(tmp_path, 0, STEPS, 4, 2, EARLY="1")
    part(tmp_path, 0, HALF, 4, 2, EARLY="1")
    part(tmp_path, HALF, STEPS, 4, 2, EARLY="1")
    for name in CASES:
        assert differing(tmp_path, name, HALF, 4) == []


REFUSALS = """
import bpsx, json, numpy as np
from bpsx.api.verbs import session
bpsx.init()
bpsx.declare("x", compression={"compressor": "topk", "k": 5, "ef": "vanilla"})
bpsx.push_pull(np.ones(50000, np.float32), "x")
kept = session().compressing
state = kept.save(["x", "nobody"])
report(sorted(state))
bpsx.declare("aba", compression={"compressor": "topk", "k": 5, "ef": "vanilla"})
bpsx.push_pull(np.ones(50000, np.float32), "aba")
bpsx.declare("aba", compression={"compressor": "onebit", "ef": "vanilla"})
bpsx.push_pull(np.ones(50000, np.float32), "aba")
bpsx.declare("aba", compression={"compressor": "topk", "k": 5, "ef": "vanilla"})
bpsx.push_pull(np.ones(50000, np.float32), "aba")
report(kept.save(["aba"])["aba"]["codec"])
def text(given):
    try:
        kept.restore(given)
    except bpsx.ConfigError as e:
        return str(e)
report([text({"x": 5}), text({"x": {"worker": "abc"}}), text({"x": {"colour": 1}})])
for change in ({"codec": "{}"}, {"lengths": [1]}, {"worker": state["x"]["worker"][:-1]}):
    kept.restore({"x": {**state["x"], **change}})
    report(float(bpsx.push_pull(np.ones(50000, np.float32), "x").sum()))
bpsx.shutdown()
"""


def test_invalid_or_foreign_compression_state_is_refused() -> None:
    with Job(REFUSALS, 1, 1, env={"BYTEPS_FORCE_DISTRIBUTED": "1"}) as job:
        names, in_use, texts, *sums = job.results()[0]
        log = job.workers[0].text()
    assert names == ["x"] and "topk" in in_use, "not what was declared last"
    for text, said in zip(
        texts,
        ("expected a mapping, not int", "'worker' is a str; expected", "'colour' is a int"),
        strict=True,
    ):
        assert "'x'" in text and said in text
    assert all(total > 0 for total in sums), "it goes on with what it had"
    assert log.count("belongs to another tensor or another compression, and is not used") == 3
