"""Imports numba-cuda so that it works with the NumPy that is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def _removed_names() -> Iterator[None]:
    """Lend NumPy the names that it has removed and numba-cuda refers to.

    numba-cuda (0.30.4 is the newest that does) registers ``np.row_stack`` when it loads, which
    NumPy 2.5 removed; it was ``np.vstack`` by another name. Only the registration needs the name,
    so NumPy has it for that long.
    """
    lent = "row_stack" not in vars(np)
    if lent:
        np.row_stack = np.vstack  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        if lent:
            del np.row_stack  # type: ignore[attr-defined, unused-ignore]


def load_target() -> None:
    """Load what numba-cuda knows of NumPy, which it would do when the first kernel is compiled.

    Not thread-safe; idempotent.
    """
    # versions without that module have no need of this
    with _removed_names(), contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("numba.cuda.np.arrayobj")
