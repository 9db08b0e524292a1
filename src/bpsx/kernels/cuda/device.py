"""Device functions for kernels, and the launch of kernels.

Both work on a GPU, or on Numba's simulator if that is switched on (NUMBA_ENABLE_CUDASIM=1).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy
from numba import cuda
from numba.core import config

SIMULATED = bool(config.ENABLE_CUDASIM)
if TYPE_CHECKING or not SIMULATED:
    from bpsx.kernels.cuda import device_gpu as _made_of
else:
    from bpsx.kernels.cuda import device_sim as _made_of

#: NumPy, as kernels name its types. Numba gives these names their meaning; ``Any`` keeps mypy from
#: checking kernels as NumPy or Python code.
np: Any = numpy
THREADS, WARPS = _made_of.THREADS, _made_of.WARPS
device = _made_of.device
at, bits, magnitude, float_of = _made_of.at, _made_of.bits, _made_of.magnitude, _made_of.float_of
signed, negative = _made_of.signed, _made_of.negative
plus, times, narrow, widen, high = (
    _made_of.plus,
    _made_of.times,
    _made_of.narrow,
    _made_of.widen,
    _made_of.high,
)
atomic_add, atomic_or, atomic_max = _made_of.atomic_add, _made_of.atomic_or, _made_of.atomic_max
shared_add, shared_or = _made_of.shared_add, _made_of.shared_or
thread, block, blocks, sync, fence = (
    _made_of.thread,
    _made_of.block,
    _made_of.blocks,
    _made_of.sync,
    _made_of.fence,
)
ones, lowest, leading, ballot = _made_of.ones, _made_of.lowest, _made_of.leading, _made_of.ballot
total, largest, scan, scan_warp = (
    _made_of.total,
    _made_of.largest,
    _made_of.scan,
    _made_of.scan_warp,
)
sync_warp, transposed = _made_of.sync_warp, _made_of.transposed
fold, lane_of = _made_of.fold, _made_of.lane_of
scan_wide = _made_of.scan_wide


def element(wide: str) -> Any:
    """Return the type of elements: ``float32`` or ``float64``."""
    return {"float32": np.float32, "float64": np.float64}[wide]


_thread = threading.local()


@contextlib.contextmanager
def only_building() -> Iterator[None]:
    """In the body, this thread's launches compile and load kernels but queue nothing."""
    _thread.only_building = True
    try:
        yield
    finally:
        _thread.only_building = False


def building() -> bool:
    """Whether this thread is within :func:`only_building`."""
    return getattr(_thread, "only_building", False)


class Kernel:
    """A kernel whose arguments are addresses, then integers, then floats, 8 bytes each.

    It compiles on first launch. Thread-safe.
    """

    def __init__(
        self,
        function: Callable[..., None],
        addresses: int,
        integers: int,
        floats: int,
        registers: int | None,
    ) -> None:
        self.function, self.registers, self.layout = (
            function,
            registers,
            "Q" * addresses + "q" * integers + "d" * floats,
        )
        types = {"Q": "uint64", "q": "int64", "d": "float64"}
        self.signature = f"void({', '.join(types[one] for one in self.layout)})"
        self._lock = threading.Lock()
        self._launch: Callable[..., None] | None = None

    def launch(self, blocks_: int, stream: int, *arguments: int | float) -> None:
        """Queue the kernel on a stream, with ``blocks_`` blocks of THREADS threads.

        Within :func:`only_building`, only compile it.
        """
        with self._lock:
            if self._launch is None:
                self._launch = _made_of.launcher(
                    self.function, self.signature, self.layout, self.registers
                )
            if not building():
                self._launch(blocks_, stream, *arguments)

    def handle(self) -> int:
        """Return the driver's handle, for launches without Python. On a GPU only."""
        self._made, found = _made_of.compiled(self.function, self.signature, self.registers)
        return int(found)


def kernel(
    addresses: int, integers: int = 0, floats: int = 0, registers: int | None = None
) -> Callable[[Callable[..., None]], Kernel]:
    """Return a decorator that makes a kernel of a function.

    ``registers``: most registers of a thread; fewer let more threads fit on a multiprocessor.
    """
    return lambda function: Kernel(function, addresses, integers, floats, registers)


def grid(tiles: int, each: int = 8) -> int:
    """Return the number of blocks for ``tiles`` tiles: at most ``each`` per multiprocessor.

    If there are more tiles than blocks, each block works on several.
    """
    return max(1, min(tiles, each * _processors()))


@functools.cache
def _processors() -> int:
    return 1 if SIMULATED else int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


def address(memory: Any) -> int:
    """Return the address of ``memory``; 0 for None.

    ``memory``: anything with ``__cuda_array_interface__``, or an address.
    """
    if memory is None:
        return 0
    return memory if isinstance(memory, int) else int(memory.__cuda_array_interface__["data"][0])


@device
def last(tickets: Any, i: Any, room: Any) -> Any:
    """Whether all other blocks have called this before.

    The last block sees all that the others have written, and resets the ticket, an int32, to 0.
    ``room``: one int32 of shared memory.
    """
    fence()
    sync()
    if thread() == 0:
        came = atomic_add(tickets, i, np.int32(1))
        room[0] = np.int32(came == blocks() - 1)
        if came == blocks() - 1:
            tickets[i] = np.int32(0)
    sync()
    fence()
    return room[0] != 0


@device
def forget(p: Any, n: int) -> None:
    """Set n elements to zero by one block; used after an overflow, which is rare."""
    for i in range(thread(), n, THREADS):
        p[i] = 0


@kernel(addresses=1)
def _refused(status: Any) -> None:
    if thread() == 0:
        at(status, 0, np.int32)[0] = -1


def refuse(status: Any, stream: int) -> None:
    """Queue a decoder's status for invalid bytes, if the host can tell that they are invalid."""
    _refused.launch(1, stream, address(status))
