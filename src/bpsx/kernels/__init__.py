"""Summation kernels: loops over elements that the servers call by function pointer, without the
GIL.

``load(code)`` compiles (or takes from the cache) what one element type needs. The signatures are in
``abi.pxd``; what they compute is spelled out in :mod:`bpsx.kernels.reference`, the slow oracle that
the tests compare with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

_lock = threading.Lock()
_loaded: dict[int, Kernels] = {}


class Kernels(NamedTuple):
    """Addresses of one element type's kernels (0: not needed for it) and what keeps them alive."""

    itemsize: int
    wide_itemsize: int
    pair: int
    add: int
    start: int
    finish: int
    divide: int
    owners: tuple[object, ...]


def load(code: int) -> Kernels:
    """The kernels of the element type with this wire code, compiled once per process. Thread-safe.

    Raises :class:`KeyError` if there is none.
    """
    with _lock:
        if code not in _loaded:
            # Numba takes a third of a second to import: only processes that sum pay for it.
            from bpsx.kernels.cpu import sum as cpu_sum

            _loaded[code] = cpu_sum.load(code)
        return _loaded[code]


@contextlib.contextmanager
def loading(*codes: int, codecs: bool = False) -> Iterator[None]:
    """Load the kernels of element types in a thread of their own while the body runs; what went
    wrong is raised at the end of the body.

    ``codecs``: import all compressors too. What has been loaded or imported needs no file
    descriptor later, when there may be none left.
    """
    from bpsx.kernels.codecs import import_all

    failures: list[Exception] = []

    def attempt() -> None:
        try:
            for code in codes:
                load(code)
            if codecs:
                import_all()
        except Exception as e:
            failures.append(e)

    thread = threading.Thread(target=attempt, name="bpsx-warm-up", daemon=True)
    thread.start()
    yield
    thread.join()
    if failures:
        raise failures[0]
