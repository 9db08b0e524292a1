"""Scenarios for tests of the pretend driver, each in its own process.

Run one with ``python -m gpus.scenarios name``.

Those of NCCL are in nccl_scenarios.py.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpus.pretend.driver import CudaError, driver
from gpus.pretend.memory import PretendArray

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    faulthandler.dump_traceback_later(30, exit=True)
    SCENARIOS[sys.argv[1]]()


def place(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def pinned(n: int) -> npt.NDArray[np.uint8]:
    """Bytes that the driver has registered."""
    memory = np.zeros(n, np.uint8)
    driver().call("cuMemHostRegister_v2", place(memory), n, 0)
    return memory


@scenario
def needs_a_context() -> None:
    cuda = driver()
    where = ctypes.byref(ctypes.c_uint64())
    memory = np.zeros(64, np.uint8)
    calls: dict[str, tuple[object, ...]] = {
        "cuStreamCreate": (where, 1),
        "cuStreamCreateWithPriority": (where, 1, 0),
        "cuEventCreate": (where, 2),
        "cuEventRecord": (1, 0),
        "cuStreamWaitEvent": (0, 1, 0),
        "cuStreamSynchronize": (0,),
        "cuStreamQuery": (0,),
        "cuEventSynchronize": (1,),
        "cuMemAlloc_v2": (where, 8),
        "cuMemFree_v2": (8,),
        "cuMemHostAlloc": (where, 8, 0),
        "cuMemFreeHost": (8,),
        "cuMemHostRegister_v2": (place(memory), 64, 0),
        "cuMemHostUnregister": (place(memory),),
        "cuMemcpyAsync": (place(memory), place(memory), 8, 0),
        "cuMemsetD8Async": (place(memory), 1, 8, 0),
    }
    assert {name: cuda.code(name, *a) for name, a in calls.items()} == dict.fromkeys(
        calls, 3
    )  # cuInit was not called
    cuda.call("cuInit", 0)
    assert {name: cuda.code(name, *a) for name, a in calls.items()} == dict.fromkeys(calls, 201)
    assert cuda.made("cuCtxGetCurrent") == 0
    context = cuda.enter()
    assert cuda.made("cuCtxGetCurrent") == context
    cuda.stream()
    cuda.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert cuda.code("cuStreamCreate", where, 1) == 709
    cuda.enter()
    assert cuda.made("cuCtxPopCurrent_v2") == cuda.made("cuCtxPopCurrent_v2") == context
    assert cuda.code("cuCtxPopCurrent_v2", where) == 201
    assert cuda.code("cuStreamCreate", where, 1) == 201


@scenario
def devices() -> None:
    """PRETEND_GPUS=2, PRETEND_FIRST_GPU=10."""
    cuda = driver()
    cuda.call("cuInit", 0)
    assert cuda.made("cuDeviceGetCount") == 2
    text = ctypes.create_string_buffer(16)
    for ordinal, bus in enumerate((b"0000:0a:00.0", b"0000:0b:00.0")):
        cuda.call("cuDeviceGetPCIBusId", text, 16, cuda.made("cuDeviceGet", ordinal))
        assert text.value == bus
    assert cuda.code("cuDeviceGet", ctypes.byref(ctypes.c_int()), 2) == 101
    cuda.enter(0)
    event = cuda.event()
    memory = cuda.made("cuMemAlloc_v2", 100)
    cuda.enter(1)
    other = cuda.made("cuMemAlloc_v2", 100)
    ordinals = [cuda.made("cuPointerGetAttribute", 9, m + 99) for m in (memory, other)]
    assert ordinals == [0, 1]
    assert cuda.code("cuEventRecord", event, cuda.stream()) == 400  # another GPU's
    name = ctypes.c_char_p()
    cuda.call("cuGetErrorName", 712, ctypes.byref(name))
    assert name.value == b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"


@scenario
def events() -> None:
    cuda = driver()
    cuda.enter()
    a, b, event = cuda.stream(), cuda.stream(), cuda.event()
    assert cuda.come(event)  # never recorded
    cuda.wait(a, event)
    cuda.call("cuEventSynchronize", event)
    cuda.hold(a)
    cuda.record(event, a)
    assert not cuda.come(event) and not cuda.idle(a)
    cuda.wait(b, event)  # waits for this record, not for later ones
    cuda.record(event, 0)
    cuda.call("cuEventSynchronize", event)
    assert cuda.come(event) and cuda.idle() and not cuda.idle(b)
    cuda.call("cuEventDestroy_v2", event)
    assert cuda.code("cuEventQuery", event) == 400
    cuda.release(a)
    cuda.sync(b)
    assert cuda.alive("events") == 0 and cuda.alive("streams") == 2
    event = cuda.event()
    cuda.hold(1)  # 0, 1 and 2 are one stream
    cuda.record(event, 2)
    assert not cuda.come(event) and not cuda.idle(0)
    cuda.release(0)
    cuda.sync(2)
    cuda.hold(a)
    cuda.record(event, a)
    cuda.call("cuStreamDestroy_v2", a)  # no call could release it any more
    cuda.call("cuEventSynchronize", event)
    cuda.call("cuStreamDestroy_v2", b)
    assert cuda.code("cuStreamQuery", a) == 400 and cuda.alive("streams") == 0


@scenario
def order() -> None:
    """Operations of one stream run in order, one at a time; those of two streams run in parallel. A
    hold stops only the operations after it.
    """
    cuda = driver()
    cuda.enter()
    a, b, event = cuda.stream(), cuda.stream(), cuda.event()
    x, y = pinned(8), pinned(8)
    cuda.call("cuMemsetD8Async", place(x), 1, 8, a)
    cuda.hold(a)
    cuda.call("cuMemsetD8Async", place(x), 2, 8, a)
    cuda.call("cuMemsetD8Async", place(x), 3, 4, a)
    cuda.record(event, a)
    cuda.wait(b, event)
    cuda.copy(place(y), place(x), 8, b)
    deadline = time.monotonic() + 10
    while x[0] != 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert x.tolist() == [1] * 8 and y.tolist() == [0] * 8
    cuda.release(a)
    cuda.sync(b)
    assert x.tolist() == y.tolist() == [3] * 4 + [2] * 4


@scenario
def asynchrony() -> None:
    """PRETEND_DELAY_US=400000."""
    cuda = driver()
    cuda.enter()
    x = pinned(8)
    begin = time.monotonic()
    cuda.call("cuMemsetD8Async", place(x), 7, 8, 0)
    assert not cuda.idle() and x[0] == 0
    cuda.sync()
    assert time.monotonic() - begin > 0.39 and cuda.idle() and x[0] == 7
    cuda.delay(0)
    for _ in range(100):
        cuda.call("cuMemsetD8Async", place(x), 8, 8, 0)
    cuda.sync()
    assert time.monotonic() - begin < 20


@scenario
def memory() -> None:
    cuda = driver()
    cuda.enter()
    device, host = cuda.made("cuMemAlloc_v2", 1000), cuda.made("cuMemHostAlloc", 1000, 0)
    plain = np.arange(3000, dtype=np.int16).view(np.uint8)
    x = place(plain)
    assert [cuda.made("cuPointerGetAttribute", 2, p) for p in (device, device + 999, host)] == [
        2,
        2,
        1,
    ]
    out = ctypes.byref(ctypes.c_uint64())
    assert [cuda.code("cuPointerGetAttribute", out, 2, p) for p in (device + 1000, x)] == [1, 1]
    cuda.copy(device, x, 1000)
    assert (cuda.pageable(), cuda.straddling()) == (1, 0)
    cuda.call("cuMemHostRegister_v2", x, 2000, 0)
    cuda.call("cuMemHostRegister_v2", x + 2000, 2000, 0)
    assert [
        cuda.code("cuMemHostRegister_v2", x + k, n, 0)
        for k, n in ((0, 2000), (1999, 1), (-1, 2), (3000, 5000))
    ] == [712] * 4
    cuda.copy(device, x, 1000)
    cuda.copy(host, device, 1000)
    assert (cuda.pageable(), cuda.straddling()) == (1, 0)
    cuda.copy(device, x + 1500, 1000)
    assert (cuda.pageable(), cuda.straddling()) == (1, 1)
    assert (
        cuda.code("cuMemcpyAsync", device, x + 3500, 1000, 0) == 1
    )  # the second half of it is not registered
    cuda.sync()
    assert (
        ctypes.string_at(host, 1000) == plain[:1000].tobytes()
        and ctypes.string_at(device, 1000) == plain[1500:2500].tobytes()
    )
    assert [cuda.alive(k) for k in ("device", "pinned", "registered")] == [1, 1, 2]
    assert [cuda.code("cuMemHostUnregister", x + k) for k in (0, 0, 1, 2000)] == [0, 713, 713, 0]
    assert [cuda.code("cuMemFree_v2", p) for p in (device, device, host)] == [
        0,
        1,
        1,
    ] and cuda.code("cuMemFreeHost", host) == 0
    assert [cuda.alive(k) for k in ("device", "pinned", "registered")] == [0, 0, 0]


@scenario
def failures() -> None:
    """Calls are counted by name, and fail on demand, once and without effect."""
    cuda = driver()
    cuda.enter()
    x = pinned(8)
    cuda.fail("cuMemsetD8Async", 700)
    codes = [cuda.code("cuMemsetD8Async", place(x) + i, i + 1, 1, 0) for i in range(2)]
    cuda.sync()
    assert (
        codes == [700, 0]
        and x.tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
        and cuda.count("cuMemsetD8Async") == 2
    )
    cuda.fail("cuStreamQuery", 5, skip=2)
    assert [cuda.code("cuStreamQuery", 0) for _ in range(4)] == [0, 0, 5, 0]
    try:
        cuda.call("cuLaunchKernel", *[0] * 11)
    except CudaError as error:
        assert error.code == 801 and "cuLaunchKernel" in str(error)
    assert cuda.count("cuEventCreate") == 0


@scenario
def capture() -> None:
    cuda = driver()
    cuda.enter()
    stream, event, x = cuda.stream(), cuda.event(), pinned(8)
    status = ctypes.c_int(5)
    for on in (False, True, False):
        cuda.capture(stream, on)
        cuda.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == on
        refused = 900 if on else 0
        assert (
            cuda.code("cuEventRecord", event, stream)
            == cuda.code("cuMemsetD8Async", place(x), 1, 8, stream)
            == refused
        )
        assert (
            cuda.code("cuStreamSynchronize", stream)
            == cuda.code("cuStreamWaitEvent", stream, event, 0)
            == refused
        )


@scenario
def forked() -> None:
    cuda = driver()
    cuda.enter()
    cuda.hold()
    child = os.fork()
    if child == 0:
        os._exit(10 * cuda.code("cuInit", 0) + cuda.code("cuStreamQuery", 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 33
    cuda.release()
    cuda.sync()


@scenario
def arrays() -> None:
    cuda = driver()
    cuda.enter()
    stream = cuda.stream()
    array = PretendArray(np.arange(6, dtype=np.float32).reshape(2, 3), stream)
    told = array.__cuda_array_interface__
    assert told == {
        "shape": (2, 3),
        "typestr": "<f4",
        "data": (array.address, False),
        "strides": None,
        "version": 3,
        "stream": stream,
    }
    assert (
        cuda.made("cuPointerGetAttribute", 2, array.address + 23) == 2 and cuda.alive("device") == 1
    )
    cuda.call("cuMemsetD8Async", array.address + 12, 0, 12, stream)
    assert array.get().tolist() == [[0, 1, 2], [0, 0, 0]]
    array.set(np.ones((2, 3)))
    assert array.get().sum() == 6 and array.nbytes == 24
    address = array.address
    del array
    assert cuda.alive("device") == 0 and ctypes.string_at(address, 24) == b"\xa5" * 24


@scenario
def cupy() -> None:
    from cupy.cuda import nccl  # type: ignore[import-untyped, import-not-found, unused-ignore]

    assert nccl.get_version() == 22304
    assert ctypes.CDLL(None).ncclGetVersion  # all libraries of the process see it
    assert driver().count("ncclGetVersion") == 1


if __name__ == "__main__":
    main()
