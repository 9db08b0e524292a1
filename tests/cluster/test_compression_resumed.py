"""What compression keeps from round to round: saved and put back, a job goes on as if it had not been interrupted, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs import run

STEPS, HALF = 6, 3
#: name -> (dtype, elements, compression)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "onebit": ("float32", 40_001, {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov"}),
    "topk": ("float16", 40_001, {"compressor": "topk", "k": 0.01, "ef": "vanilla", "momentum": "nesterov"}),
    "randomk": ("float32", 40_001, {"compressor": "randomk", "k": 0.02, "ef": "corrected", "seed": 5}),
    "dithering": ("float64", 40_001, {"compressor": "dithering", "k": 3, "ef": "vanilla", "seed": 5}),
    "without residual": ("float32", 40_001, {"compressor": "dithering", "k": 3}),
    "small": ("float32", 100, {"compressor": "onebit", "momentum": "nesterov", "ef": "vanilla"}),
}

WORKER = """
import bpsx, json, logging, numpy as np, os, pickle
from bpsx.api import session
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
        go(name, dtype, n, 99)      # something is kept already, which has to go
    restore()
for step in range(begin, end):
    if step == int(os.environ.get("SUSPEND", -1)):
        bpsx.suspend()
        report("suspended")
        bpsx.resume(bpsx_workers, 2)
    for name, (dtype, n, params) in cases.items():
        out = go(name, dtype, n, step)
        np.save(f"{folder}/{name}.{rank}.{step}.{begin}.npy", out)
state = session().compressing.save(cases)
pickle.dump(state, open(f"{folder}/{rank}.{end}.pickle", "wb"))
report({name: sorted(s) for name, s in state.items()})
bpsx.shutdown()
"""


def part(folder: Any, begin: int, end: int, workers: int = 2, **more: str) -> list[list[Any]]:
    env = {"CASES": json.dumps(CASES), "STEPS": str(STEPS), "BEGIN": str(begin), "END": str(end), "FOLDER": str(folder),
           "BYTEPS_PARTITION_BYTES": "65536", "BYTEPS_MIN_COMPRESS_BYTES": "1000", "BPSX_FIXED_ORDER": "1", **more}
    return run(WORKER, workers, 2, env=env)


def differing(folder: Any, name: str, begin: int, workers: int) -> list[tuple[int, int]]:
    """(rank, step) of results that are not those of the job that was not interrupted."""
    def read(rank: int, step: int, begin: int) -> bytes:
        return (folder / f"{name}.{rank}.{step}.{begin}.npy").read_bytes()
    return [(rank, step) for rank in range(workers) for step in range(begin, STEPS) if read(rank, step, begin) != read(rank, step, 0)]


@pytest.mark.parametrize("early", ["", "1"], ids=["while tensors are in use", "before the first push"])
def test_a_job_goes_on_where_another_has_ended(tmp_path: Any, early: str) -> None:
    whole = part(tmp_path, 0, STEPS, EARLY="1")
    part(tmp_path, 0, HALF, EARLY="1")
    part(tmp_path, HALF, STEPS, EARLY=early)
    for name in CASES:
        assert differing(tmp_path, name, HALF, 2) == []
    for rank, report in enumerate(whole):
        for name, keys in report[0].items():
            assert ("server" in keys) == (rank == 0 and name != "small"), "who speaks for the servers"


def test_without_what_was_kept_the_rest_is_different(tmp_path: Any) -> None:
    """Or the test above could not fail."""
    part(tmp_path, 0, STEPS, EARLY="1")
    part(tmp_path, 0, HALF, EARLY="1")
    (tmp_path / f"1.{HALF}.pickle").unlink()
    (tmp_path / f"1.{HALF}.pickle").write_bytes(__import__("pickle").dumps({}))
    part(tmp_path, HALF, STEPS, EARLY="1")
    for name in CASES:
        assert differing(tmp_path, name, HALF, 2) != []
