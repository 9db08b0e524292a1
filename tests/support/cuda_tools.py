"""Helpers for tests of CUDA kernels: coders in a separate process (``cuda_worker.py``), and their
comparison with the CPU's.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.codec_tools import Coder, same

#: Cases on the simulator, which is slow, and with ``-m gpu`` on a GPU.
DEVICES = ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)]
#: Sizes around words, tiles of warps and blocks, and chunks; the simulator gets the smaller ones.
SIZES = {
    "simulator": [1, 33, 300],
    "gpu": [
        1,
        2,
        31,
        32,
        33,
        255,
        257,
        1023,
        1025,
        2047,
        2049,
        8191,
        8193,
        16383,
        40_001,
        1_000_003,
    ],
}


def rounds(worker: Worker) -> list[tuple[str, float]]:
    """Return the rounds of a test: kind of gradient, and factor of the residual."""
    return [("normal", 1.0), ("wild", 0.5), ("few", 3.0)][: 2 if worker.kind == "simulator" else 3]


@functools.cache
def why_no_gpu() -> str:
    """Return why there is no GPU for the tests; empty if there is one."""
    done = subprocess.run(
        [sys.executable, "-c", "import numba_cuda; from numba import cuda; cuda.current_context()"],
        capture_output=True,
        text=True,
    )
    return done.stderr.strip().rsplit("\n", 1)[-1] if done.returncode else ""


class Worker:
    """The process, whose coders are known by number."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        source = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]
        env = {
            **os.environ,
            "NUMBA_ENABLE_CUDASIM": str(int(kind == "simulator")),
            "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0",
            "PYTHONPATH": os.pathsep.join([*source, os.environ.get("PYTHONPATH", "")]),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "cuda_worker.py")],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, number: int | None, method: str, *arguments: object):
        """Call a method in the process; return its result or raise its exception."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(pickle.dumps((number, method, arguments)))
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def launch(
        self,
        module: str,
        path: str,
        kind: str | tuple[object, ...],
        blocks: int,
        given: list[np.ndarray | int],
        *numbers: int | float,
    ) -> list[np.ndarray]:
        """Run a kernel on arrays in the process: see ``cuda_worker.launched``.

        ``kind``: an element type, or all arguments of the function that makes the kernel.
        """
        kind = (kind,) if isinstance(kind, str) else kind
        return self.call(None, "launch", module, path, kind, blocks, given, list(numbers))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def workers(kind: str) -> Iterator[Worker]:
    """Body of a fixture: a process for the tests of a module."""
    if kind == "gpu" and why_no_gpu():
        pytest.skip(f"no GPU: {why_no_gpu()}")
    worker = Worker(kind)
    yield worker
    worker.close()


class Pair:
    """A coder on the device and one on the CPU: equal inputs must give equal results."""

    def __init__(
        self,
        worker: Worker,
        name: str,
        options: dict,
        n: int,
        wide: str = "float32",
        residual: bool = False,
        momentum: bool = False,
        seed: int = 1,
    ) -> None:
        self.cpu = Coder(name, options, n, wide, residual, momentum, seed)
        self.worker, self.name, self.n, self.wide, self.kept = (
            worker,
            name,
            n,
            wide,
            (residual, momentum),
        )
        self.number = worker.call(None, "", name, options, n, wide, residual, momentum, seed)
        self.residual = self.momentum = self.state = np.zeros(0)

    def encode(self, g: np.ndarray, factor: float = 1.0, mu: float = 0.9) -> bytes:
        """Return the device's bytes; assert that its residual and momentum equal the CPU's."""
        with np.errstate(all="ignore"):
            want = self.cpu.encode(g, factor, mu)
        got, self.residual, self.momentum, self.state = self.worker.call(
            self.number, "encode", g, factor, mu
        )
        self.assert_alike(got, want)
        assert same(self.residual, self.cpu.residual), "residual"
        assert same(self.momentum, self.cpu.momentum), "momentum"
        assert not self.state[1:].any()
        return got

    def assert_alike(self, got: bytes, want: bytes) -> None:
        """Assert that the bytes are equal; only the bits of a NaN may differ."""
        assert len(got) == len(want)
        if got != want:
            head, kind = self.layout(len(want))
            assert got[:head] == want[:head]
            assert same(np.frombuffer(got[head:], kind), np.frombuffer(want[head:], kind))

    def layout(self, size: int) -> tuple[int, str]:
        """Return the offset at which floating point begins in the bytes, and its type."""
        return size, self.wide

    def decode(self, wire: bytes, add_to: np.ndarray | None = None) -> np.ndarray | None:
        """Decode on the device; assert that the CPU returns the same."""
        with np.errstate(all="ignore"):
            want = self.cpu.decode(wire, add_to)
        got = self.worker.call(self.number, "decode", wire, add_to)
        assert (got is None) == (want is None), "one refuses"
        assert got is None or same(got, want)
        return got

    def close(self) -> None:
        """Delete the device's coder."""
        self.worker.call(self.number, "close")
