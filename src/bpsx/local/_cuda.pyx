# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""A GPU and NCCL for the core.

The libraries are opened by name at run time, and called by address without the GIL. Building and
importing this module needs nothing of CUDA.
"""
import threading
import time

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from bpsx.core.gpu.device cimport DOWN, N_STREAMS, Device
from bpsx.system.sync cimport atomic_store
from bpsx.local.cuda cimport (
    ID_BYTES, NO_TIMING, NON_BLOCKING, NOT_READY, PORTABLE, GpuState, UniqueId, abort, always,
    begin_group, broken, collect, copy, divide, drop_event, end_group, enter, enter_nothing, fill,
    host_memory, init_with, leave, leave_nothing, new_event, pin, query, record, room, wait, warm,
)

from bpsx.errors import ConfigError, DeviceError

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *path, int flags)
    void *dlsym(void *library, const char *name)
    char *dlerror()
    enum:
        RTLD_NOW
        RTLD_NOLOAD

cdef extern from "<unistd.h>" nogil:
    int getpid()


# ---- opening the libraries

# NCCL as the dynamic loader knows it: a name, or the path of a file. Several libraries of one name
# can be loaded. For a name, the loader gives the first of them; for a path, the library in that
# file.
NCCL = "libnccl.so.2"


cdef void *open_library(const char *name, int more) except NULL:
    cdef void *library = dlopen(name, RTLD_NOW | more)
    cdef char *why
    if library == NULL:
        why = dlerror()
        raise ConfigError(why.decode(errors="replace") if why != NULL else name.decode())
    return library


cdef int resolve(void *library, void **into, list names) except -1:
    """Store the addresses of functions in consecutive slots."""
    cdef int i
    for i in range(len(names)):
        into[i] = dlsym(library, <bytes>names[i])
        if into[i] == NULL:
            raise ConfigError(f"{names[i].decode()} is missing")
    return 0


_DRIVER = [
    b"cuInit", b"cuGetErrorString", b"cuDeviceGetCount", b"cuDeviceGet", b"cuDeviceGetName",
    b"cuDeviceGetPCIBusId", b"cuDevicePrimaryCtxRetain", b"cuDevicePrimaryCtxRelease_v2",
    b"cuCtxPushCurrent_v2", b"cuCtxPopCurrent_v2", b"cuThreadExchangeStreamCaptureMode",
    b"cuStreamCreateWithPriority", b"cuStreamDestroy_v2", b"cuStreamSynchronize",
    b"cuStreamIsCapturing", b"cuStreamWaitEvent", b"cuEventCreate", b"cuEventDestroy_v2",
    b"cuEventRecord", b"cuEventQuery", b"cuMemcpyAsync", b"cuMemsetD8Async", b"cuMemAlloc_v2",
    b"cuMemFree_v2", b"cuMemHostAlloc", b"cuMemFreeHost", b"cuMemHostRegister_v2",
    b"cuMemHostUnregister", b"cuPointerGetAttribute", b"cuLaunchKernel"
]
_NCCL = [
    b"ncclGetErrorString", b"ncclGetVersion", b"ncclGetUniqueId", b"ncclCommInitRank",
    b"ncclCommInitRankConfig", b"ncclCommAbort", b"ncclGroupStart", b"ncclGroupEnd",
    b"ncclAllReduce", b"ncclReduce", b"ncclBroadcast", b"ncclReduceScatter", b"ncclAllGather"
]


cdef class Moment:
    """An event recorded by :meth:`Gpu.moment`."""
    cdef Gpu gpu
    cdef readonly uintptr_t event, stream
    cdef readonly uint64_t number       # sequence number of this moment on its GPU, from 1

    def __dealloc__(self):
        if self.gpu is not None and self.event:
            self.gpu.give(self.event)


@cython.no_gc_clear
cdef class Gpu:
    """One GPU of this process: context, streams, events, pinned memory, communicators.

    Thread-safe under the GIL; the state that the core uses belongs to the core.

    Raises :class:`~bpsx.errors.ConfigError` without a CUDA driver or for a GPU that does not exist,
    :class:`~bpsx.errors.DeviceError` when the CUDA driver fails.
    """
    cdef Device table
    cdef GpuState state
    cdef int device
    cdef int pid
    cdef list spare             # unused events
    cdef list owned             # addresses of memory on the GPU
    cdef list pins              # addresses of pinned memory that :meth:`pinned` has allocated
    cdef void *kernels          # a stream
    cdef object local           # per thread: a stack of the tokens of nested `with` blocks
    cdef uint64_t moments       # number of moments so far
    cdef int (*stream_number)(void *, uint64_t *) noexcept nogil        # NULL: CUDA before 12
    cdef readonly int ordinal
    cdef readonly str name
    cdef readonly str bus       # PCI address

    def __cinit__(self, int ordinal):
        cdef int i, n = 0
        cdef char text[256]
        self.spare, self.owned, self.pins, self.local = [], [], [], threading.local()
        self.ordinal, self.device, self.pid = ordinal, -1, getpid()
        memset(&self.state, 0, sizeof(GpuState))
        memset(&self.table, 0, sizeof(Device))
        try:
            resolve(open_library(b"libcuda.so.1", 0), <void **>&self.state.driver, _DRIVER)
        except ConfigError as e:
            raise ConfigError(f"a tensor on a GPU needs NVIDIA's driver: {e}") from e
        self.stream_number = <int (*)(void *, uint64_t *) noexcept nogil>dlsym(
            open_library(b"libcuda.so.1", 0), b"cuStreamGetId"
        )
        self._check("cuInit", self.state.driver.init(0))
        self._check("cuDeviceGetCount", self.state.driver.device_count(&n))
        if not 0 <= ordinal < n:
            raise ConfigError(
                f"GPU {ordinal} does not exist: this process sees {n} GPUs (CUDA_VISIBLE_DEVICES)"
            )
        self._check("cuDeviceGet", self.state.driver.device_get(&self.device, ordinal))
        self._check(
            "cuDevicePrimaryCtxRetain", self.state.driver.retain(&self.state.context, self.device)
        )
        self._check(
            "cuDeviceGetName", self.state.driver.device_name(text, sizeof(text), self.device)
        )
        self.name = (<bytes>text).decode(errors="replace")
        self._check(
            "cuDeviceGetPCIBusId", self.state.driver.device_bus(text, sizeof(text), self.device)
        )
        self.bus = (<bytes>text).decode(errors="replace").lower()
        self._fill_table()
        with self:
            for i in range(N_STREAMS):
                self._check(
                    "cuStreamCreateWithPriority",
                    self.state.driver.stream_new(&self.table.streams[i], NON_BLOCKING, 0)
                )
            self._check("cuEventCreate", self.state.driver.event_new(&self.table.fence, NO_TIMING))

    cdef void _fill_table(self) noexcept:
        self.table.self = &self.state
        self.table.enter, self.table.leave = enter, leave
        self.table.copy, self.table.fill = copy, fill
        self.table.record, self.table.wait, self.table.query = record, wait, query
        self.table.new_event, self.table.drop_event, self.table.pin, self.table.host_memory = (
            new_event, drop_event, pin, host_memory
        )
        self.table.divide, self.table.room = divide, room
        self.table.collect, self.table.begin_group, self.table.end_group = (
            collect, begin_group, end_group
        )
        self.table.broken, self.table.abort = broken, abort

    cdef int _enter(self) except -1:
        """Make the GPU's context the thread's; return the token for `leave`."""
        cdef int token = enter(&self.state)
        if token < 0:
            raise DeviceError(self.failure)
        return token

    cdef int _check(self, str what, int rc) except -1:
        cdef const char *text = NULL
        if rc:
            self.state.driver.error_string(rc, &text)
            raise DeviceError(
                f"{what}: CUDA error {rc}: {text.decode() if text != NULL else 'unknown'}"
            )
        return 0

    def __enter__(self):
        token = self._enter()
        if not hasattr(self.local, "tokens"):
            self.local.tokens = []
        self.local.tokens.append(token)
        return self

    def __exit__(self, *exception):
        leave(&self.state, self.local.tokens.pop())

    @property
    def failure(self) -> str:
        """Text of the core's first failure with the GPU, or an empty string."""
        return self.state.failure.decode(errors="replace")

    def abi(self):
        """Return the core's function table as a capsule, valid as long as this object."""
        return PyCapsule_New(&self.table, b"bpsx.Device", NULL)

    # ---- the user's streams

    def moment(self, uintptr_t stream, str what) -> Moment:
        """Record the point at which ``stream`` will have finished its queued work.

        ``what``: name of the first input that the stream makes, for errors. The event belongs to
        the returned object as long as it lives. Raises :class:`~bpsx.errors.ConfigError` if the
        stream is being captured into a CUDA graph.
        """
        cdef Moment made = Moment.__new__(Moment)
        cdef int capturing = 0, token, rc
        made.gpu, made.stream, made.event = self, stream, self.event()
        token = self._enter()
        rc = self.state.driver.stream_capturing(<void *>stream, &capturing)
        if rc == 0 and not capturing:
            rc = self.state.driver.event_record(<void *>made.event, <void *>stream)
        leave(&self.state, token)
        self._check("cuEventRecord", rc)
        if capturing:
            raise ConfigError(
                f"{what!r}: its stream is being captured into a CUDA graph, which cannot hold an "
                f"exchange with other processes: call it outside the capture"
            )
        self.moments += 1
        made.number = self.moments
        return made

    def number_of(self, uintptr_t stream) -> int:
        """Return a number from 1 that no other stream ever has; 0 if CUDA does not provide one."""
        cdef uint64_t number = 0
        if self.stream_number == NULL or self.stream_number(<void *>stream, &number) != 0:
            return 0
        return number + 1

    def event(self) -> int:
        """Return an unused event; :meth:`give` returns it to the pool."""
        cdef void *event = NULL
        if self.spare:
            return self.spare.pop()
        with self:
            self._check("cuEventCreate", self.state.driver.event_new(&event, NO_TIMING))
        return <uintptr_t>event

    def events(self, Py_ssize_t n) -> list[int]:
        """Return ``n`` unused events."""
        cdef list found = []
        try:
            while len(found) < n:
                found.append(self.event())
        except Exception:
            self.spare += found
            raise
        return found

    def give(self, uintptr_t event) -> None:
        """Return an event to the pool."""
        self.spare.append(event)

    def record(self, uintptr_t event, uintptr_t stream) -> None:
        """Record the event after the work that ``stream`` has queued so far."""
        cdef int token = self._enter(), rc = self.state.driver.event_record(
            <void *>event, <void *>stream
        )
        leave(&self.state, token)
        self._check("cuEventRecord", rc)

    def wait(self, uintptr_t stream, uintptr_t event) -> None:
        """Make later work of ``stream`` wait for the event.

        The caller does not wait. Raises :class:`~bpsx.errors.ConfigError` if the stream is being
        captured into a CUDA graph.
        """
        cdef int capturing = 0, token = self._enter()
        cdef int rc = self.state.driver.stream_capturing(<void *>stream, &capturing)
        if rc == 0 and not capturing:
            rc = self.state.driver.stream_wait(<void *>stream, <void *>event, 0)
        leave(&self.state, token)
        if capturing:
            raise ConfigError(
                "a stream that waits for a sum is being captured into a CUDA graph, which cannot "
                "hold an exchange with other processes: wait for the sum before the capture"
            )
        self._check("cuStreamWaitEvent", rc)

    @property
    def aside(self) -> int:
        """A stream of our own for kernels that precede the core's work."""
        if self.kernels == NULL:
            with self:
                self._check(
                    "cuStreamCreateWithPriority",
                    self.state.driver.stream_new(&self.kernels, NON_BLOCKING, 0)
                )
        return <uintptr_t>self.kernels

    def copy(self, uintptr_t to, uintptr_t source, uint64_t nbytes, uintptr_t stream) -> None:
        """Queue a copy on ``stream``."""
        with self:
            self._check("cuMemcpyAsync", self.state.driver.copy(to, source, nbytes, <void *>stream))

    def come(self, uintptr_t event) -> bool:
        """Return whether an event has fired; True if the GPU is closed or in a forked child."""
        cdef int token, rc
        if not self.usable:
            return True
        token = self._enter()
        rc = self.state.driver.event_query(<void *>event)
        leave(&self.state, token)
        return rc != NOT_READY

    @property
    def usable(self) -> bool:
        """Whether it is not closed and this is not a forked child."""
        return self.device >= 0 and getpid() == self.pid

    # ---- memory

    def settle(self, uintptr_t stream) -> None:
        """Wait until ``stream`` has finished all queued work."""
        cdef int rc
        with self:
            with nogil:
                rc = self.state.driver.stream_sync(<void *>stream)
            self._check("cuStreamSynchronize", rc)

    def memory(self, uint64_t nbytes) -> int:
        """Allocate zeroed memory on the GPU until :meth:`close`; return its address."""
        cdef uintptr_t at = 0
        with self:
            self._check("cuMemAlloc", self.state.driver.alloc(&at, max(nbytes, <uint64_t>1)))
            self.owned.append(at)
            self._check(
                "cuMemsetD8Async",
                self.state.driver.fill(at, 0, max(nbytes, <uint64_t>1), self.table.streams[DOWN])
            )
            self.settle(<uintptr_t>self.table.streams[DOWN])
        return at

    def pinned(self, uint64_t nbytes) -> int:
        """Allocate pinned memory on the host until :meth:`close`; return its address."""
        cdef void *at = NULL
        with self:
            self._check(
                "cuMemHostAlloc",
                self.state.driver.host_alloc(&at, max(nbytes, <uint64_t>1), PORTABLE)
            )
        self.pins.append(<uintptr_t>at)
        return <uintptr_t>at

    def move(self, uintptr_t to, uintptr_t source, uint64_t nbytes) -> None:
        """Copy from or to the host, and wait for the end without the GIL."""
        if nbytes:
            with self:
                self._check(
                    "cuMemcpyAsync",
                    self.state.driver.copy(to, source, nbytes, self.table.streams[DOWN])
                )
                self.settle(<uintptr_t>self.table.streams[DOWN])

    # ---- NCCL

    def open_nccl(self) -> int:
        """Find NCCL among the loaded libraries; return its version.

        Raises :class:`~bpsx.errors.ConfigError`.
        """
        cdef int version = 0
        if self.state.nccl.version == NULL:
            try:
                resolve(open_library(NCCL.encode(), RTLD_NOLOAD), <void **>&self.state.nccl, _NCCL)
            except ConfigError as e:
                raise ConfigError(
                    f"NCCL, which sums over the GPUs of a machine, cannot be used: {e}"
                ) from e
        self._check_nccl("ncclGetVersion", self.state.nccl.version(&version))
        return version

    def unique_id(self) -> bytes:
        """Return an id for a communicator's processes to share. Call :meth:`open_nccl` first."""
        cdef UniqueId one
        memset(&one, 0, sizeof(UniqueId))
        self._check_nccl("ncclGetUniqueId", self.state.nccl.unique_id(&one))
        return one.internal[:ID_BYTES]

    def join(self, bytes unique_id, int rank, int size, uint64_t most, int rings=0) -> None:
        """Join the communicator as one of ``size`` processes; waits for the others without the GIL.

        ``most``: bytes of a partition. ``rings``: minimum number of channels; 0 lets NCCL decide.
        """
        cdef UniqueId one
        cdef void *comm = NULL
        cdef int rc = 0
        if len(unique_id) != ID_BYTES:
            raise DeviceError(f"NCCL's unique id must have {ID_BYTES} bytes, not {len(unique_id)}")
        memcpy(one.internal, <char *>unique_id, ID_BYTES)
        with self:
            if room(&self.table, most) != 0:
                raise DeviceError(self.failure)
            with nogil:
                rc = (
                    self.state.nccl.init_rank(&comm, size, one, rank)
                    if rings == 0
                    else init_with(&self.state.nccl, &comm, size, one, rank, rings)
                )
            self._check_nccl("ncclCommInitRank", rc)
            self.state.comm = comm
            with nogil:
                rc = warm(&self.table, size)
            if rc:
                raise DeviceError(self.failure)

    def divides(self, int dtype) -> bool:
        """Return whether there is a division kernel for integers of that dtype code."""
        return self.state.dividers[dtype] != NULL

    def take_divider(self, int dtype, uintptr_t kernel, unsigned int threads) -> None:
        """Set the division kernel of a dtype code.

        ``kernel``: CUDA's handle of a kernel with the arguments (address, elements, divisor), for
        any number of blocks. ``threads``: threads of a block.
        """
        self.state.dividers[dtype], self.state.threads = <void *>kernel, threads

    def made_ready(self) -> None:
        """Mark the communicator as ready, after all processes have joined: the core may start."""
        atomic_store(&self.table.ready, 1)

    def spoil(self, places: list) -> None:
        """Overwrite memory, (address, bytes) each, with one bits, which are NaN in floats.

        Waits for the end, for a second at most.
        """
        cdef void *stream = NULL
        cdef void *event = <void *><uintptr_t>self.event()
        with self:
            self._check(
                "cuStreamCreateWithPriority", self.state.driver.stream_new(&stream, NON_BLOCKING, 0)
            )
            for at, nbytes in places:
                if nbytes:
                    self._check(
                        "cuMemsetD8Async",
                        self.state.driver.fill(<uintptr_t>at, 0xFF, <uint64_t>nbytes, stream)
                    )
            self._check("cuEventRecord", self.state.driver.event_record(event, stream))
            end = time.monotonic() + 1
            while self.state.driver.event_query(event) == NOT_READY and time.monotonic() < end:
                time.sleep(0.001)
            self._check("cuStreamDestroy", self.state.driver.stream_drop(stream))
        self.give(<uintptr_t>event)

    def abort(self) -> None:
        """Abort work on the GPU that waits for another process.

        Any thread, also while the core uses the GPU. Idempotent.
        """
        with self, nogil:
            abort(&self.state)

    def _check_nccl(self, what: str, int rc):
        if rc:
            raise DeviceError(
                f"{what}: NCCL error {rc}: "
                f"{self.state.nccl.error_string(rc).decode(errors='replace')}"
            )

    # ---- closing

    def close(self) -> None:
        """Release everything, after the core has been closed and when nothing is in flight.

        Idempotent.
        """
        cdef int i
        if not self.usable:
            return
        with self:
            abort(&self.state)
            for i in range(N_STREAMS):
                if self.table.streams[i] != NULL:
                    self.state.driver.stream_sync(self.table.streams[i])
                    self.state.driver.stream_drop(self.table.streams[i])
            if self.kernels != NULL:
                self.state.driver.stream_drop(self.kernels)
            for event in self.spare:
                self.state.driver.event_drop(<void *><uintptr_t>event)
            if self.table.fence != NULL:
                self.state.driver.event_drop(self.table.fence)
            for i in range(self.state.n_slabs):
                self.state.driver.host_free(self.state.slabs[i])
            for at in self.pins:
                self.state.driver.host_free(<void *><uintptr_t>at)
            for i in range(self.state.n_shared):
                self.state.driver.host_unregister(self.state.shared[i])
            for at in self.owned:
                self.state.driver.free(<uintptr_t>at)
            for i in range(self.state.n_rooms):
                self.state.driver.free(self.state.rooms[i])
        self.spare, self.owned, self.pins = [], [], []
        self.table.enter, self.table.leave, self.table.query = enter_nothing, leave_nothing, always
        self.state.driver.release(self.device)
        self.device = -1


def where(uintptr_t address) -> int:
    """Return the GPU that has the memory at ``address``, or -1 if it is not a GPU's.

    Raises :class:`~bpsx.errors.ConfigError` without a CUDA driver.
    """
    cdef int (*ask)(void *, int, uintptr_t) noexcept nogil
    cdef int ordinal = -1, kind = 0
    ask = NULL
    cdef void *library = open_library(b"libcuda.so.1", 0)
    resolve(library, <void **>&ask, [b"cuPointerGetAttribute"])
    if ask(&kind, 2, address) != 0 or kind != 2 or ask(&ordinal, 9, address) != 0:
        return -1
    return ordinal
