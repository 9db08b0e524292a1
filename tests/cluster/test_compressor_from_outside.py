"""A compressor from outside the package, the one in CONTRIBUTING.md: whole jobs against its
reference implementation, and refused uses.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bpsx.kernels import codecs
from bpsx.kernels.reference import Reference
from support.codec_tools import gradient
from support.cuda_tools import DEVICES, Pair, Worker, workers
from support.jobs import Job, run
from support.places import ROOT

N, STEPS, PARTITION = 40_001, 4, 65536
RATES = [0.5, 0.25, 0.375, 1.0]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("float32", {"compressor": "means"}),
    "feedback": ("float32", {"compressor": "means", "size": 5, "ef": "vanilla"}),
    "corrected": (
        "float64",
        {"compressor": "means", "size": np.int64(3), "ef": "corrected", "scaling": None},
    ),
    "nesterov": (
        "float16",
        {
            "compressor": "means",
            "size": 7,
            "ef": "vanilla",
            "momentum": "nesterov",
            "mu": 0.75,
            "fp16": True,
        },
    ),
}
PUSHES = """
import bpsx, json, numpy as np, os

bpsx.init()
for name, (dtype, params) in json.loads(os.environ["CASES"]).items():
    bpsx.declare(name, compression=params)
    rng = np.random.default_rng([len(name), bpsx.rank()])
    for step, rate in enumerate(json.loads(os.environ["RATES"])):
        out = bpsx.push_pull(
            (rng.integers(-64, 64, 40_001) / 8).astype(dtype), name, learning_rate=rate
        )
        np.save(os.path.join(os.environ["OUT"], f"{name}.{bpsx.rank()}.{step}.npy"), out)
bpsx.shutdown()
"""
TRY = """
import bpsx, numpy as np
bpsx.init()
bpsx.declare("w", compression={"compressor": "means", "size": 4, "ef": "vanilla"})
for attempt in range(2):
    try:
        bpsx.push_pull(np.ones(40_001, np.float32), "w")
    except Exception as error:
        report([type(error).__name__, str(error)])
report(float(bpsx.push_pull(np.ones(40_001, np.float32), "plain", average=False)[-1]))
bpsx.declare("o", compression={"compressor": "onebit"})
report(float(bpsx.push_pull(np.ones(40_001, np.float32), "o", average=False)[-1]))
bpsx.shutdown()
"""


def blocks() -> list[str]:
    """Return the Python code in the page's section: the compressor and its reference."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Add a compressor\n") :]
    return re.findall(r"^```python\n(.*?)^```$", section[: section.index("\n## ")], re.M | re.S)


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """Return variables with which processes can, but need not, import the module."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "means.py").write_text(blocks()[0])
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    }


def oracle(n: int, size: int, wide: str) -> Reference:
    said: dict[str, Any] = {"np": np}
    exec(blocks()[1], said)
    return Reference(
        lambda p, _: said["encode"](p, size),
        lambda wire, n: said["decode"](wire, n, size, wide),
        n,
        wide,
    )


def expected(name: str) -> list[np.ndarray]:
    """Return the result of both workers by step."""
    dtype, params = CASES[name]
    wide = "float64" if dtype == "float64" else "float32"
    step = PARTITION // np.dtype(dtype).itemsize
    spans = [slice(begin, min(begin + step, N)) for begin in range(0, N, step)]
    # two workers and the server
    coders = [
        [oracle(s.stop - s.start, int(params.get("size", 8)), wide) for s in spans]
        for _ in range(3)
    ]
    rngs = [np.random.default_rng([len(name), rank]) for rank in range(2)]
    ef, momentum, mu = "ef" in params, "momentum" in params, params.get("mu", 0.9)
    found = []
    for i, rate in enumerate(RATES):
        factor = RATES[i - 1] / rate if i and params.get("ef") == "corrected" else 1.0
        given = [(rng.integers(-64, 64, N) / 8).astype(dtype).astype(wide) for rng in rngs]
        out = np.empty(N, dtype)
        for part, span in enumerate(spans):
            first, second = (
                coders[r][part].decode(
                    coders[r][part].encode(
                        given[r][span], residual=ef, momentum=momentum, mu=mu, factor=factor
                    ),
                    span.stop - span.start,
                )
                for r in range(2)
            )
            server = coders[2][part]
            out[span] = server.decode(
                server.encode((first + second) / first.dtype.type(2), residual=ef, factor=factor),
                span.stop - span.start,
            )
        found.append(out)
    return found


def test_a_job_with_it_equals_its_oracle(outside: dict[str, str], tmp_path: Path) -> None:
    cases = json.dumps(CASES, default=int)
    run(
        PUSHES,
        2,
        1,
        env={
            **outside,
            "BPSX_COMPRESSORS": "means",
            "CASES": cases,
            "RATES": json.dumps(RATES),
            "OUT": str(tmp_path),
            "BYTEPS_PARTITION_BYTES": str(PARTITION // 2),
            "BYTEPS_MIN_COMPRESS_BYTES": "1000",
        },
    )
    for name in CASES:
        for step, want in enumerate(expected(name)):
            for rank in range(2):
                got = np.load(tmp_path / f"{name}.{rank}.{step}.npy")
                assert (
                    got.dtype == want.dtype
                    and (got.view(f"u{want.itemsize}") == want.view(f"u{want.itemsize}")).all()
                ), (name, step, rank)


@pytest.mark.parametrize(
    "processes", [1, 2], ids=["two machines", "four processes of two machines"]
)
def test_a_server_without_it_reports_that_to_all_workers_and_survives(
    outside: dict[str, str], processes: int
) -> None:
    workers = 2 * processes
    with Job(
        TRY,
        workers,
        1,
        env=outside,
        worker_env={rank: {"BPSX_COMPRESSORS": "means"} for rank in range(workers)},
        processes=processes,
    ) as job:
        for first, second, plain, signs in job.results(timeout=60):
            assert first == second and first[0] == "ConfigError"
            assert all(
                text in first[1]
                for text in ("'w'", '"compressor": "means"', "BPSX_COMPRESSORS", "server")
            ), first[1]
            assert (plain, signs) == (workers, 1)
        logged = [line for line in job.servers[0].errors if "compressor='means'" in line]
        assert logged and all("BPSX_COMPRESSORS" in line for line in logged)
        assert len(logged) == 1, "once for each key"


def test_a_worker_without_it_gets_an_error_that_lists_the_known_compressors(
    outside: dict[str, str],
) -> None:
    """declare() raises before anything is sent; the other worker gets the error that it left."""
    found = run(
        """
        import bpsx, numpy as np
        bpsx.init()
        try:
            bpsx.declare("w", compression={"compressor": "means", "size": 4})
            report("declared")
        except bpsx.ConfigError as error:
            report(str(error))
        bpsx.shutdown()
    """,
        2,
        1,
        env=outside,
        worker_env={0: {"BPSX_COMPRESSORS": "means"}},
    )
    assert found[0] == ["declared"]
    assert (
        "compressor='means': expected one of onebit, topk, randomk, dithering" in found[1][0]
        and "BPSX_COMPRESSORS" in found[1][0]
    )


CODEC = """
from bpsx.kernels.codecs import register
from means import Means
class Other(Means):
    name, keys = {name!r}, {keys!r}
register(Other())
"""
FAULTS: dict[str, tuple[str, list[str]]] = {
    "missing": ("", ["nowhere", "ModuleNotFoundError", "No module named 'nowhere'"]),
    "broken": ("import means\nif:", ["wrong", "SyntaxError"]),
    "raising": ("raise RuntimeError('no such device')", ["wrong", "RuntimeError: no such device"]),
    "ending": ("raise SystemExit(3)", ["wrong", "SystemExit: 3"]),
    "of ours": (
        CODEC.format(name="topk", keys=()),
        ["wrong", "compressor 'topk'", "one of bpsx's own"],
    ),
    "of ours, hidden": (
        CODEC.format(name="half", keys=()),
        ["wrong", "compressor 'half'", "one of bpsx's own"],
    ),
    "of another's": (
        CODEC.format(name="means", keys=()),
        ["wrong", "compressor 'means' of wrong", "taken by means"],
    ),
    "a key": (
        CODEC.format(name="mine", keys=("size", "seed")),
        ["wrong", "compressor 'mine'", "'seed'"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_module_that_cannot_be_imported_is_reported_at_the_start(
    outside: dict[str, str], tmp_path: Path, fault: str
) -> None:
    source, named = FAULTS[fault]
    if source:
        (tmp_path / "modules" / "wrong.py").write_text(source)
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_")) or k == "BPSX_CACHE_DIR"
    }
    env = {
        **clean,
        **outside,
        "BPSX_COMPRESSORS": f"means,{named[0]}",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
    }
    worker = (
        "import bpsx\nfor _ in range(2):\n    try:\n        bpsx.init()\n    except"
        " bpsx.ConfigError as e:\n        print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", worker],
        env={**env, "DMLC_ROLE": "worker"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = done.stdout.splitlines()
    assert len(told) == 2 and done.returncode == 0, done
    server = subprocess.run(
        [sys.executable, "-m", "bpsx.server"],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **env,
            "DMLC_ROLE": "server",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": "1",
        },
    )
    assert server.returncode == 2, server
    for text in (*told, server.stderr):
        assert (
            all(word in text for word in ("BPSX_COMPRESSORS", *named)) and "Traceback" not in text
        ), text


def test_the_launcher_passes_the_compressors_on(outside: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import bpsx, numpy as np\nbpsx.init()\nbpsx.declare('w', compression={'compressor':"
        " 'means', 'size': 4})\nprint(bpsx.push_pull(np.full(40_001, 3.0), 'w')[-1])\n"
    )
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("DMLC_", "BYTEPS_", "BPSX_")) or k == "BPSX_CACHE_DIR"
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bpsx.launch",
            "--local",
            "--workers",
            "2",
            "--servers",
            "1",
            sys.executable,
            str(script),
        ],
        env={**env, **outside, "BPSX_COMPRESSORS": "means"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0 and done.stdout.count("3.0") == 2, done


@pytest.fixture(params=DEVICES)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    yield from workers(request.param)


def test_its_gpu_kernels_equal_its_cpu_kernels(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("means", blocks()[0]), ("means_cuda", blocks()[2])):
        (tmp_path / f"{name}.py").write_text(text)
        worker.call(None, "import", str(tmp_path), name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(codecs, "_codecs", dict(codecs._codecs))
    monkeypatch.delitem(sys.modules, "means", raising=False)
    importlib.import_module("means")
    for n, wide, residual, momentum in (
        (1, "float32", False, False),
        (300, "float32", True, False),
        (301, "float64", True, True),
    ):
        pair = Pair(worker, "means", {"size": 4}, n, wide, residual, momentum)
        for turn, kind in enumerate(["normal", "wild", "infinity", "normal"]):
            g = gradient(kind, n, wide, turn)
            pair.decode(pair.encode(g, factor=0.5), add_to=g if turn % 2 else None)
        pair.decode(bytes(8 * n + 1))
        pair.close()
