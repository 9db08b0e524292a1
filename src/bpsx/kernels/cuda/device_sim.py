"""Device functions for kernels on Numba's simulator, for tests: the functions of device_gpu.py.

Threads of a block are Python threads. The simulator defines ``cuda`` in the kernel's own module
only, so no function that kernels call uses it here. A warp is all threads of a block.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

#: Threads of a block: a single warp, since each Python thread takes time to start.
THREADS = 32
WARPS = 1
_ENDLESS = 1 << 40
_lock = threading.Lock()
_flags = np.zeros(THREADS, np.uint8)
_values: list[Any] = [0] * THREADS


def device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which kernels may call."""
    return function


def launcher(
    function: Callable[..., None], signature: str, layout: str, registers: int | None
) -> Callable[..., None]:
    """Return a function of blocks, stream and arguments that runs a kernel."""
    made = cuda.jit(signature)(function)

    def launch(blocks_: int, stream: int, *arguments: int | float) -> None:
        made[blocks_, THREADS](*arguments)

    return launch


def at(address: Any, offset: Any, element: Any) -> Any:
    """Return an array without bounds, like a pointer; None for address 0."""
    if not address:
        return None
    memory = (ctypes.c_uint8 * (_ENDLESS * np.dtype(element).itemsize)).from_address(
        int(address) + int(offset)
    )
    return np.frombuffer(memory, element)


def bits(x: Any) -> Any:
    """Return a float's bits as an unsigned integer of its size."""
    return x.view(f"u{x.itemsize}")


def magnitude(x: Any) -> Any:
    """Return a float's bits without the sign, as a uint64."""
    return np.uint64(int(bits(x)) & ((1 << (8 * x.itemsize - 1)) - 1))


def float_of(x: Any, like: Any) -> Any:
    """Return the float with these bits, in the type of ``like``."""
    return np.array([x], np.uint64).astype(f"u{like.itemsize}").view(like.dtype)[0]


def signed(x: Any, sign: Any) -> Any:
    """Return the magnitude of ``x`` with the sign of ``sign``; both have the same type."""
    assert x.dtype == sign.dtype
    return np.copysign(x, sign)


def negative(x: Any) -> bool:
    """Whether the sign bit is set."""
    return bool(np.signbit(x))


def plus(x: Any, y: Any) -> Any:
    """Return x + y; both have the same type."""
    assert x.dtype == y.dtype
    return x + y


def times(x: Any, y: Any) -> Any:
    """Return x * y; both have the same type."""
    assert x.dtype == y.dtype
    return x * y


def narrow(x: Any) -> Any:
    """Return the bits of the float16 nearest to a float32."""
    assert x.dtype == np.float32
    return np.float16(x).view(np.uint16)


def widen(x: Any) -> Any:
    """Return the float32 value of float16 bits."""
    return np.float32(np.uint16(x).view(np.float16))


def high(x: Any, y: Any) -> Any:
    """Return the upper 64 bits of the product of two uint64."""
    return np.uint64(int(x) * int(y) >> 64)


def atomic_add(pointer: Any, i: Any, value: Any) -> Any:
    """Atomically add ``value`` to pointer[i]; return the old value."""
    with _lock:
        before = pointer[i]
        pointer[i] = before + pointer.dtype.type(value)
        return before


def atomic_or(pointer: Any, i: Any, value: Any) -> Any:
    """Atomically or ``value`` into pointer[i]; return the old value."""
    with _lock:
        before = pointer[i]
        pointer[i] = before | pointer.dtype.type(value)
        return before


def atomic_max(pointer: Any, i: Any, value: Any) -> Any:
    """Atomically set pointer[i] to the larger of it and ``value``; return the old value."""
    with _lock:
        before = pointer[i]
        pointer[i] = max(before, pointer.dtype.type(value))
        return before


shared_add, shared_or = atomic_add, atomic_or


def thread() -> int:
    """Return this thread's number in its block."""
    return int(threading.current_thread().threadIdx.x)  # type: ignore[attr-defined]


def block() -> int:
    """Return this block's number."""
    return int(threading.current_thread().blockIdx.x)  # type: ignore[attr-defined]


def blocks() -> int:
    """Return the number of blocks."""
    return int(threading.current_thread()._manager._grid_dim[0])  # type: ignore[attr-defined]


def sync() -> None:
    """Wait for all threads of the block."""
    threading.current_thread().syncthreads()  # type: ignore[attr-defined]


def fence() -> None:
    """Do nothing: blocks run one after the other."""


def ones(x: Any) -> int:
    """Return the number of set bits of a uint32."""
    return int(x).bit_count()


def lowest(x: Any) -> int:
    """Return the index of the lowest set bit of a uint32, which is not 0."""
    return (int(x) & -int(x)).bit_length() - 1


def leading(x: Any) -> int:
    """Return the number of leading zeros of a uint32."""
    return 32 - int(x).bit_length()


def ballot(flag: Any) -> Any:
    """Return the flags of the warp's 32 threads as bits, the first thread's lowest."""
    _flags[thread()] = bool(flag)
    sync()
    word = np.packbits(_flags, bitorder="little").view(np.uint32)[0]
    sync()
    return word


def transposed(word: Any) -> Any:
    """Transpose the warp's 32 x 32 bits: bit i of thread j's word becomes bit j of thread i's."""
    found, i = np.array(_all(int(word)), np.int64), thread()
    return np.packbits((found >> i & 1).astype(bool), bitorder="little").view(np.uint32)[0]


def sync_warp() -> None:
    """Wait for all threads of the warp."""
    sync()


def total(value: Any, room: Any) -> Any:
    """Return the sum of all threads' float64."""
    return np.float64(sum(_all(value)))


def largest(value: Any, room: Any) -> Any:
    """Return the largest of all threads' uint64."""
    return max(_all(value))


def scan(value: Any, room: Any) -> tuple[int, int]:
    """Return the int32 sums of the threads before this one, and of all threads."""
    found = _all(int(value))
    return sum(found[: thread()]), sum(found)


def scan_wide(value: Any, room: Any) -> tuple[Any, Any]:
    """Return the uint64 sums of the threads before this one, and of all threads."""
    found = [int(one) for one in _all(value)]
    return np.uint64(sum(found[: thread()])), np.uint64(sum(found))


def scan_warp(value: Any) -> tuple[int, int]:
    """Return the int32 sums of the warp's threads before this one, and of the whole warp."""
    return scan(value, None)


def fold(value: Any) -> Any:
    """Return the sum of the warp's floats: the upper half is added to the lower one, and so on."""
    found = _all(value)
    while len(found) > 1:
        half = len(found) // 2
        found = [x + y for x, y in zip(found[:half], found[half:], strict=True)]
    return found[0]


def lane_of(value: Any, lane: int) -> Any:
    """Return the value of a thread of the warp. All its threads must call it."""
    return _all(value)[lane]


def _all(value: Any) -> list[Any]:
    _values[thread()] = value
    sync()
    found = list(_values)
    sync()
    return found
