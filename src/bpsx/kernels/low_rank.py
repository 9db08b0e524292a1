"""Addresses of PowerSGD's steps, and how their work is divided.

:mod:`bpsx.kernels.cpu.low_rank` has the functions, ``abi.pxd`` their signatures, and
:mod:`bpsx.kernels.reference_low_rank` the oracle.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from bpsx.dtypes import BY_NAME
from bpsx.kernels.cache import compiled

#: Steps whose functions read gradients, and those that read only P or Q.
_OF_GRADIENTS = ("project", "project_back", "restore")
_OF_FACTORS = ("orthogonalise", "refresh")
STEPS = (*_OF_GRADIENTS, *_OF_FACTORS)
#: Elements of a row that a function works on at a time.
CHUNK = 512
#: Rows that are summed by themselves.
ROWS = 256
#: On a GPU: columns of P or Q that a kernel makes in one pass over M, and rows of a tile of those
#: that restore M.
RANKS, TALL = 4, 16
_lock = threading.Lock()
_loaded: dict[str, Steps] = {}


class Steps(NamedTuple):
    """Addresses of the steps for one element type; ``owners`` keep them alive."""

    project: int
    project_back: int
    restore: int
    orthogonalise: int
    refresh: int
    owners: tuple[object, ...]


def wide_of(dtype: str) -> str:
    """Return the type of P, Q and residual for gradients of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


def scratch_bytes(dtype: str, rank: int) -> int:
    """Return the bytes of scratch memory of a thread: a chunk, and one for each column."""
    return (1 + rank) * CHUNK * BY_NAME[wide_of(dtype)].itemsize


def load_steps(dtype: str) -> Steps:
    """Compile the steps for gradients of ``dtype``, or load them from the cache. Thread-safe.

    Each process does so once.
    """
    with _lock:
        if dtype not in _loaded:
            made = {step: _load(step, dtype) for step in _OF_GRADIENTS}
            made.update({step: _load(step, wide_of(dtype)) for step in _OF_FACTORS})
            addresses = {step: function.address for step, function in made.items()}
            _loaded[dtype] = Steps(**addresses, owners=tuple(made.values()))
        return _loaded[dtype]


def _load(step: str, dtype: str) -> Any:
    return compiled(f"{step}-{dtype}", (CHUNK, ROWS), functools.partial(_compile, step, dtype))


def _compile(step: str, dtype: str) -> tuple[Any, Callable[[], bytes]]:
    # Importing Numba takes most of a second, so only processes that compile import it.
    module = importlib.import_module("bpsx.kernels.cpu.low_rank")
    made: tuple[Any, Callable[[], bytes]] = module.compile_step(step, dtype)
    return made
