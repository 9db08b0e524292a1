"""Compressed sums in whole jobs: what comes home is what the oracle says of all that is done on the way, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bpsx.compression import Compression, compression, stream
from bpsx.kernels import reference
from bpsx.kernels.reference import Reference
from jobs import run

N, PARTITION, STEPS = 40_000, 65536, 4      # bytes: 3 partitions of float32, the last one smaller and odd

PUSHES = """
import bpsx, json, numpy as np, os
from bpsx.api import session
bpsx.init()
for name, dtype, n, params, average in json.loads(os.environ["CASES"]):
    bpsx.declare(name, compression=params)
    rng = np.random.default_rng([len(name), bpsx.rank()])
    before = session().counters()["bytes_sent"]
    for step in range(int(os.environ["STEPS"])):
        out = bpsx.push_pull(rng.integers(-64, 64, n).astype(dtype) / 8, name, average=average)
        np.save(os.path.join(os.environ["OUT"], f"{name}.{bpsx.rank()}.{step}.npy"), out)
    report([name, session().counters()["bytes_sent"] - before])
bpsx.shutdown()
"""

CASES: list[tuple[str, str, int, dict[str, Any], bool]] = [
    ("onebit", "float32", N + 1, {"compressor": "onebit"}, False),
    ("onebit scaled", "float32", N + 1, {"compressor": "onebit", "scaling": True}, True),
    ("onebit ef", "float32", N + 1, {"compressor": "onebit", "scaling": True, "ef": "vanilla"}, True),
    ("onebit nesterov", "float32", N + 1, {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov", "mu": 0.75}, True),
    ("onebit float64", "float64", N, {"compressor": "onebit", "scaling": True, "ef": "vanilla"}, True),
    ("onebit float16", "float16", N, {"compressor": "onebit", "scaling": True, "ef": "vanilla"}, True),
]


def oracle(given: Compression, which: int, sender: int | None, n: int, wide: str) -> Reference:
    """The partition's encoder at a worker, or, with ``sender`` None, at the server."""
    options = dict(given.options)
    if given.compressor == "onebit":
        return Reference(lambda p, _: reference.onebit_encode(p, options["scaling"]), lambda w, n: reference.onebit_decode(w, n, wide), n, wide)
    raise AssertionError(given.compressor)


def expected(name: str, dtype: str, n: int, params: dict[str, Any], average: bool, workers: int) -> list[np.ndarray]:
    """What every worker gets, by step."""
    given, wide = compression(params), "float64" if dtype == "float64" else "float32"
    itemsize = np.dtype(dtype).itemsize
    draws = [np.random.default_rng([len(name), rank]) for rank in range(workers)]
    spans = [slice(begin, min(begin + PARTITION // itemsize, n)) for begin in range(0, n, PARTITION // itemsize)]
    ours = [[oracle(given, stream(name.encode(), i), rank, s.stop - s.start, wide) for i, s in enumerate(spans)] for rank in range(workers)]
    theirs = [oracle(given, stream(name.encode(), i), None, s.stop - s.start, wide) for i, s in enumerate(spans)]
    found = []
    for _ in range(STEPS):
        pushed = [(rng.integers(-64, 64, n).astype(dtype) / 8).astype(wide) for rng in draws]
        out = np.empty(n, dtype)
        for i, span in enumerate(spans):
            total = sum((ours[r][i].decode(ours[r][i].encode(pushed[r][span], residual=bool(given.ef), momentum=bool(given.momentum), mu=given.mu),
                                           span.stop - span.start) for r in range(workers)), np.zeros(span.stop - span.start, wide))
            if average:
                total /= total.dtype.type(workers)
            out[span] = theirs[i].decode(theirs[i].encode(total, residual=bool(given.ef)), span.stop - span.start)
        found.append(out)
    return found


@pytest.fixture(scope="module", params=[2, 3], ids="{} workers".format)
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, list[list[Any]]]:
    """What all workers have got, and how many bytes they have sent."""
    out = tmp_path_factory.mktemp("compressed")
    env = {"CASES": json.dumps(CASES), "STEPS": str(STEPS), "OUT": str(out), "BYTEPS_PARTITION_BYTES": str(PARTITION), "BPSX_FIXED_ORDER": "1",
           "BYTEPS_MIN_COMPRESS_BYTES": "1000"}
    return request.param, out, run(PUSHES, request.param, 2, env=env)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_sums_are_the_oracles(outputs: tuple[int, Path, list[list[Any]]], case: tuple[str, str, int, dict[str, Any], bool]) -> None:
    workers, folder, _ = outputs
    for step, want in enumerate(expected(*case, workers)):
        got = [np.load(folder / f"{case[0]}.{rank}.{step}.npy") for rank in range(workers)]
        assert all((g.view(np.uint8) == got[0].view(np.uint8)).all() for g in got), "the same bits on all workers"
        # The mean of magnitudes is summed in another order: its last bits differ, and what is next to zero may change its sign.
        differ = ~np.isclose(got[0], want, rtol=2e-3 if case[1] == "float16" else 1e-5, atol=0)
        assert differ.mean() < 1e-3, (step, differ.sum(), got[0][differ][:4], want[differ][:4])


def test_what_travels_is_small(outputs: tuple[int, Path, list[list[Any]]]) -> None:
    workers, _, reports = outputs
    for (_, dtype, n, _, _), *sent in zip(CASES, *reports, strict=True):
        for _, nbytes in sent:
            assert nbytes < STEPS * (n / 8 + 3 * 200) + 2000, (dtype, nbytes)
