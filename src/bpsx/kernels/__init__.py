"""Summation kernels: loops over elements that servers call by function pointer, without the GIL.

``load(code)`` compiles the kernels of one element type, or takes them from the cache in a folder of
the user's, so only the first server ever started on a machine compiles. ``abi.pxd`` has their
signatures. :mod:`bpsx.kernels.reference`, a slow oracle for the tests, defines their
results.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bpsx.dtypes import BY_CODE
from bpsx.kernels.addresses import Kernels as Kernels
from bpsx.kernels.cache import compiled
from bpsx.system.threads import NamedThread

#: Kernels of each element type; the last two only of one whose sums are wider.
_STEPS = ("pair", "add", "divide", "start", "finish")
_lock = threading.Lock()
_loaded: dict[int, Kernels] = {}


def load(code: int) -> Kernels:
    """Return the kernels of the element type with wire code ``code``.

    Compiles them once per process. Thread-safe. Raises :class:`KeyError` for an unknown code.
    """
    with _lock:
        if code not in _loaded:
            _loaded[code] = _load(code)
        return _loaded[code]


def _compile(dtype: str, step: str) -> tuple[Any, Callable[[], bytes]]:
    # Importing Numba takes most of a second, so only processes that compile import it.
    from bpsx.kernels.cpu import sum as cpu_sum

    return cpu_sum.compile_sum(dtype, step)


def _load(code: int) -> Kernels:
    dtype = BY_CODE[code]
    steps = _STEPS if dtype.wide_itemsize != dtype.itemsize else _STEPS[:3]
    made = {
        step: compiled(f"{step}-{dtype.name}", (), functools.partial(_compile, dtype.name, step))
        for step in steps
    }
    pair, add, divide, start, finish = (
        made[step].address if step in made else 0 for step in _STEPS
    )
    return Kernels(
        dtype.itemsize, dtype.wide_itemsize, pair, add, start, finish, divide, tuple(made.values())
    )


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

    thread = NamedThread(target=attempt, name="bpsx-warm-up", daemon=True)
    thread.start()
    yield
    thread.join()
    if failures:
        raise failures[0]
