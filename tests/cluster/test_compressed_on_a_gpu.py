"""A worker that compresses with CUDA kernels, another with CPU kernels, and a server without a GPU:
the results are the same.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cuda_tools import DEVICES, why_no_gpu
from support.jobs import run

STEPS = 3
#: Name and compressor -> (elements, compression, the compressor's own keys). onebit without
#: scaling, because the last bits of its mean depend on the order of additions.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "onebit": (301, {"ef": "vanilla"}, {}),
    "topk": (300, {"ef": "vanilla", "momentum": "nesterov"}, {"k": 0.1}),
    "randomk": (300, {"ef": "vanilla", "seed": 3}, {"k": 30}),
    "dithering": (300, {"seed": 3}, {"k": 3}),
}

WORKER = """
import bpsx, ctypes, json, numpy as np, os

cases = json.loads(os.environ["CASES"])
rank = int(os.environ["DMLC_WORKER_ID"])
kind = os.environ["DEVICE"]
if rank == 1 and kind:
    # Replaces the addresses of compiled C functions with those of functions that use the device.
    import bpsx.compression.spec
    from bpsx.kernels.codecs import Compiled
    from support.cuda_tools import Worker

    device, coders, calls = Worker(kind), {}, []
    P, I = ctypes.c_void_p, ctypes.c_int64

    def array(address, n, dtype):
        return np.frombuffer(
            (ctypes.c_char * (n * np.dtype(dtype).itemsize)).from_address(address), dtype
        )

    def load_codec(name, wide, residual, momentum):
        def coder(options, n):
            key = tuple(array(options, 8, np.int64))
            if key not in coders:
                coders[key] = device.call(
                    None, "", name, cases[name][2], n, wide, residual, momentum, int(key[7])
                )
            return coders[key]

        def encode(g, e, m, wire, scratch, state, options, n, counter, factor, mu):
            made = device.call(coder(options, n), "encode", array(g, n, wide).copy(), factor, mu)[0]
            ctypes.memmove(wire, made, len(made))
            calls.append(("encode", name, counter))
            return len(made)

        def decode(wire, size, out, scratch, options, n, add):
            assert not add
            found = device.call(coder(options, n), "decode", ctypes.string_at(wire, size), None)
            if found is None:
                return -1
            array(out, n, wide)[:] = found
            calls.append(("decode", name, 0))
            return 0

        functions = (
            ctypes.CFUNCTYPE(
                I, P, P, P, P, P, P, P, I, ctypes.c_uint64, ctypes.c_double, ctypes.c_double
            )(encode),
            ctypes.CFUNCTYPE(I, P, I, P, P, P, I, I)(decode),
        )
        return Compiled(*(ctypes.cast(f, P).value for f in functions), functions)

    bpsx.compression.spec.load_codec = load_codec
bpsx.init()
for name, (n, params, own) in cases.items():
    bpsx.declare(name, compression={"compressor": name, **params, **own})
    for step in range(int(os.environ["STEPS"])):
        g = np.random.default_rng([n, step, rank]).standard_normal(n).astype(np.float32)
        np.save(f"{os.environ['FOLDER']}/{name}.{rank}.{step}.{kind}.npy", bpsx.push_pull(g, name))
report(calls if rank == 1 and kind else [])
bpsx.shutdown()
if rank == 1 and kind:
    device.close()
"""


def environment(folder: Path, device: str) -> dict[str, str]:
    tests = str(Path(__file__).parents[1])
    return {
        "CASES": json.dumps(CASES),
        "STEPS": str(STEPS),
        "FOLDER": str(folder),
        "DEVICE": device,
        "BYTEPS_MIN_COMPRESS_BYTES": "0",
        "BYTEPS_THREADPOOL_SIZE": "1",
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), tests]),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_one_worker_on_a_gpu_beside_workers_on_cpus(tmp_path: Path, device: str) -> None:
    if device == "gpu" and why_no_gpu():
        pytest.skip(f"no GPU: {why_no_gpu()}")
    run(WORKER, 2, 1, env=environment(tmp_path, ""))
    _, (calls,) = run(WORKER, 2, 1, env=environment(tmp_path, device))
    assert sorted(map(tuple, calls)) == sorted(
        [("encode", name, step + 1) for name in CASES for step in range(STEPS)]
        + [("decode", name, 0) for name in CASES for _ in range(STEPS)]
    ), "all of it was done there"
    for name in CASES:
        for step in range(STEPS):
            want, *found = (
                np.load(tmp_path / f"{name}.{rank}.{step}.{kind}.npy")
                for rank, kind in ((0, ""), (0, device), (1, device))
            )
            assert all((f == want).all() for f in found), (name, step)
