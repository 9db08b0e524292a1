"""Compressed sums in whole jobs: the results equal those of the reference implementation of every
step of a push and pull.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bpsx.compression.spec import compression, mix, stream
from bpsx.kernels import reference
from bpsx.kernels.reference import Reference
from support.jobs import run
from support.oracle import Sums, as_wide

RATES = [0.5, 0.25, 0.375, 1.0]
# compressed: 3 partitions of float32, the last one smaller and odd
N, PARTITION, STEPS = 40_000, 65536, len(RATES)

PUSHES = """
import bpsx, json, ml_dtypes, numpy as np, os
from bpsx.api.verbs import session

bpsx.init()
for name, dtype, n, params, average in json.loads(os.environ["CASES"]):
    bpsx.declare(name, compression=params)
    rng = np.random.default_rng([len(name), bpsx.rank()])
    before = session().counters()["bytes_sent"]
    for step in range(int(os.environ["STEPS"])):
        given = (rng.integers(-64, 64, n) / 8).astype(
            ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        )
        out = bpsx.push_pull(
            given, name, average=average, learning_rate=json.loads(os.environ["RATES"])[step]
        )
        np.save(
            os.path.join(os.environ["OUT"], f"{name}.{bpsx.rank()}.{step}.npy"),
            out.astype(np.float32) if dtype == "bfloat16" else out,
        )
    report([name, session().counters()["bytes_sent"] - before])
bpsx.shutdown()
"""

CASES: list[tuple[str, str, int, dict[str, Any], bool]] = [
    ("onebit", "float32", N + 1, {"compressor": "onebit"}, False),
    ("onebit scaled", "float32", N + 1, {"compressor": "onebit", "scaling": True}, True),
    (
        "onebit ef",
        "float32",
        N + 1,
        {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
        True,
    ),
    (
        "onebit nesterov",
        "float32",
        N + 1,
        {
            "compressor": "onebit",
            "scaling": True,
            "ef": "vanilla",
            "momentum": "nesterov",
            "mu": 0.75,
        },
        True,
    ),
    ("onebit corrected", "float32", N + 1, {"compressor": "onebit", "ef": "corrected"}, True),
    ("topk", "float32", N + 1, {"compressor": "topk", "k": 0.01}, True),
    ("topk ef", "float32", N + 1, {"compressor": "topk", "k": 0.01, "ef": "vanilla"}, True),
    (
        "topk nesterov",
        "bfloat16",
        N + 1,
        {"compressor": "topk", "k": 70, "ef": "corrected", "momentum": "nesterov", "mu": 0.5},
        True,
    ),
    ("randomk", "float64", N + 1, {"compressor": "randomk", "k": 0.02, "seed": 2**64 - 1}, False),
    (
        "randomk ef",
        "float32",
        N + 1,
        {"compressor": "randomk", "k": 200, "ef": "vanilla", "seed": 7},
        True,
    ),
    (
        "randomk sparse",
        "float16",
        N + 1,
        {"compressor": "randomk", "k": 0.05, "ef": "sparse"},
        True,
    ),
    ("dithering", "float32", N + 1, {"compressor": "dithering", "k": 4}, True),
    (
        "dithering ef",
        "float32",
        N + 1,
        {"compressor": "dithering", "k": 3, "partition": "natural", "ef": "corrected", "seed": 3},
        True,
    ),
    (
        "dithering float64",
        "float64",
        N + 1,
        {"compressor": "dithering", "k": 20, "ef": "vanilla", "momentum": "nesterov"},
        False,
    ),
    ("half", "float32", N + 1, {"fp16": True}, True),
    ("half float64", "float64", N + 1, {"fp16": True}, True),
    (
        "onebit float64",
        "float64",
        N,
        {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
        True,
    ),
    (
        "onebit float16",
        "float16",
        N,
        {"compressor": "onebit", "scaling": True, "ef": "vanilla"},
        True,
    ),
]


def expected(
    name: str,
    dtype: str,
    n: int,
    params: dict[str, Any],
    average: bool,
    workers: int,
    processes: int = 1,
) -> list[np.ndarray]:
    """Return every worker's expected result by step. A machine's ``processes`` are summed first."""
    wide = "float64" if dtype == "float64" else "float32"
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    draws = [np.random.default_rng([len(name), rank]) for rank in range(workers)]
    sums = Sums(name, compression(params), n, kind, workers // processes, PARTITION)
    found = []
    for step in range(STEPS):
        pushed = [as_wide((rng.integers(-64, 64, n) / 8).astype(kind)) for rng in draws]
        pushed = [
            sum(pushed[m * processes : (m + 1) * processes], np.zeros(n, wide))
            for m in range(workers // processes)
        ]
        out = sums.round(
            pushed, workers if average else 1, RATES[step - 1] / RATES[step] if step else 1.0
        )
        found.append(out.astype(np.float32) if dtype == "bfloat16" else out)
    return found


def environment(out: Path, cases: list[Any]) -> dict[str, str]:
    return {
        "CASES": json.dumps(cases),
        "STEPS": str(STEPS),
        "RATES": json.dumps(RATES),
        "OUT": str(out),
        "BYTEPS_PARTITION_BYTES": str(PARTITION // 2),
        "BPSX_FIXED_ORDER": "1",
        "BYTEPS_MIN_COMPRESS_BYTES": "1000",
    }


@pytest.fixture(scope="module", params=[2, 3], ids="{} workers".format)
def outputs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, list[list[Any]]]:
    """Return all workers' results, and the number of bytes that they sent."""
    out = tmp_path_factory.mktemp("compressed")
    return request.param, out, run(PUSHES, request.param, 2, env=environment(out, CASES))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_sums_are_the_oracles(
    outputs: tuple[int, Path, list[list[Any]]], case: tuple[str, str, int, dict[str, Any], bool]
) -> None:
    workers, folder, _ = outputs
    for step, want in enumerate(expected(*case, workers)):
        got = [np.load(folder / f"{case[0]}.{rank}.{step}.npy") for rank in range(workers)]
        assert all((g.view(np.uint8) == got[0].view(np.uint8)).all() for g in got), (
            "the same bits on all workers"
        )
        if case[0].startswith("onebit"):
            # The mean of magnitudes is summed in another order: its last bits differ, and elements
            # next to zero may change their sign.
            differ = ~np.isclose(got[0], want, rtol=2e-3 if case[1] == "float16" else 1e-5, atol=0)
            assert differ.mean() < 1e-3, (step, differ.sum(), got[0][differ][:4], want[differ][:4])
        else:
            assert (got[0] == want).all(), (step, (got[0] != want).sum())


UNEVEN = """
import bpsx, json, numpy as np, os

bpsx.init()
r = bpsx.rank()
names = json.loads(os.environ["NAMES"])
for name, params in names.items():
    bpsx.declare(name, compression=params)
rngs = {name: np.random.default_rng([len(name), r]) for name in names}
# worker 1 takes so many more steps than worker 0; then they continue together
for alone in (0, 2, 0, 3):
    for step in range(2 + alone * r):
        for name, rng in rngs.items():
            report(
                bpsx.push_pull(
                    rng.integers(-64, 64, 999).astype(np.float32), name, average=False
                ).tolist()
            )
    bpsx.join()
bpsx.shutdown()
"""


def test_randomks_counters_differ_after_join_and_converge_again() -> None:
    """Worker 1 pushes more often than worker 0.

    In the round after, their places differ: the reply has the places of the larger count and, with
    error feedback, all other elements stay in the residual. From the next round on both workers
    have that count, and the sum is only at its places.
    """
    names = {
        "none": {"compressor": "randomk", "k": 0.1},
        "vanilla!": {"compressor": "randomk", "k": 0.1, "ef": "vanilla"},
        "sparse feedback": {"compressor": "randomk", "k": 0.1, "ef": "sparse", "seed": 5},
    }
    env = {"NAMES": json.dumps(names), "BYTEPS_MIN_COMPRESS_BYTES": "1"}
    got = [iter(g) for g in run(UNEVEN, 2, 1, env=env)]
    draws = {name: [np.random.default_rng([len(name), rank]) for rank in (0, 1)] for name in names}
    seeds = {
        name: mix(params.get("seed", 0), stream(name.encode(), 0)) for name, params in names.items()
    }

    def coder(name: str) -> Reference:
        seed, kept = seeds[name], "ef" in names[name]
        return Reference(
            lambda p, c: reference.randomk_encode(p, c, seed, 0.1, kept),
            lambda w, n: reference.randomk_decode(w, n, seed, 0.1),
            999,
        )

    workers, servers = (
        {name: [coder(name), coder(name)] for name in names},
        {name: coder(name) for name in names},
    )
    differed, left = 0, 0.0
    for alone in (0, 2, 0, 3):
        for step in range(2 + alone):
            here = [0, 1] if step < 2 else [1]
            for name, params in names.items():
                total, server = np.zeros(999, np.float32), servers[name]
                for rank in here:
                    given = draws[name][rank].integers(-64, 64, 999).astype(np.float32)
                    total += server.decode(
                        workers[name][rank].encode(given, residual="ef" in params), 999
                    )
                counts = {workers[name][rank].counter for rank in here}
                differed += len(counts) > 1
                server.counter = max(counts) - 1
                answer = server.decode(server.encode(total, residual="ef" in params), 999)
                if "ef" in params:
                    left = max(left, float(abs(server.residual).max()))
                else:
                    assert len(counts) > 1 or (answer == total).all(), (
                        "with one count nothing is lost on the way back"
                    )
                for rank in here:
                    workers[name][rank].counter = max(counts)
                    assert next(got[rank]) == answer.tolist(), (name, alone, step, rank)
    assert differed == 3 and left > 0 and all(next(g, None) is None for g in got)


#: Compressions whose sums on a machine are exact: without momentum, which each process adds itself.
ON_MACHINES = [case for case in CASES if "momentum" not in case[3] and case[1] != "float16"]


def test_machines_of_two_processes_compress_the_sum_of_both(tmp_path: Path) -> None:
    env = environment(tmp_path, ON_MACHINES)
    run(PUSHES, 4, 2, processes=2, env=env)
    for case in ON_MACHINES:
        for step, want in enumerate(expected(*case, 4, 2)):
            got = [np.load(tmp_path / f"{case[0]}.{rank}.{step}.npy") for rank in range(4)]
            assert all((g.view(np.uint8) == got[0].view(np.uint8)).all() for g in got)
            if case[0].startswith("onebit"):
                assert (~np.isclose(got[0], want, rtol=1e-5, atol=0)).mean() < 1e-3, (case, step)
            else:
                assert (got[0] == want).all(), (case, step)


def test_few_bytes_are_sent(outputs: tuple[int, Path, list[list[Any]]]) -> None:
    workers, _, reports = outputs
    for (name, _, n, _, _), *sent in zip(CASES, *reports, strict=True):
        for _, nbytes in sent:
            most = {"half": 2.0, "onebit": 1 / 8, "topk": 0.2, "randomk": 0.5, "dithering": 0.8}[
                name.split()[0]
            ]
            assert nbytes < STEPS * (n * most + 3 * 200) + 2000, (name, nbytes)


def test_a_k_larger_than_the_tensor_is_refused_by_name() -> None:
    """The push raises on each worker before anything is sent. Another tensor of that name may be
    larger, or too small for compression.
    """
    found = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        for name in ("topk", "randomk"):
            bpsx.declare(name, compression={"compressor": name, "k": np.int64(1001)})
            try:
                bpsx.push_pull(np.ones(1000, np.float32), name)
            except ValueError as error:
                report([type(error).__name__, str(error)])
            report([name, float(bpsx.push_pull(np.ones(1001, np.float32), name)[0])])
            report([name, float(bpsx.push_pull(np.ones(10, np.float32), name)[0])])
        bpsx.shutdown()
    """,
        2,
        1,
        env={"BYTEPS_MIN_COMPRESS_BYTES": "1000"},
    )
    for got in found:
        assert got == [
            said
            for name in ("topk", "randomk")
            for said in (
                ["ConfigError", f"'{name}': k=1001 is more than the 1000 elements of the tensor"],
                [name, 1.0],
                [name, 1.0],
            )
        ]


SPEED = """
import bpsx, copy, json, numpy as np, os, pickle

bpsx.init()
for name, params in (("plain", None), ("packed", {"compressor": "onebit", "scaling": True})):
    bpsx.declare(name, compression=params)
    g = np.ones(1_000_000, np.float32)
    bpsx.push_pull(g, name)
    bpsx.get_pushpull_speed()
    for _ in range(3):
        bpsx.push_pull(g, name)
    speed = bpsx.get_pushpull_speed()
    again = pickle.loads(pickle.dumps(speed))
    ms, rate = speed
    report(
        [
            rate,
            speed.sent,
            speed.received,
            again == speed and again.sent == speed.sent,
            repr(copy.copy(speed)) == repr(speed),
        ]
    )
bpsx.barrier()
path = None
bpsx.trace_start()
bpsx.push_pull(g, "packed")
path = bpsx.trace_stop()
events = json.load(open(path))["traceEvents"]
report({e["name"]: e.get("args", {}) for e in events if e.get("ph") == "X"})
bpsx.shutdown()
"""


def test_bytes_on_the_wire_are_counted_and_reported(tmp_path: Path) -> None:
    folders = {i: {"BYTEPS_TRACE_DIR": str(tmp_path / str(i))} for i in range(2)}
    for plain, packed, stages in run(SPEED, 2, 2, worker_env=folders):
        rate, sent, received, *same = plain
        assert 1 < sent / rate < 1.01 and 1 < received / rate < 1.01 and all(same)
        rate, sent, received, *same = packed
        assert 1 / 32 < sent / rate < 1 / 31 and 1 / 32 < received / rate < 1 / 31 and all(same)
        assert all(
            stages[f"Comm.packed.{stage}"]["bytes"] == 4_000_000
            for stage in ("COMPRESS", "DECOMPRESS")
        )
        assert all(stages[f"Comm.packed.{stage}"]["bytes"] == 125_008 for stage in ("PUSH", "PULL"))
