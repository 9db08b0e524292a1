"""What kernels are written with, on a GPU. device_sim.py has the same for Numba's simulator;
device.py chooses.

Memory is addresses: a kernel's arguments are integers and floats alone, which launches fastest, and
makes pointers of them by :func:`at`. Sums and products are rounded one by one: a compiler that
fuses them would get other bits than the CPU's kernels.
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
#: Threads of a block. Kernels work on tiles of so many elements, times what one thread takes.
THREADS = 256
WARPS = THREADS // 32

#: Makes a function one that kernels may call.
device = cuda.jit(device=True)


def compiled(
    function: Callable[..., None], signature: str, registers: int | None
) -> tuple[Any, Any]:
    """A kernel, and the driver's handle of it, which is good as long as the kernel."""
    (made,) = cuda.jit(signature, max_registers=registers)(function).overloads.values()
    made.bind()
    return made, made._codelibrary.get_cufunc().handle


def launcher(
    function: Callable[..., None], signature: str, layout: str, registers: int | None
) -> Callable[..., None]:
    """Compile a kernel; a function of blocks, stream and arguments that launches it.

    One thread at a time may call it.

    It calls the driver itself: Numba's own way takes the host five times as long. ``layout``: of
    the arguments, for struct, 8 bytes each.
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
    """A pointer to what lies ``offset`` bytes behind ``address`` in the device's memory, of type
    ``element`` (``np.float32``, say).
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
    """A float's bits, as an unsigned integer of its size."""
    result, kind = _of_width(x)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], kind)

    return result(x), codegen


@intrinsic
def magnitude(typingctx: Any, x: types.Type) -> Any:
    """A float's bits without the sign, as a uint64.

    They are ordered as magnitudes are; infinity and then NaN are the largest.
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
    """The float of the type of ``like`` that has these bits (uint64)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = ir.IntType(like.bitwidth)
        value = builder.trunc(args[0], kind) if like.bitwidth < 64 else args[0]
        return builder.bitcast(value, context.get_value_type(like))

    return like(types.uint64, like), codegen


@intrinsic
def signed(typingctx: Any, x: types.Type, sign: types.Type) -> Any:
    """The magnitude of ``x`` with the sign of ``sign``, of one type."""
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


#: x + y and x * y of one type, rounded each, never fused.
plus, times = _rounded("add"), _rounded("mul")


@intrinsic
def narrow(typingctx: Any, x: types.Type) -> Any:
    """The bits of the float16 that is nearest to a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        convert = ir.InlineAsm(
            ir.FunctionType(_I16, [ir.FloatType()]), "cvt.rn.f16.f32 $0, $1;", "=h,f"
        )
        return builder.call(convert, args)

    return types.uint16(types.float32), codegen


@intrinsic
def widen(typingctx: Any, x: types.Type) -> Any:
    """The float32 that a float16 with these bits is."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        convert = ir.InlineAsm(
            ir.FunctionType(ir.FloatType(), [_I16]), "cvt.f32.f16 $0, $1;", "=f,h"
        )
        return builder.call(convert, args)

    return types.float32(types.uint16), codegen


@intrinsic
def high(typingctx: Any, x: types.Type, y: types.Type) -> Any:
    """The upper half of the 128 bits of a product of two uint64."""

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


#: pointer[i] += value, |= and = the larger, at once; what was there. Of integers.
atomic_add, atomic_or, atomic_max = _atomic("add"), _atomic("or"), _atomic("umax")


@device
def thread() -> Any:
    """This thread's number in its block."""
    return np.int64(cuda.threadIdx.x)


@device
def block() -> Any:
    """This block's number."""
    return np.int64(cuda.blockIdx.x)


@device
def blocks() -> Any:
    """How many there are."""
    return np.int64(cuda.gridDim.x)


@device
def sync() -> None:
    """All threads of the block come here before one goes on."""
    cuda.syncthreads()


@device
def fence() -> None:
    """What was written before is seen by whoever sees what is written after."""
    cuda.threadfence()


@device
def ones(x: Any) -> Any:
    """How many bits of a uint32 are set."""
    return np.int64(cuda.popc(np.uint32(x)))


@device
def lowest(x: Any) -> Any:
    """The index of the lowest bit of a uint32 that is set; one is."""
    return np.int64(cuda.ffs(np.uint32(x))) - 1


@device
def leading(x: Any) -> Any:
    """How many zeros a uint32 begins with, at the upper end."""
    return np.int64(cuda.clz(np.uint32(x)))


@device
def ballot(flag: Any) -> Any:
    """The flags of the warp's 32 threads as bits, the first thread's lowest.

    All threads of the block take part.
    """
    return np.uint32(cuda.ballot_sync(_ALL, flag))


@device
def transposed(word: Any) -> Any:
    """Bit i of what the warp's j-th thread gives, a uint32, is bit j of what its i-th thread
    gets.
    """
    lane, step, low = cuda.threadIdx.x & 31, 16, np.uint32(0xFFFF)
    while step > 0:  # of four squares of bits two change places, and so on in each
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
    """All threads of the warp come here before one goes on, and see what the others have
    written.
    """
    cuda.syncwarp(_ALL)


@device
def shared_add(array: Any, i: Any, value: Any) -> Any:
    """array[i] += value, at once, in the block's memory; what was there."""
    return cuda.atomic.add(array, i, value)


@device
def shared_or(array: Any, i: Any, value: Any) -> Any:
    """array[i] |= value, likewise."""
    return cuda.atomic.or_(array, i, value)


@device
def total(value: Any, room: Any) -> Any:
    """The sum of all threads' float64, added up in the same order always.

    ``room``: WARPS float64 of the block's memory.
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
    """The largest of all threads' uint64, less than 1 << 63 each.

    ``room``: WARPS uint64 of the block's memory.
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
def scan_warp(value: Any) -> Any:
    """The sum of the int32 of the warp's threads before this one, and that of all of them."""
    sum_, step = np.int32(value), 1
    while step < 32:
        other = cuda.shfl_up_sync(_ALL, sum_, step)
        if (cuda.threadIdx.x & 31) >= step:
            sum_ = np.int32(sum_ + other)
        step <<= 1
    return np.int64(sum_) - np.int64(value), np.int64(cuda.shfl_sync(_ALL, sum_, 31))


@device
def scan(value: Any, room: Any) -> Any:
    """The sum of the int32 of all threads before this one, and that of all.

    ``room``: WARPS int32 of the block's memory.
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
    """The same of uint64, less than 1 << 63 in all. ``room``: WARPS uint64."""
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
