# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""A GPU and NCCL for the core: opened by name at run time, called by address and without the GIL.

Nothing of CUDA is needed to build this or to import it. Constants and signatures are those of CUDA's driver API and of NCCL, which both keep stable.
"""
import threading

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy, memset

from bpsx.core.device cimport ALL_GATHER, ALL_REDUCE, BETWEEN, BROADCAST_FROM, N_STREAMS, REDUCE_SCATTER, REDUCE_TO, Device
from bpsx.core.sync cimport atomic_load, atomic_store

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

cdef extern from *:
    """
    static inline void *bpsx_take(void **p) { return __atomic_exchange_n(p, NULL, __ATOMIC_SEQ_CST); }
    """
    void *atomic_take "bpsx_take"(void **p) noexcept nogil     # leaves NULL

cdef enum:
    MOST_SLABS = 4096
    TEXT = 512
    NOT_READY = 600             # CUDA_ERROR_NOT_READY
    RELAXED = 2                 # CU_STREAM_CAPTURE_MODE_RELAXED
    NO_TIMING = 2               # CU_EVENT_DISABLE_TIMING
    NON_BLOCKING = 1            # CU_STREAM_NON_BLOCKING
    PORTABLE = 1                # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE
    UNDEFINED = -2147483648     # NCCL_CONFIG_UNDEF_INT
    ID_BYTES = 128              # NCCL_UNIQUE_ID_BYTES

cdef struct UniqueId:           # ncclUniqueId travels by value
    char internal[ID_BYTES]

cdef struct Options:            # ncclConfig_t of NCCL 2.17
    size_t size
    unsigned int magic
    unsigned int version
    int blocking
    int cluster
    int least                   # channels
    int most
    const char *net

cdef struct Driver:             # libcuda.so.1
    int (*init)(unsigned int) noexcept nogil
    int (*error_string)(int, const char **) noexcept nogil
    int (*device_count)(int *) noexcept nogil
    int (*device_get)(int *, int) noexcept nogil
    int (*device_name)(char *, int, int) noexcept nogil
    int (*device_bus)(char *, int, int) noexcept nogil
    int (*retain)(void **, int) noexcept nogil
    int (*release)(int) noexcept nogil
    int (*push)(void *) noexcept nogil
    int (*pop)(void **) noexcept nogil
    int (*exchange_capture_mode)(int *) noexcept nogil
    int (*stream_new)(void **, unsigned int, int) noexcept nogil
    int (*stream_drop)(void *) noexcept nogil
    int (*stream_sync)(void *) noexcept nogil
    int (*stream_capturing)(void *, int *) noexcept nogil
    int (*stream_wait)(void *, void *, unsigned int) noexcept nogil
    int (*event_new)(void **, unsigned int) noexcept nogil
    int (*event_drop)(void *) noexcept nogil
    int (*event_record)(void *, void *) noexcept nogil
    int (*event_query)(void *) noexcept nogil
    int (*copy)(uintptr_t, uintptr_t, size_t, void *) noexcept nogil
    int (*fill)(uintptr_t, unsigned char, size_t, void *) noexcept nogil
    int (*alloc)(uintptr_t *, size_t) noexcept nogil
    int (*free)(uintptr_t) noexcept nogil
    int (*host_alloc)(void **, size_t, unsigned int) noexcept nogil
    int (*host_free)(void *) noexcept nogil
    int (*host_register)(void *, size_t, unsigned int) noexcept nogil
    int (*host_unregister)(void *) noexcept nogil
    int (*pointer)(void *, int, uintptr_t) noexcept nogil

cdef struct Nccl:               # libnccl.so.2
    const char *(*error_string)(int) noexcept nogil
    int (*version)(int *) noexcept nogil
    int (*unique_id)(UniqueId *) noexcept nogil
    int (*init_rank)(void **, int, UniqueId, int) noexcept nogil
    int (*init_rank_config)(void **, int, UniqueId, int, Options *) noexcept nogil
    int (*abort)(void *) noexcept nogil
    int (*group_start)() noexcept nogil
    int (*group_end)() noexcept nogil
    int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *) noexcept nogil
    int (*reduce)(const void *, void *, size_t, int, int, int, void *, void *) noexcept nogil
    int (*broadcast)(const void *, void *, size_t, int, int, void *, void *) noexcept nogil
    int (*reduce_scatter)(const void *, void *, size_t, int, int, void *, void *) noexcept nogil
    int (*all_gather)(const void *, void *, size_t, int, void *, void *) noexcept nogil

# What the table's functions get as `self`.
cdef struct State:
    Driver driver
    Nccl nccl
    void *context
    void *comm                  # the communicator
    void *slabs[MOST_SLABS]     # pinned memory of our own,
    int n_slabs
    void *shared[MOST_SLABS]    # ... and of the segment of the machine's root
    int n_shared
    int64_t failing             # somebody writes `failure`, or has
    char failure[TEXT]

#: Our codes of element types -> NCCL's. bfloat16 has one since NCCL 2.10.
cdef int[9] NCCL_TYPES = [-1, 6, 9, 7, 8, 1, 0, 2, 4]


# ---- the table

cdef int failed(State *s, const char *what, int rc) noexcept nogil:
    """Keep the first failure's text; returns ``rc``."""
    cdef const char *text = NULL
    if rc != 0 and atomic_load(&s.failing) == 0:
        atomic_store(&s.failing, 1)
        if s.driver.error_string(rc, &text) == 0:
            snprintf(s.failure, TEXT, b"%s: CUDA error %d: %s", what, rc, text)
        else:
            snprintf(s.failure, TEXT, b"%s: CUDA error %d", what, rc)
    return rc


cdef int nccl_failed(State *s, const char *what, int rc) noexcept nogil:
    if rc != 0 and atomic_load(&s.failing) == 0:
        atomic_store(&s.failing, 1)
        snprintf(s.failure, TEXT, b"%s: NCCL error %d: %s", what, rc, s.nccl.error_string(rc))
    return rc


cdef int enter(void *self) noexcept nogil:
    """Also take this thread out of other threads' capture of a CUDA graph, which asking for an event would break."""
    cdef State *s = <State *>self
    cdef int mode = RELAXED
    if failed(s, b"cuCtxPushCurrent", s.driver.push(s.context)) != 0:
        return -1
    s.driver.exchange_capture_mode(&mode)
    return mode


cdef void leave(void *self, int token) noexcept nogil:
    cdef State *s = <State *>self
    cdef void *was = NULL
    s.driver.exchange_capture_mode(&token)
    s.driver.pop(&was)


cdef int copy(void *self, void *to, const void *source, uint64_t nbytes, void *stream) noexcept nogil:
    cdef State *s = <State *>self
    return failed(s, b"cuMemcpyAsync", s.driver.copy(<uintptr_t>to, <uintptr_t>source, nbytes, stream))


cdef int fill(void *self, void *at, unsigned char value, uint64_t nbytes, void *stream) noexcept nogil:
    cdef State *s = <State *>self
    return failed(s, b"cuMemsetD8Async", s.driver.fill(<uintptr_t>at, value, nbytes, stream))


cdef int record(void *self, void *event, void *stream) noexcept nogil:
    cdef State *s = <State *>self
    return failed(s, b"cuEventRecord", s.driver.event_record(event, stream))


cdef int wait(void *self, void *stream, void *event) noexcept nogil:
    cdef State *s = <State *>self
    return failed(s, b"cuStreamWaitEvent", s.driver.stream_wait(stream, event, 0))


cdef int query(void *self, void *event) noexcept nogil:
    cdef State *s = <State *>self
    cdef int rc = s.driver.event_query(event)
    if rc == 0:
        return 1
    return 0 if rc == NOT_READY else -failed(s, b"cuEventQuery", rc)


cdef void *new_event(void *self) noexcept nogil:
    cdef State *s = <State *>self
    cdef void *event = NULL
    return event if failed(s, b"cuEventCreate", s.driver.event_new(&event, NO_TIMING)) == 0 else NULL


cdef void drop_event(void *self, void *event) noexcept nogil:
    (<State *>self).driver.event_drop(event)


cdef int pin(void *self, void *at, uint64_t nbytes) noexcept nogil:
    cdef State *s = <State *>self
    # Had a former session left the address registered, copies would go to its pages: so that is an error, too.
    cdef int rc = failed(s, b"cuMemHostRegister", s.driver.host_register(at, nbytes, PORTABLE))
    if rc == 0 and s.n_shared < MOST_SLABS:
        s.shared[s.n_shared] = at
        s.n_shared += 1
    return rc


cdef void *host_memory(void *self, uint64_t nbytes) noexcept nogil:
    cdef State *s = <State *>self
    cdef void *at = NULL
    if failed(s, b"cuMemHostAlloc", s.driver.host_alloc(&at, nbytes, PORTABLE)) != 0:
        return NULL
    if s.n_slabs < MOST_SLABS:
        s.slabs[s.n_slabs] = at
        s.n_slabs += 1
    return at


cdef int collect(
    void *self, int what, const void *send, void *receive, uint64_t count, int dtype, int reduction, int root, void *stream,
) noexcept nogil:
    cdef State *s = <State *>self
    cdef void *comm = s.comm
    cdef int kind = NCCL_TYPES[dtype]
    if what == ALL_REDUCE:
        return nccl_failed(s, b"ncclAllReduce", s.nccl.all_reduce(send, receive, count, kind, reduction, comm, stream))
    if what == REDUCE_SCATTER:
        return nccl_failed(s, b"ncclReduceScatter", s.nccl.reduce_scatter(send, receive, count, kind, reduction, comm, stream))
    if what == ALL_GATHER:
        return nccl_failed(s, b"ncclAllGather", s.nccl.all_gather(send, receive, count, kind, comm, stream))
    if what == REDUCE_TO:
        return nccl_failed(s, b"ncclReduce", s.nccl.reduce(send, receive, count, kind, reduction, root, comm, stream))
    return nccl_failed(s, b"ncclBroadcast", s.nccl.broadcast(send, receive, count, kind, root, comm, stream))


cdef int begin_group(void *self) noexcept nogil:
    cdef State *s = <State *>self
    return nccl_failed(s, b"ncclGroupStart", s.nccl.group_start())


cdef int end_group(void *self) noexcept nogil:
    cdef State *s = <State *>self
    return nccl_failed(s, b"ncclGroupEnd", s.nccl.group_end())


cdef bint broken(void *self) noexcept nogil:
    return atomic_load(&(<State *>self).failing) != 0


cdef void abort(void *self) noexcept nogil:
    cdef State *s = <State *>self
    cdef void *comm = atomic_take(&s.comm)
    if comm != NULL:
        s.nccl.abort(comm)


cdef int init_with(Nccl *nccl, void **comm, int size, UniqueId one, int rank, int rings) noexcept nogil:
    """ncclCommInitRank for at least so many channels."""
    cdef Options options
    options.size = sizeof(Options)
    options.magic = 0xCAFEBEEF
    options.version = 21700                     # the NCCL whose ncclConfig_t this is; later ones know it
    options.blocking = options.cluster = options.most = UNDEFINED
    options.least = rings
    options.net = NULL
    return nccl.init_rank_config(comm, size, one, rank, &options)


cdef int warm(Device *d, int size) noexcept nogil:
    """Have NCCL make its connections, which the first collective of a kind waits for: now, and not in a driver. 0, or an error."""
    cdef void *stream = d.streams[BETWEEN]
    cdef uint64_t count = d.most // size // 4
    cdef int rc = d.collect(d.self, ALL_REDUCE, d.zeros, d.waste, 1, 3, 0, 0, stream)
    rc |= d.collect(d.self, ALL_REDUCE, d.zeros, d.waste, d.most // 4, 3, 0, 0, stream)
    rc |= d.collect(d.self, REDUCE_SCATTER, d.zeros, d.waste, count, 3, 0, 0, stream)
    rc |= d.collect(d.self, ALL_GATHER, d.zeros, d.waste, count, 3, 0, 0, stream)
    rc |= d.collect(d.self, REDUCE_TO, d.zeros, d.waste, count, 3, 0, 0, stream)
    rc |= d.collect(d.self, BROADCAST_FROM, d.zeros, d.waste, count, 3, 0, 0, stream)
    return rc


# ---- opening the libraries

cdef void *open_library(const char *name, int more) except NULL:
    cdef void *library = dlopen(name, RTLD_NOW | more)
    cdef char *why
    if library == NULL:
        why = dlerror()
        raise ConfigError(why.decode(errors="replace") if why != NULL else name.decode())
    return library


cdef int resolve(void *library, void **into, list names) except -1:
    """Put the addresses of functions into consecutive slots."""
    cdef int i
    for i in range(len(names)):
        into[i] = dlsym(library, <bytes>names[i])
        if into[i] == NULL:
            raise ConfigError(f"{names[i].decode()} is missing")
    return 0


_DRIVER = [
    b"cuInit", b"cuGetErrorString", b"cuDeviceGetCount", b"cuDeviceGet", b"cuDeviceGetName", b"cuDeviceGetPCIBusId", b"cuDevicePrimaryCtxRetain",
    b"cuDevicePrimaryCtxRelease_v2", b"cuCtxPushCurrent_v2", b"cuCtxPopCurrent_v2", b"cuThreadExchangeStreamCaptureMode", b"cuStreamCreateWithPriority", b"cuStreamDestroy_v2",
    b"cuStreamSynchronize", b"cuStreamIsCapturing", b"cuStreamWaitEvent", b"cuEventCreate", b"cuEventDestroy_v2", b"cuEventRecord", b"cuEventQuery",
    b"cuMemcpyAsync", b"cuMemsetD8Async", b"cuMemAlloc_v2", b"cuMemFree_v2",
    b"cuMemHostAlloc", b"cuMemFreeHost", b"cuMemHostRegister_v2", b"cuMemHostUnregister", b"cuPointerGetAttribute",
]
_NCCL = [
    b"ncclGetErrorString", b"ncclGetVersion", b"ncclGetUniqueId", b"ncclCommInitRank", b"ncclCommInitRankConfig",
    b"ncclCommAbort", b"ncclGroupStart", b"ncclGroupEnd", b"ncclAllReduce", b"ncclReduce", b"ncclBroadcast", b"ncclReduceScatter",
    b"ncclAllGather",
]


@cython.no_gc_clear
cdef class Gpu:
    """One GPU of this process: context, streams, events, pinned memory, communicators. Thread-safe with the GIL; what the core does with it is its own.

    Raises :class:`~bpsx.errors.ConfigError` where there is no driver or no such GPU, :class:`~bpsx.errors.DeviceError` when the driver fails.
    """
    cdef Device table
    cdef State state
    cdef int device
    cdef int pid
    cdef list spare             # events
    cdef object local           # of `with`, which may be nested: what `enter` gave, per thread
    cdef readonly int ordinal
    cdef readonly str name
    cdef readonly str bus       # its PCI address

    def __cinit__(self, int ordinal):
        cdef int i, n = 0
        cdef char text[256]
        self.spare, self.local = [], threading.local()
        self.ordinal, self.device, self.pid = ordinal, -1, getpid()
        memset(&self.state, 0, sizeof(State))
        memset(&self.table, 0, sizeof(Device))
        try:
            resolve(open_library(b"libcuda.so.1", 0), <void **>&self.state.driver, _DRIVER)
        except ConfigError as e:
            raise ConfigError(f"a tensor on a GPU needs NVIDIA's driver: {e}") from e
        self._check("cuInit", self.state.driver.init(0))
        self._check("cuDeviceGetCount", self.state.driver.device_count(&n))
        if not 0 <= ordinal < n:
            raise ConfigError(f"GPU {ordinal} does not exist: this process sees {n} (CUDA_VISIBLE_DEVICES)")
        self._check("cuDeviceGet", self.state.driver.device_get(&self.device, ordinal))
        self._check("cuDevicePrimaryCtxRetain", self.state.driver.retain(&self.state.context, self.device))
        self._check("cuDeviceGetName", self.state.driver.device_name(text, sizeof(text), self.device))
        self.name = (<bytes>text).decode(errors="replace")
        self._check("cuDeviceGetPCIBusId", self.state.driver.device_bus(text, sizeof(text), self.device))
        self.bus = (<bytes>text).decode(errors="replace").lower()
        self._fill_table()
        with self:
            for i in range(N_STREAMS):
                self._check("cuStreamCreateWithPriority", self.state.driver.stream_new(&self.table.streams[i], NON_BLOCKING, 0))
            self._check("cuEventCreate", self.state.driver.event_new(&self.table.fence, NO_TIMING))

    cdef void _fill_table(self) noexcept:
        self.table.self = &self.state
        self.table.enter, self.table.leave = enter, leave
        self.table.copy, self.table.fill = copy, fill
        self.table.record, self.table.wait, self.table.query = record, wait, query
        self.table.new_event, self.table.drop_event, self.table.pin, self.table.host_memory = new_event, drop_event, pin, host_memory
        self.table.collect, self.table.begin_group, self.table.end_group = collect, begin_group, end_group
        self.table.broken, self.table.abort = broken, abort

    def _check(self, what: str, int rc):
        cdef const char *text = NULL
        if rc:
            self.state.driver.error_string(rc, &text)
            raise DeviceError(f"{what}: CUDA error {rc}: {text.decode() if text != NULL else 'unknown'}")

    def __enter__(self):
        cdef int token = enter(&self.state)
        if token < 0:
            raise DeviceError(self.failure)
        if not hasattr(self.local, "tokens"):
            self.local.tokens = []
        self.local.tokens.append(token)
        return self

    def __exit__(self, *exception):
        leave(&self.state, self.local.tokens.pop())

    @property
    def failure(self) -> str:
        """What has failed first while the core was at it, or an empty string."""
        return self.state.failure.decode(errors="replace")

    def abi(self):
        """The table: a capsule, valid as long as this object."""
        return PyCapsule_New(&self.table, b"bpsx.Device", NULL)

    # ---- the user's streams

    def check_stream(self, uintptr_t stream, str what) -> None:
        """Refuse a stream that is being captured into a CUDA graph. Raises :class:`~bpsx.errors.ConfigError`."""
        cdef int capturing = 0
        with self:
            self._check("cuStreamIsCapturing", self.state.driver.stream_capturing(<void *>stream, &capturing))
        if capturing:
            raise ConfigError(f"{what}: its stream is being captured into a CUDA graph, which cannot hold an exchange with other processes: "
                              "call it outside the capture")

    def event(self) -> int:
        """An event that nobody else has; :meth:`give` takes it back."""
        cdef void *event = NULL
        if self.spare:
            return self.spare.pop()
        with self:
            self._check("cuEventCreate", self.state.driver.event_new(&event, NO_TIMING))
        return <uintptr_t>event

    def give(self, uintptr_t event) -> None:
        """Take an event back for the next who asks."""
        self.spare.append(event)

    def record(self, uintptr_t event, uintptr_t stream) -> None:
        """The event comes when all that ``stream`` has queued so far is over."""
        with self:
            self._check("cuEventRecord", self.state.driver.event_record(<void *>event, <void *>stream))

    def wait(self, uintptr_t stream, uintptr_t event) -> None:
        """What ``stream`` queues from now on comes after the event. The caller does not wait."""
        with self:
            self._check("cuStreamWaitEvent", self.state.driver.stream_wait(<void *>stream, <void *>event, 0))

    def copy(self, uintptr_t to, uintptr_t source, uint64_t nbytes, uintptr_t stream) -> None:
        """Queue a copy on ``stream``."""
        with self:
            self._check("cuMemcpyAsync", self.state.driver.copy(to, source, nbytes, <void *>stream))

    def come(self, uintptr_t event) -> bool:
        """Whether an event has come. True too where nobody can tell any more."""
        cdef int rc
        if not self.usable:
            return True
        with self:
            rc = self.state.driver.event_query(<void *>event)
        return rc != NOT_READY

    @property
    def usable(self) -> bool:
        """Whether it has not been closed, and this is not a forked child."""
        return self.device >= 0 and getpid() == self.pid

    # ---- NCCL

    def open_nccl(self) -> int:
        """Find NCCL, which somebody has loaded; its version. Raises :class:`~bpsx.errors.ConfigError`."""
        cdef int version = 0
        if self.state.nccl.version == NULL:
            try:
                resolve(open_library(b"libnccl.so.2", RTLD_NOLOAD), <void **>&self.state.nccl, _NCCL)
            except ConfigError as e:
                raise ConfigError(f"NCCL, which adds GPUs of one machine, cannot be used: {e}") from e
        self._check_nccl("ncclGetVersion", self.state.nccl.version(&version))
        return version

    def unique_id(self) -> bytes:
        """What the processes of a communicator have to share. After :meth:`open_nccl`."""
        cdef UniqueId one
        memset(&one, 0, sizeof(UniqueId))
        self._check_nccl("ncclGetUniqueId", self.state.nccl.unique_id(&one))
        return one.internal[:ID_BYTES]

    def join(self, bytes unique_id, int rank, int size, uint64_t most, int rings=0) -> None:
        """Become one of the ``size`` processes of the communicator; waits for the others, without the GIL. ``most``: bytes of a partition;
        ``rings``: channels at least, 0 to let NCCL decide."""
        cdef UniqueId one
        cdef void *comm = NULL
        cdef uintptr_t at = 0
        cdef int rc
        if len(unique_id) != ID_BYTES:
            raise DeviceError(f"an id of NCCL has {ID_BYTES} bytes, not {len(unique_id)}")
        memcpy(one.internal, <char *>unique_id, ID_BYTES)
        with self:
            self._check("cuMemAlloc", self.state.driver.alloc(&at, 2 * most))
            self.table.zeros, self.table.waste, self.table.most = <char *>at, <char *>at + most, most
            self._check("cuMemsetD8Async", self.state.driver.fill(at, 0, 2 * most, self.table.streams[BETWEEN]))
            with nogil:
                rc = self.state.nccl.init_rank(&comm, size, one, rank) if rings == 0 else init_with(&self.state.nccl, &comm, size, one, rank, rings)
            self._check_nccl("ncclCommInitRank", rc)
            self.state.comm = comm
            with nogil:
                rc = warm(&self.table, size)
            if rc:
                raise DeviceError(self.failure)

    def made_ready(self) -> None:
        """All have joined: the core may begin."""
        atomic_store(&self.table.ready, 1)

    def abort(self) -> None:
        """End what waits on the GPU for another process. Any thread, also while the core is at it. Idempotent."""
        with self, nogil:
            abort(&self.state)

    def _check_nccl(self, what: str, int rc):
        if rc:
            raise DeviceError(f"{what}: NCCL error {rc}: {self.state.nccl.error_string(rc).decode(errors='replace')}")

    # ---- the end

    def close(self) -> None:
        """Give everything back. After the core has been closed, when nothing is under way. Idempotent."""
        cdef int i
        if not self.usable:
            return
        with self:
            abort(&self.state)
            for i in range(N_STREAMS):
                if self.table.streams[i] != NULL:
                    self.state.driver.stream_sync(self.table.streams[i])
                    self.state.driver.stream_drop(self.table.streams[i])
            for event in self.spare:
                self.state.driver.event_drop(<void *><uintptr_t>event)
            if self.table.fence != NULL:
                self.state.driver.event_drop(self.table.fence)
            for i in range(self.state.n_slabs):
                self.state.driver.host_free(self.state.slabs[i])
            for i in range(self.state.n_shared):
                self.state.driver.host_unregister(self.state.shared[i])
            if self.table.zeros != NULL:
                self.state.driver.free(<uintptr_t>self.table.zeros)
        self.spare = []
        self.state.driver.release(self.device)
        self.device = -1


def where(uintptr_t address) -> int:
    """The GPU that has the memory at ``address``, or -1 if it is not a GPU's. Raises :class:`~bpsx.errors.ConfigError` without a driver."""
    cdef int (*ask)(void *, int, uintptr_t) noexcept nogil
    cdef int ordinal = -1, kind = 0
    cdef void *library = open_library(b"libcuda.so.1", 0)
    resolve(library, <void **>&ask, [b"cuPointerGetAttribute"])
    if ask(&kind, 2, address) != 0 or kind != 2 or ask(&ordinal, 9, address) != 0:
        return -1
    return ordinal
