"""Functions for workers with a pretend GPU: ``from gpus.worker import *``.

The import makes the GPU's context current in this thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import bpsx
from bpsx.api import verbs
from bpsx.core._handle import Handle
from bpsx.plugin.adapter import TensorView
from gpus.pretend.driver import Driver, driver
from gpus.pretend.memory import PretendArray

__all__ = [
    "PretendArray",
    "ask",
    "average_of",
    "bpsx",
    "broadcast",
    "cuda",
    "draw",
    "held",
    "main",
    "near",
    "np",
    "push_pull",
    "reference",
    "refused",
    "until",
    "verbs",
    "view",
]

cuda: Driver = driver()
cuda.enter()
#: The stream on which the script works by default.
main: int = cuda.stream()


def view(array: PretendArray, stream: int | None = None, gpu: int = 0) -> TensorView:
    """View of a GPU tensor, as seen by a thread that works on ``stream``."""
    on = main if stream is None else stream
    return TensorView(
        array.address, array.nbytes, array.dtype.name, array.shape, array, gpu, lambda: on
    )


def host_view(array: npt.NDArray[Any]) -> TensorView:
    """View of a tensor in the host's memory."""
    return TensorView(array.ctypes.data, array.nbytes, array.dtype.name, array.shape, array)


def push_pull(
    name: str,
    source: Any,
    target: Any = None,
    *,
    average: bool = False,
    priority: int = 0,
    stream: int | None = None,
) -> Handle:
    """Start a push_pull of arrays on the GPU or the host; in place without ``target``."""
    views = [
        host_view(a) if isinstance(a, np.ndarray) else view(a, stream)
        for a in (source, source if target is None else target)
    ]
    return verbs.session().push_pull(name, *views, average=average, priority=priority)


def broadcast(name: str, array: Any, root: int, stream: int | None = None) -> Handle:
    return verbs.session().broadcast(
        name, host_view(array) if isinstance(array, np.ndarray) else view(array, stream), root
    )


def draw(dtype: str, n: int, rank: int, seed: int) -> npt.NDArray[Any]:
    """Return a worker's input; every worker can compute the inputs of all."""
    rng = np.random.default_rng([seed, rank])
    if "int" in dtype:
        return rng.integers(-100 if dtype[0] == "i" else 0, 100, n).astype(dtype)
    return rng.normal(size=n).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def reference(parts: list[npt.NDArray[Any]], average: bool) -> npt.NDArray[np.float64]:
    """Return the sum in float64, or the mean."""
    exact = np.sum([p.astype(np.float64) for p in parts], axis=0)
    return np.asarray(exact / len(parts) if average else exact)


def near(got: npt.NDArray[Any], parts: list[npt.NDArray[Any]], average: bool = False) -> bool:
    """Whether the result is the inputs' sum (or mean), up to the type's rounding.

    Integers wrap, and their means are rounded down.
    """
    exact, name = reference(parts, average), got.dtype.name
    if "int" in name:
        bits = 8 * got.dtype.itemsize
        whole = np.floor(exact).astype(np.int64)
        return bool(
            (
                got
                == (whole % (1 << bits) if bits < 64 else whole).astype(np.uint64).astype(got.dtype)
            ).all()
        )
    eps = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}[name]
    magnitude = np.sum([abs(p.astype(np.float64)) for p in parts], axis=0)
    # The sums of a switch, of all switches and of all machines each may round once to the type, and
    # each addition once to the accumulator's type.
    bound = (
        eps * abs(exact)
        + (3 * eps + len(parts) * min(eps, 2**-24)) * magnitude
        + (6e-8 if name == "float16" else 1e-38)
    )
    return bool((abs(got.astype(np.float64) - exact) <= bound).all())


def average_of(dtype: str) -> bool:
    """Whether means of the type are allowed in every layout of GPUs."""
    return "int" not in dtype


def refused(function: Callable[[], Any]) -> str:
    """Return the error that a call raises: its type and text."""
    try:
        function()
    except bpsx.BpsxError as e:
        return f"{type(e).__name__}: {e}"
    raise AssertionError("no error")


def ask(handle: Handle, seconds: float = 20.0) -> str:
    """Return the error with which a handle ends: its type and text."""
    return refused(lambda: handle.wait(seconds))


def until(so: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "it is not so"
        time.sleep(0.002)


@contextlib.contextmanager
def held(stream: int) -> Iterator[None]:
    """Context in which work queued on the stream waits until the end of the context."""
    cuda.hold(stream)
    try:
        yield
    finally:
        cuda.release(stream)
