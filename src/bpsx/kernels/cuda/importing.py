"""Import of numba-cuda, made to work with the installed NumPy."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def _removed_names() -> Iterator[None]:
    """Temporarily restore a name that NumPy has removed and numba-cuda refers to.

    numba-cuda (0.30.4 is the newest that does) registers ``np.row_stack`` when it loads. NumPy 2.5
    removed it; it was an alias of ``np.vstack``. Only the registration needs the name.
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
    """Load numba-cuda's support for NumPy, which otherwise loads when the first kernel is compiled.

    Not thread-safe; idempotent.
    """
    # Versions without that module do not need this.
    with _removed_names(), contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("numba.cuda.np.arrayobj")
