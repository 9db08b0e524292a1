"""The pretend driver as tests see it from inside a process that has it: its functions by name, and
what a real one has not.
"""

from __future__ import annotations

import ctypes
import functools

NOT_READY = 600
_LONGS = ("pretend_count", "pretend_pageable", "pretend_straddling", "pretend_alive")


class CudaError(Exception):
    """A call failed; ``code`` is CUDA's."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


class Driver:
    """libcuda.so.1 of this process.

    Streams, events and addresses are integers; 0 is the default stream. Thread-safe as the driver
    is.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name in _LONGS:
            getattr(self._library, name).restype = ctypes.c_long

    def code(self, name: str, *arguments: object) -> int:
        """What function ``name`` returns.

        Integers travel as 64 bits, so that addresses survive; C takes of them what it wants.
        """
        return int(
            getattr(self._library, name)(
                *(
                    ctypes.c_uint64(a & (1 << 64) - 1) if isinstance(a, int) else a
                    for a in arguments
                )
            )
        )

    def call(self, name: str, *arguments: object) -> None:
        """Calls it, and raises CudaError if it fails."""
        code = self.code(name, *arguments)
        if code:
            raise CudaError(name, code)

    def made(self, name: str, *arguments: object) -> int:
        """The same, for functions whose first argument is where the result goes."""
        result = ctypes.c_uint64()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def enter(self, ordinal: int = 0) -> int:
        """Makes the GPU's primary context current on this thread, and returns it."""
        self.call("cuInit", 0)
        context = self.made("cuDevicePrimaryCtxRetain", ordinal)
        self.call("cuCtxPushCurrent_v2", context)
        return context

    # ---- what a user's program does

    def stream(self) -> int:
        """A new stream, that does not wait for the default one."""
        return self.made("cuStreamCreate", 1)

    def sync(self, stream: int = 0) -> None:
        """Waits for what is queued on the stream."""
        self.call("cuStreamSynchronize", stream)

    def idle(self, stream: int = 0) -> bool:
        """Whether the stream has nothing to do."""
        return self._ready("cuStreamQuery", stream)

    def event(self) -> int:
        return self.made("cuEventCreate", 2)

    def record(self, event: int, stream: int = 0) -> None:
        self.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Lets the stream wait for the event's last record."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def come(self, event: int) -> bool:
        """Whether the event's last record is over."""
        return self._ready("cuEventQuery", event)

    def copy(self, to: int, source: int, size: int, stream: int = 0) -> None:
        self.call("cuMemcpyAsync", to, source, size, stream)

    def _ready(self, name: str, handle: int) -> bool:
        code = self.code(name, handle)
        if code not in (0, NOT_READY):
            raise CudaError(name, code)
        return code == 0

    # ---- what only tests do

    def hold(self, stream: int = 0) -> None:
        """What is queued on the stream from now on waits until ``release``."""
        self.call("pretend_hold", stream)

    def release(self, stream: int = 0) -> None:
        """Ends all holds of the stream."""
        self.call("pretend_release", stream)

    def capture(self, stream: int, on: bool = True) -> None:
        """The stream says that it is capturing, and refuses work with error 900."""
        self.call("pretend_capture", stream, int(on))

    def delay(self, microseconds: int) -> None:
        """From now on each operation of each stream takes that long, before it has any effect."""
        self._library.pretend_delay(ctypes.c_long(microseconds))

    def fail(self, name: str, code: int, skip: int = 0) -> None:
        """After ``skip`` more calls of the function (CUDA's or NCCL's, by its full name), one does
        nothing and returns ``code``; 0 takes it back.
        """
        self._library.pretend_fail(name.encode(), ctypes.c_long(skip), code)

    def count(self, name: str) -> int:
        """How often the function (CUDA's or NCCL's) was called in this process, failed calls
        too.
        """
        return int(self._library.pretend_count(name.encode()))

    def alive(self, what: str) -> int:
        """How many there are: "streams", "events", "device", "pinned", "registered" (pieces of
        memory), "contexts" (retained).
        """
        return int(self._library.pretend_alive(what.encode()))

    def pageable(self) -> int:
        """How many sides of copies were in memory that the driver does not know: real copies from
        there are slow, and hold up the caller.
        """
        return int(self._library.pretend_pageable())

    def straddling(self) -> int:
        """How many sides of copies lay in more than one allocation or registration."""
        return int(self._library.pretend_straddling())

    def device_memory(self, address: int, size: int) -> None:
        """From now on that memory is the current GPU's."""
        self._library.pretend_device_memory(ctypes.c_uint64(address), ctypes.c_size_t(size))

    def kernel(self, name: str) -> int:
        """A kernel's handle: ``pretend_divide_int32`` or ``pretend_divide_int64``."""
        return int(ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)

    def forget(self, address: int) -> None:
        """It is no longer; what is queued may still use it."""
        self.call("pretend_forget_memory", address)

    def groups(self) -> list[int]:
        """How many calls each group of NCCL calls of this process had, in their order (the first
        4096 groups).
        """
        nccl = ctypes.CDLL("libnccl.so.2")
        nccl.pretend_groups.restype = ctypes.c_long
        sizes = (ctypes.c_long * 4096)()
        n = int(nccl.pretend_groups(sizes, ctypes.c_long(len(sizes))))
        return list(sizes[:n])


@functools.cache
def driver() -> Driver:
    """The one of this process."""
    return Driver()
