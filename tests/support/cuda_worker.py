"""A process that runs the CUDA kernels for tests: on a GPU, or on Numba's simulator if
NUMBA_ENABLE_CUDASIM=1 was set for it.

Numba reads that variable when it is imported, and the simulator changes the CPU's kernels as well.
So the simulator needs a separate process. It reads pickled calls from standard input, ``(number of
the coder or None, method, arguments)``, and writes their results or exceptions to standard output.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
import warnings

import numpy as np

from bpsx.kernels.codecs import N_OPTIONS, N_STATE, SLACK, codec, device_codec
from bpsx.kernels.cuda.device import SIMULATED

GUARD = 64
PATTERN = 0xA5


_lock = threading.Lock()


def _shared(self: object, shape: int, dtype: object) -> np.ndarray:
    """Replacement for the simulator's shared.array, which gives two threads that call it at the
    same time two arrays instead of one.
    """
    frame = sys._getframe(1)
    with _lock:
        return self._allocations.setdefault((frame.f_code, frame.f_lineno), np.empty(shape, dtype))  # type: ignore[attr-defined]


class Barrier:
    """Where the threads of a simulated block wait for each other.

    The simulator's own is a thread that polls them, which takes most of the time.
    """

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._running, self._waiting, self._turn = threads, 0, 0
        self._failed = False

    def wait(self) -> None:
        """Wait for all threads that still run. Raises if one of them has failed."""
        with self._changed:
            turn = self._turn
            self._waiting += 1
            self._release()
            while self._turn == turn:
                self._changed.wait()
            if self._failed:
                raise RuntimeError("another thread of the block has failed")

    def leave(self, failed: bool) -> None:
        """Tell that the calling thread ends."""
        with self._changed:
            self._running -= 1
            self._failed |= failed
            self._release()

    def _release(self) -> None:
        if self._waiting == self._running or self._failed:
            self._waiting, self._turn = 0, self._turn + 1
            self._changed.notify_all()


def _without_polling() -> None:
    """Make the simulator's blocks wait at a :class:`Barrier`."""
    from numba.cuda.simulator.kernel import BlockManager, BlockThread

    run_thread = BlockThread.run

    def run(self: object, block: tuple[int, ...], *arguments: object) -> None:
        points = list(np.ndindex(*self._block_dim))  # type: ignore[attr-defined]
        self.barrier = Barrier(len(points))  # type: ignore[attr-defined]
        threads = [
            BlockThread(lambda: self._f(*arguments), self, block, point, self._debug)  # type: ignore[attr-defined]
            for point in points
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # the first of them, not one that has only heard of it
        failures = [thread.exception for thread in threads if thread.exception]
        failures.sort(key=lambda failure: isinstance(failure[0], RuntimeError))
        for error, trace in failures[:1]:
            raise error.with_traceback(trace)

    def run_and_leave(self: object) -> None:
        run_thread(self)
        self._manager.barrier.leave(self.exception is not None)  # type: ignore[attr-defined]

    BlockManager.run, BlockThread.run = run, run_and_leave
    BlockThread.syncthreads = lambda self: self._manager.barrier.wait()


class Memory:
    """Bytes on the device, filled with and surrounded by a pattern."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._host = np.full(size + 2 * GUARD, PATTERN, np.uint8)
        if SIMULATED:
            raw = np.full(size + 2 * GUARD + 64, PATTERN, np.uint8)
            self._whole = raw[-raw.ctypes.data % 64 :][: size + 2 * GUARD]
            self.address = self._whole.ctypes.data + GUARD
        else:
            from numba import cuda

            self._whole = cuda.to_device(self._host)
            self.address = self._whole.__cuda_array_interface__["data"][0] + GUARD
            assert self.address % 64 == 0

    def put(self, content: bytes) -> None:
        """Copy ``content`` to the beginning; the rest keeps the pattern."""
        self._host[:] = PATTERN
        self._host[GUARD : GUARD + len(content)] = np.frombuffer(content, np.uint8)
        if SIMULATED:
            self._whole[:] = self._host
        else:
            self._whole.copy_to_device(self._host)

    def get(self) -> bytes:
        """Return all bytes; assert that nothing around them was written."""
        whole = self._whole.copy() if SIMULATED else self._whole.copy_to_host()
        assert (whole[:GUARD] == PATTERN).all() and (whole[-GUARD:] == PATTERN).all(), (
            "written outside"
        )
        return whole[GUARD:-GUARD].tobytes()


class Coder:
    """Like ``codec_tools.Coder``, with arrays on the device."""

    def __init__(
        self, name: str, options: dict, n: int, wide: str, residual: bool, momentum: bool, seed: int
    ) -> None:
        numbers = codec(name).numbers(codec(name).options(options))
        self.options = [*numbers, *[0] * (N_OPTIONS - 1 - len(numbers)), seed]
        self.codec, self.n, self.wide, self.counter = device_codec(name), n, wide, 0
        self.capacity = codec(name).capacity(n, numbers)
        width = np.dtype(wide).itemsize
        self.g, self.out = Memory(n * width), Memory(n * width)
        self.e, self.m = (Memory(n * width) if used else None for used in (residual, momentum))
        for kept in (self.e, self.m):
            if kept:
                kept.put(bytes(n * width))
        self.wire, self.written, self.state, self.status = (
            Memory(self.capacity + SLACK),
            Memory(8),
            Memory(8 * N_STATE),
            Memory(4),
        )
        self.scratch = Memory(self.codec.scratch(n, self.options))
        self.state.put(bytes(8 * N_STATE))
        self.stream = 0
        if not SIMULATED:
            from numba import cuda

            self._stream = cuda.stream()
            self.stream = int(self._stream)

    def _done(self) -> None:
        if not SIMULATED:
            self._stream.synchronize()

    def encode(
        self, g: np.ndarray, factor: float, mu: float, state: bytes | None = None
    ) -> tuple[bytes, np.ndarray, np.ndarray, np.ndarray]:
        """Encode ``g``; return the wire, the residual, the momentum and the state."""
        self.counter += 1
        self.g.put(g.tobytes())
        for memory in (self.wire, self.written, self.scratch):
            memory.put(b"")
        e, m = (kept.address if kept else None for kept in (self.e, self.m))
        self.codec.encode(
            self.wide,
            self.g.address,
            e,
            m,
            self.wire.address,
            self.written.address,
            self.scratch.address,
            self.state.address,
            self.options,
            self.n,
            self.counter,
            factor,
            mu,
            self.stream,
        )
        self._done()
        size = self.codec.size(self.wide, self.n, self.options)
        if size is None:
            size = int(np.frombuffer(self.written.get(), np.int64)[0])
        assert 0 <= size <= self.capacity
        assert self.g.get() == g.tobytes(), "the gradient was written to"
        self.scratch.get()
        kept = [
            np.frombuffer(k.get(), self.wide) if k else np.zeros(0, self.wide)
            for k in (self.e, self.m)
        ]
        return self.wire.get()[:size], kept[0], kept[1], np.frombuffer(self.state.get(), np.float64)

    def decode(self, wire: bytes, add_to: np.ndarray | None = None) -> np.ndarray | None:
        """Decode ``wire``, added to ``add_to`` if given; None if the codec refuses it."""
        room = Memory(len(wire) + SLACK)
        room.put(wire)
        self.out.put(b"" if add_to is None else add_to.tobytes())
        self.scratch.put(b"")
        self.status.put(bytes(4))
        self.codec.decode(
            self.wide,
            room.address,
            len(wire),
            self.out.address,
            self.scratch.address,
            self.status.address,
            self.options,
            self.n,
            add_to is not None,
            self.stream,
        )
        self._done()
        self.scratch.get()
        assert room.get()[: len(wire)] == wire, "the wire was written to"
        status, out = (
            int(np.frombuffer(self.status.get(), np.int32)[0]),
            np.frombuffer(self.out.get(), self.wide),
        )
        assert status in (0, -1)
        return None if status else out


def launched(
    module: str,
    path: str,
    kind: tuple[object, ...],
    blocks: int,
    given: list[np.ndarray | int],
    numbers: list[int | float],
) -> list[np.ndarray]:
    """Run a kernel of ``bpsx.kernels.cuda`` and return the arrays after it.

    The arrays' addresses are the kernel's arguments; an integer stands for the array with that
    index. ``path``: the function that makes the kernel and, if it makes several, the name of one,
    as in ``conversion.widen``. ``kind``: the function's arguments.
    """
    make, *which = path.split(".")
    kernel = getattr(importlib.import_module(f"bpsx.kernels.cuda.{module}"), make)(*kind)
    for one in which:
        kernel = getattr(kernel, one)
    memories: list[Memory] = []
    for array in given:
        memories.append(memories[array] if isinstance(array, int) else Memory(array.nbytes))
        if not isinstance(array, int):
            memories[-1].put(array.tobytes())
    kernel.launch(blocks, 0, *(memory.address for memory in memories), *numbers)
    if not SIMULATED:
        from numba import cuda

        cuda.synchronize()
    return [
        np.frombuffer(memory.get(), array.dtype)
        for memory, array in zip(memories, given)
        if not isinstance(array, int)
    ]


def main() -> None:
    """Handle calls until standard input ends."""
    warnings.simplefilter("ignore")  # of integers that wrap, and of infinities
    if SIMULATED:
        from numba.cuda.simulator import kernelapi

        kernelapi.FakeCUDAShared.array = _shared
        _without_polling()
    sys.setswitchinterval(2e-4)  # the simulator's threads shall change places often
    coders: list[Coder] = []
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            number, method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if method == "import":
                sys.path.insert(0, arguments[0])
                importlib.import_module(arguments[1])
                answer: object = None
            elif method == "launch":
                answer = launched(*arguments)
            elif number is None:
                coders.append(Coder(*arguments))
                answer = len(coders) - 1
            elif method == "close":
                answer, coders[number] = None, None  # type: ignore[call-overload]
            else:
                answer = getattr(coders[number], method)(*arguments)
        except BaseException as e:
            import traceback

            answer = AssertionError(f"{e!r}\n{traceback.format_exc()}")
        answers.write(pickle.dumps(answer))
        answers.flush()


if __name__ == "__main__":
    main()
