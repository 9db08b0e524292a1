"""The pretend driver from inside a process that has loaded it: functions by name, and controls that
a real driver does not have.
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

    Streams, events and addresses are integers; 0 is the default stream. As thread-safe as the
    driver.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name in _LONGS:
            getattr(self._library, name).restype = ctypes.c_long

    def code(self, name: str, *arguments: object) -> int:
        """Call function ``name`` and return its result.

        Integers are passed as 64 bits, so that addresses are not cut; C uses as many bits as it
        needs.
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
        """Call the function; raise CudaError if it fails."""
        code = self.code(name, *arguments)
        if code:
            raise CudaError(name, code)

    def made(self, name: str, *arguments: object) -> int:
        """Call a function whose first argument points to the result, and return the result."""
        result = ctypes.c_uint64()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def enter(self, ordinal: int = 0) -> int:
        """Make the GPU's primary context current on this thread, and return it."""
        self.call("cuInit", 0)
        context = self.made("cuDevicePrimaryCtxRetain", ordinal)
        self.call("cuCtxPushCurrent_v2", context)
        return context

    # ---- functions that users' programs also call

    def stream(self) -> int:
        """Return a new stream that does not wait for the default one."""
        return self.made("cuStreamCreate", 1)

    def sync(self, stream: int = 0) -> None:
        """Wait for the operations queued on the stream."""
        self.call("cuStreamSynchronize", stream)

    def idle(self, stream: int = 0) -> bool:
        """Return whether the stream has nothing to do."""
        return self._ready("cuStreamQuery", stream)

    def event(self) -> int:
        return self.made("cuEventCreate", 2)

    def record(self, event: int, stream: int = 0) -> None:
        self.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the event's last record."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def come(self, event: int) -> bool:
        """Return whether the event's last record has completed."""
        return self._ready("cuEventQuery", event)

    def copy(self, to: int, source: int, size: int, stream: int = 0) -> None:
        self.call("cuMemcpyAsync", to, source, size, stream)

    def _ready(self, name: str, handle: int) -> bool:
        code = self.code(name, handle)
        if code not in (0, NOT_READY):
            raise CudaError(name, code)
        return code == 0

    # ---- controls for tests

    def hold(self, stream: int = 0) -> None:
        """Make later operations on the stream wait until ``release``."""
        self.call("pretend_hold", stream)

    def release(self, stream: int = 0) -> None:
        """End all holds of the stream."""
        self.call("pretend_release", stream)

    def capture(self, stream: int, on: bool = True) -> None:
        """Let the stream claim that it is capturing, and refuse work with error 900."""
        self.call("pretend_capture", stream, int(on))

    def delay(self, microseconds: int) -> None:
        """Delay each later operation of each stream by ``microseconds`` before its effect."""
        self._library.pretend_delay(ctypes.c_long(microseconds))

    def fail(self, name: str, code: int, skip: int = 0) -> None:
        """Make one call of the function, after ``skip`` more of them, do nothing and return
        ``code``.

        ``name``: full name of a function of CUDA or NCCL. ``code`` 0 cancels the failure.
        """
        self._library.pretend_fail(name.encode(), ctypes.c_long(skip), code)

    def count(self, name: str) -> int:
        """Return the number of calls of the function (CUDA's or NCCL's) in this process, including
        failed ones.
        """
        return int(self._library.pretend_count(name.encode()))

    def alive(self, what: str) -> int:
        """Return the present number of ``what``: "streams", "events", "device", "pinned",
        "registered" (pieces of memory) or "contexts" (retained).
        """
        return int(self._library.pretend_alive(what.encode()))

    def pageable(self) -> int:
        """Return how many sides of copies were in memory unknown to the driver.

        Real copies of such memory are slow and block the caller.
        """
        return int(self._library.pretend_pageable())

    def straddling(self) -> int:
        """Return how many sides of copies spanned more than one allocation or registration."""
        return int(self._library.pretend_straddling())

    def device_memory(self, address: int, size: int) -> None:
        """Declare memory as the current GPU's."""
        self._library.pretend_device_memory(ctypes.c_uint64(address), ctypes.c_size_t(size))

    def kernel(self, name: str) -> int:
        """Return a kernel's handle: ``pretend_divide_int32`` or ``pretend_divide_int64``."""
        return int(ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)

    def forget(self, address: int) -> None:
        """Undo :meth:`device_memory`; queued operations may still use the memory."""
        self.call("pretend_forget_memory", address)

    def groups(self) -> list[int]:
        """Return the number of calls in each group of NCCL calls of this process, in order.

        Only the first 4096 groups are recorded.
        """
        nccl = ctypes.CDLL("libnccl.so.2")
        nccl.pretend_groups.restype = ctypes.c_long
        sizes = (ctypes.c_long * 4096)()
        n = int(nccl.pretend_groups(sizes, ctypes.c_long(len(sizes))))
        return list(sizes[:n])


@functools.cache
def driver() -> Driver:
    """Return the driver of this process."""
    return Driver()
