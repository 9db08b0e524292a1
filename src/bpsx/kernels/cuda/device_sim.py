"""What kernels are written with, on Numba's simulator, where threads of a block are threads of
Python: the functions of device_gpu.py, for tests.

There ``cuda`` means something in the kernel's own module alone, so none of this uses it. A warp is
all threads of a block.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

#: As few as make a warp: each takes its time to start.
THREADS = 32
WARPS = 1
_ENDLESS = 1 << 40
_lock = threading.Lock()
_flags = np.zeros(THREADS, np.uint8)
_values: list[Any] = [0] * THREADS


def device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function one that kernels may call."""
    return function


def launcher(
    function: Callable[..., None], signature: str, layout: str, registers: int | None
) -> Callable[..., None]:
    """A function of blocks, stream and arguments that runs a kernel."""
    made = cuda.jit(signature)(function)

    def launch(blocks_: int, stream: int, *arguments: int | float) -> None:
        made[blocks_, THREADS](*arguments)

    return launch


def at(address: Any, offset: Any, element: Any) -> Any:
    """An array whose end nobody knows, as a pointer's. None at all at 0, where nothing is."""
    if not address:
        return None
    memory = (ctypes.c_uint8 * (_ENDLESS * np.dtype(element).itemsize)).from_address(
        int(address) + int(offset)
    )
    return np.frombuffer(memory, element)


def bits(x: Any) -> Any:
    """A float's bits, as an unsigned integer of its size."""
    return x.view(f"u{x.itemsize}")


def magnitude(x: Any) -> Any:
    """A float's bits without the sign, as a uint64."""
    return np.uint64(int(bits(x)) & ((1 << (8 * x.itemsize - 1)) - 1))


def float_of(x: Any, like: Any) -> Any:
    """The float of the type of ``like`` that has these bits."""
    return np.array([x], np.uint64).astype(f"u{like.itemsize}").view(like.dtype)[0]


def signed(x: Any, sign: Any) -> Any:
    """The magnitude of ``x`` with the sign of ``sign``, of one type."""
    assert x.dtype == sign.dtype
    return np.copysign(x, sign)


def negative(x: Any) -> bool:
    """Whether the sign bit is set."""
    return bool(np.signbit(x))


def plus(x: Any, y: Any) -> Any:
    """x + y of one type."""
    assert x.dtype == y.dtype
    return x + y


def times(x: Any, y: Any) -> Any:
    """x * y of one type."""
    assert x.dtype == y.dtype
    return x * y


def narrow(x: Any) -> Any:
    """The bits of the float16 that is nearest to a float32."""
    assert x.dtype == np.float32
    return np.float16(x).view(np.uint16)


def widen(x: Any) -> Any:
    """The float32 that a float16 with these bits is."""
    return np.float32(np.uint16(x).view(np.float16))


def high(x: Any, y: Any) -> Any:
    """The upper half of the 128 bits of a product of two uint64."""
    return np.uint64(int(x) * int(y) >> 64)


def atomic_add(pointer: Any, i: Any, value: Any) -> Any:
    """pointer[i] += value, at once; what was there."""
    with _lock:
        before = pointer[i]
        pointer[i] = before + pointer.dtype.type(value)
        return before


def atomic_or(pointer: Any, i: Any, value: Any) -> Any:
    """pointer[i] |= value, likewise."""
    with _lock:
        before = pointer[i]
        pointer[i] = before | pointer.dtype.type(value)
        return before


def atomic_max(pointer: Any, i: Any, value: Any) -> Any:
    """pointer[i] = the larger, likewise."""
    with _lock:
        before = pointer[i]
        pointer[i] = max(before, pointer.dtype.type(value))
        return before


shared_add, shared_or = atomic_add, atomic_or


def thread() -> int:
    """This thread's number in its block."""
    return int(threading.current_thread().threadIdx.x)  # type: ignore[attr-defined]


def block() -> int:
    """This block's number."""
    return int(threading.current_thread().blockIdx.x)  # type: ignore[attr-defined]


def blocks() -> int:
    """How many there are."""
    return int(threading.current_thread()._manager._grid_dim[0])  # type: ignore[attr-defined]


def sync() -> None:
    """All threads of the block come here before one goes on."""
    threading.current_thread().syncthreads()  # type: ignore[attr-defined]


def fence() -> None:
    """Nothing: blocks come one after the other."""


def ones(x: Any) -> int:
    """How many bits of a uint32 are set."""
    return int(x).bit_count()


def lowest(x: Any) -> int:
    """The index of the lowest bit of a uint32 that is set; one is."""
    return (int(x) & -int(x)).bit_length() - 1


def leading(x: Any) -> int:
    """How many zeros a uint32 begins with, at the upper end."""
    return 32 - int(x).bit_length()


def ballot(flag: Any) -> Any:
    """The flags of the warp's 32 threads as bits, the first thread's lowest."""
    _flags[thread()] = bool(flag)
    sync()
    word = np.packbits(_flags, bitorder="little").view(np.uint32)[0]
    sync()
    return word


def transposed(word: Any) -> Any:
    """Bit i of what the warp's j-th thread gives, a uint32, is bit j of what its i-th thread
    gets.
    """
    found, i = np.array(_all(int(word)), np.int64), thread()
    return np.packbits((found >> i & 1).astype(bool), bitorder="little").view(np.uint32)[0]


def sync_warp() -> None:
    """All threads of the warp come here before one goes on."""
    sync()


def total(value: Any, room: Any) -> Any:
    """The sum of all threads' float64."""
    return np.float64(sum(_all(value)))


def largest(value: Any, room: Any) -> Any:
    """The largest of all threads' uint64."""
    return max(_all(value))


def scan(value: Any, room: Any) -> tuple[int, int]:
    """The sum of the int32 of all threads before this one, and that of all."""
    found = _all(int(value))
    return sum(found[: thread()]), sum(found)


def scan_wide(value: Any, room: Any) -> tuple[Any, Any]:
    """The same of uint64."""
    found = [int(one) for one in _all(value)]
    return np.uint64(sum(found[: thread()])), np.uint64(sum(found))


def scan_warp(value: Any) -> tuple[int, int]:
    """The sum of the int32 of the warp's threads before this one, and that of all of them."""
    return scan(value, None)


def _all(value: Any) -> list[Any]:
    _values[thread()] = value
    sync()
    found = list(_values)
    sync()
    return found
