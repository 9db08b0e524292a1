"""Device functions for kernels on a GPU.

device_sim.py has the same for Numba's simulator; device.py chooses. A kernel's arguments are
integers and floats only, which launch fastest; :func:`at` makes pointers of addresses. Sums and
products are rounded one by one: fused operations would give other bits than the CPU's kernels.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver
from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from bpsx.kernels.cuda.importing import load_target

load_target()

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_ALL = 0xFFFFFFFF
#: Threads of a block. A kernel's tile has this many elements, times the elements of a thread.
THREADS = 256
WARPS = THREADS // 32

#: Makes a function callable from kernels.
device = cuda.jit(device=True)


def compiled(
    function: Callable[..., None], signature: str, registers: int | None
) -> tuple[Any, Any]:
    """Return a kernel and the driver's handle of it, which is valid as long as the kernel lives."""
    (made,) = cuda.jit(signature, max_registers=registers)(function).overloads.values()
    made.bind()
    return made, made._codelibrary.get_cufunc().handle


def launcher(
    function: Callable[..., None], signature: str, layout: str, registers: int | None
) -> Callable[..., None]:
    """Compile a kernel; return a function of blocks, stream and arguments that launches it.

    The function is not thread-safe. It calls the driver itself: Numba's own launch takes the host
    five times as long. ``layout``: struct format of the arguments, 8 bytes each.
    """
    made, handle = compiled(function, signature, registers)
    arguments_ = ctypes.create_string_buffer(8 * len(layout))
    first = ctypes.addressof(arguments_)
    pointers = (ctypes.c_void_p * len(layout))(*(first + 8 * i for i in range(len(layout))))
    packed, where = struct.Struct("=" + layout), ctypes.addressof(pointers)

    def launch(
        blocks_: int, stream: int, *arguments: int | float, keep: object = (made, pointers)
    ) -> None:
        packed.pack_into(arguments_, 0, *arguments)
        (status,) = driver.cuLaunchKernel(handle, blocks_, 1, 1, THREADS, 1, 1, 0, stream, where, 0)
        if status:
            raise RuntimeError(f"a kernel cannot be launched: {status!r}")

    return launch


@intrinsic
def at(typingctx: Any, address: types.Type, offset: types.Type, element: types.Type) -> Any:
    """Return a pointer to ``element`` (``np.float32``, say), ``offset`` bytes behind ``address``.

    The address is in the device's memory.
    """
    result = types.CPointer(element.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        place = builder.add(args[0], args[1])
        memory = builder.inttoptr(place, context.get_value_type(element.dtype).as_pointer(1))
        return builder.addrspacecast(memory, context.get_value_type(result))

    return result(types.uint64, types.int64, element), codegen


def _of_width(x: types.Type) -> tuple[types.Type, ir.IntType]:
    return (types.uint32, _I32) if x.bitwidth == 32 else (types.uint64, _I64)


@intrinsic
def bits(typingctx: Any, x: types.Type) -> Any:
    """Return a float's bits as an unsigned integer of its size."""
    result, kind = _of_width(x)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], kind)

    return result(x), codegen


@intrinsic
def magnitude(typingctx: Any, x: types.Type) -> Any:
    """Return a float's bits without the sign, as a uint64.

    These integers are ordered like the magnitudes; infinity and then NaN are the largest.
    """
    _, kind = _of_width(x)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        absolute = builder.and_(
            builder.bitcast(args[0], kind), ir.Constant(kind, (1 << (kind.width - 1)) - 1)
        )
        return builder.zext(absolute, _I64) if kind.width < 64 else absolute

    return types.uint64(x), codegen


@intrinsic
def float_of(typingctx: Any, x: types.Type, like: types.Type) -> Any:
    """Return the float with these bits (uint64), in the type of ``like``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = ir.IntType(like.bitwidth)
        value = builder.trunc(args[0], kind) if like.bitwidth < 64 else args[0]
        return builder.bitcast(value, context.get_value_type(like))

    return like(types.uint64, like), codegen


@intrinsic
def signed(typingctx: Any, x: types.Type, sign: types.Type) -> Any:
    """Return the magnitude of ``x`` with the sign of ``sign``; both have the same type."""
    _, kind = _of_width(x)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        top = ir.Constant(kind, 1 << (kind.width - 1))
        size, other = (builder.bitcast(a, kind) for a in args)
        return builder.bitcast(
            builder.or_(builder.and_(size, builder.not_(top)), builder.and_(other, top)),
            args[0].type,
        )

    return x(x, x), codegen


@intrinsic
def negative(typingctx: Any, x: types.Type) -> Any:
    """Whether the sign bit is set."""
    _, kind = _of_width(x)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.icmp_signed("<", builder.bitcast(args[0], kind), ir.Constant(kind, 0))

    return types.boolean(x), codegen


def _rounded(name: str) -> Any:
    def typed(typingctx: Any, x: types.Type, y: types.Type) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            kind = context.get_value_type(x)
            function = builder.module.globals.get(full) or ir.Function(
                builder.module, ir.FunctionType(kind, [kind, kind]), full
            )
            return builder.call(function, args)

        full = f"llvm.nvvm.{name}.rn.{'f' if x.bitwidth == 32 else 'd'}"
        return x(x, x), codegen

    return intrinsic(typed)


#: x + y and x * y, of one type, each rounded and never fused.
plus, times = _rounded("add"), _rounded("mul")


@intrinsic
def narrow(typingctx: Any, x: types.Type) -> Any:
    """Return the bits of the float16 nearest to a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        convert = ir.InlineAsm(
            ir.FunctionType(_I16, [ir.FloatType()]), "cvt.rn.f16.f32 $0, $1;", "=h,f"
        )
        return builder.call(convert, args)

    return types.uint16(types.float32), codegen


@intrinsic
def widen(typingctx: Any, x: types.Type) -> Any:
    """Return the float32 value of float16 bits."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        convert = ir.InlineAsm(
            ir.FunctionType(ir.FloatType(), [_I16]), "cvt.f32.f16 $0, $1;", "=f,h"
        )
        return builder.call(convert, args)

    return types.float32(types.uint16), codegen


@intrinsic
def high(typingctx: Any, x: types.Type, y: types.Type) -> Any:
    """Return the upper 64 bits of the product of two uint64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(a, wide) for a in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


def _atomic(operation: str) -> Any:
    def typed(typingctx: Any, pointer: types.Type, i: types.Type, value: types.Type) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return builder.atomic_rmw(
                operation, builder.gep(args[0], [args[1]]), args[2], "monotonic"
            )

        return pointer.dtype(pointer, types.int64, pointer.dtype), codegen

    return intrinsic(typed)


#: (pointer, i, value): atomically add, or, or take the unsigned maximum of integers; return the old
#: value.
atomic_add, atomic_or, atomic_max = _atomic("add"), _atomic("or"), _atomic("umax")


@device
def thread() -> Any:
    """Return this thread's number in its block."""
    return np.int64(cuda.threadIdx.x)


@device
def block() -> Any:
    """Return this block's number."""
    return np.int64(cuda.blockIdx.x)


@device
def blocks() -> Any:
    """Return the number of blocks."""
    return np.int64(cuda.gridDim.x)


@device
def sync() -> None:
    """Wait for all threads of the block."""
    cuda.syncthreads()


@device
def fence() -> None:
    """Make earlier writes visible to every thread that sees later ones."""
    cuda.threadfence()


@device
def ones(x: Any) -> Any:
    """Return the number of set bits of a uint32."""
    return np.int64(cuda.popc(np.uint32(x)))


@device
def lowest(x: Any) -> Any:
    """Return the index of the lowest set bit of a uint32, which is not 0."""
    return np.int64(cuda.ffs(np.uint32(x))) - 1


@device
def leading(x: Any) -> Any:
    """Return the number of leading zeros of a uint32."""
    return np.int64(cuda.clz(np.uint32(x)))


@device
def ballot(flag: Any) -> Any:
    """Return the flags of the warp's 32 threads as bits, the first thread's lowest.

    All threads of the block must call it.
    """
    return np.uint32(cuda.ballot_sync(_ALL, flag))


@device
def transposed(word: Any) -> Any:
    """Transpose the warp's 32 x 32 bits: bit i of thread j's word becomes bit j of thread i's."""
    lane, step, low = cuda.threadIdx.x & 31, 16, np.uint32(0xFFFF)
    while step > 0:  # swap two of four squares of bits, then go on in each
        other = np.uint32(cuda.shfl_xor_sync(_ALL, np.int32(word), step))
        if lane & step:
            word = np.uint32(
                np.uint32(word & np.uint32(~low))
                | np.uint32(np.uint32(other >> np.uint32(step)) & low)
            )
        else:
            word = np.uint32(
                np.uint32(word & low)
                | np.uint32(np.uint32(other << np.uint32(step)) & np.uint32(~low))
            )
        step >>= 1
        low = np.uint32(low ^ np.uint32(low << np.uint32(step)))
    return word


@device
def sync_warp() -> None:
    """Wait for all threads of the warp and make their writes visible to each other."""
    cuda.syncwarp(_ALL)


@device
def shared_add(array: Any, i: Any, value: Any) -> Any:
    """Atomically add ``value`` to array[i] in shared memory; return the old value."""
    return cuda.atomic.add(array, i, value)


@device
def shared_or(array: Any, i: Any, value: Any) -> Any:
    """Atomically or ``value`` into array[i] in shared memory; return the old value."""
    return cuda.atomic.or_(array, i, value)


@device
def total(value: Any, room: Any) -> Any:
    """Return the sum of all threads' float64, always added in the same order.

    ``room``: WARPS float64 of shared memory.
    """
    step = 16
    while step > 0:
        value += cuda.shfl_down_sync(_ALL, value, step)
        step >>= 1
    cuda.syncthreads()
    if cuda.threadIdx.x % 32 == 0:
        room[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    found = 0.0
    for warp in range(WARPS):
        found += room[warp]
    return found


@device
def largest(value: Any, room: Any) -> Any:
    """Return the largest of all threads' uint64, each less than 1 << 63.

    ``room``: WARPS uint64 of shared memory.
    """
    top, step = np.int64(value), 16
    while step > 0:
        top = max(top, cuda.shfl_down_sync(_ALL, top, step))
        step >>= 1
    cuda.syncthreads()
    if cuda.threadIdx.x % 32 == 0:
        room[cuda.threadIdx.x // 32] = np.uint64(top)
    cuda.syncthreads()
    found = np.uint64(0)
    for warp in range(WARPS):
        found = max(found, room[warp])
    return found


@device
def fold(value: Any) -> Any:
    """Return to the warp's first thread the sum of the warp's floats.

    The upper half is added to the lower one, and so on; each addition is rounded.
    """
    step = 16
    while step > 0:
        value = plus(value, cuda.shfl_down_sync(_ALL, value, step))
        step >>= 1
    return value


@device
def lane_of(value: Any, lane: Any) -> Any:
    """Return the value of a thread of the warp. All its threads must call it."""
    return cuda.shfl_sync(_ALL, value, lane)


@device
def scan_warp(value: Any) -> Any:
    """Return the int32 sums of the warp's threads before this one, and of the whole warp."""
    sum_, step = np.int32(value), 1
    while step < 32:
        other = cuda.shfl_up_sync(_ALL, sum_, step)
        if (cuda.threadIdx.x & 31) >= step:
            sum_ = np.int32(sum_ + other)
        step <<= 1
    return np.int64(sum_) - np.int64(value), np.int64(cuda.shfl_sync(_ALL, sum_, 31))


@device
def scan(value: Any, room: Any) -> Any:
    """Return the int32 sums of the threads before this one, and of all threads.

    ``room``: WARPS int32 of shared memory.
    """
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    sum_ = np.int32(value)
    step = 1
    while step < 32:
        other = cuda.shfl_up_sync(_ALL, sum_, step)
        if lane >= step:
            sum_ = np.int32(sum_ + other)
        step <<= 1
    cuda.syncthreads()
    if lane == 31:
        room[warp] = sum_
    cuda.syncthreads()
    before, all_ = np.int64(0), np.int64(0)
    for w in range(WARPS):
        before += np.int64(room[w]) if w < warp else np.int64(0)
        all_ += np.int64(room[w])
    return before + np.int64(sum_) - np.int64(value), all_


@device
def scan_wide(value: Any, room: Any) -> Any:
    """Return the uint64 sums of the threads before this one, and of all threads.

    The total must be less than 1 << 63. ``room``: WARPS uint64 of shared memory.
    """
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    sum_, step = np.int64(value), 1
    while step < 32:
        other = cuda.shfl_up_sync(_ALL, sum_, step)
        if lane >= step:
            sum_ += other
        step <<= 1
    cuda.syncthreads()
    if lane == 31:
        room[warp] = np.uint64(sum_)
    cuda.syncthreads()
    before, all_ = np.uint64(0), np.uint64(0)
    for w in range(WARPS):
        before += room[w] if w < warp else np.uint64(0)
        all_ += room[w]
    return before + np.uint64(sum_) - np.uint64(value), all_
