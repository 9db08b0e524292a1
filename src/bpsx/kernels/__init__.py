"""Summation kernels: loops over elements that servers call by function pointer, without the GIL.

``load(code)`` compiles the kernels of one element type, or takes them from the cache. ``abi.pxd``
has their signatures. :mod:`bpsx.kernels.reference`, a slow oracle for the tests, defines their
results.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from bpsx.kernels.addresses import Kernels as Kernels

_lock = threading.Lock()
_loaded: dict[int, Kernels] = {}


def load(code: int) -> Kernels:
    """Return the kernels of the element type with wire code ``code``.

    Compiles them once per process. Thread-safe. Raises :class:`KeyError` for an unknown code.
    """
    with _lock:
        if code not in _loaded:
            # Importing Numba takes a third of a second, so only processes that sum import it.
            from bpsx.kernels.cpu import sum as cpu_sum

            _loaded[code] = cpu_sum.load(code)
        return _loaded[code]


@contextlib.contextmanager
def loading(*codes: int, codecs: bool = False) -> Iterator[None]:
    """Load the kernels of element types in a background thread while the body runs.

    Joins the thread at the end of the body and raises the first error of loading there. ``codecs``:
    import all compressors too. A module or kernel loaded now needs no file descriptor later, when
    the process may have run out of them.
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
