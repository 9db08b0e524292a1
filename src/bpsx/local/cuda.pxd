# libcuda.so.1 and libnccl.so.2 as C sees them, and the core's function table over them
# (core/gpu/device.pxd). _cuda.pyx opens the libraries and fills the tables.
#
# Constants and signatures are those of CUDA's driver API and of NCCL; both keep them stable.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf

from bpsx.core.gpu.device cimport (
    ALL_GATHER, ALL_REDUCE, BETWEEN, BROADCAST_FROM, REDUCE_SCATTER, REDUCE_TO, Device,
)
from bpsx.system.sync cimport atomic_load, atomic_store

cdef extern from *:
    """
    static inline void *bpsx_take(void **p) { return __atomic_exchange_n(p, NULL, __ATOMIC_SEQ_CST);
    }
    """
    void *atomic_take "bpsx_take"(void **p) noexcept nogil     # leaves NULL

cdef enum:
    MOST_SLABS = 4096
    MOST_ROOMS = 40
    MOST_BLOCKS = 4096
    NOT_FOUND = 500             # CUDA_ERROR_NOT_FOUND
    TEXT = 512
    NOT_READY = 600             # CUDA_ERROR_NOT_READY
    RELAXED = 2                 # CU_STREAM_CAPTURE_MODE_RELAXED
    NO_TIMING = 2               # CU_EVENT_DISABLE_TIMING
    NON_BLOCKING = 1            # CU_STREAM_NON_BLOCKING
    PORTABLE = 1                # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE
    UNDEFINED = -2147483648     # NCCL_CONFIG_UNDEF_INT
    ID_BYTES = 128              # NCCL_UNIQUE_ID_BYTES

cdef struct UniqueId:           # ncclUniqueId, passed by value
    char internal[ID_BYTES]

cdef struct Options:            # ncclConfig_t of NCCL 2.17
    size_t size
    unsigned int magic
    unsigned int version
    int blocking
    int cluster
    int least                   # lower bound of the channels; `most` is the upper
    int most
    const char *net

# More than 20 fields: a table of functions.
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
    int (*launch)(
        void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
        unsigned int, void *, void **, void **
    ) noexcept nogil

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

# `self` of the table's functions.
cdef struct GpuState:
    Driver driver
    Nccl nccl
    void *context
    void *comm                  # the communicator
    void *slabs[MOST_SLABS]     # pinned memory of our own
    int n_slabs
    void *shared[MOST_SLABS]    # pinned parts of the segment of the machine's root
    int n_shared
    uintptr_t rooms[MOST_ROOMS] # memory on the GPU
    int n_rooms
    void *dividers[9]           # division kernels, by our dtype codes
    unsigned int threads        # threads of a block of these kernels
    int64_t failing             # nonzero: `failure` is being written or has been
    char failure[TEXT]

cdef inline int nccl_type(int dtype) noexcept nogil:
    """Return NCCL's number of one of our dtype codes. bfloat16 has one since NCCL 2.10."""
    if dtype == 1:
        return 6                    # float16
    if dtype == 2:
        return 9                    # bfloat16
    if dtype == 3 or dtype == 4:
        return dtype + 4            # float32, float64
    if dtype == 5 or dtype == 6:
        return 6 - dtype            # uint8, int8
    return 2 if dtype == 7 else 4   # int32, int64


# ---- the function table

cdef inline int failed(GpuState *s, const char *what, int rc) noexcept nogil:
    """Keep the first failure's text; return ``rc``."""
    cdef const char *text = NULL
    if rc != 0 and atomic_load(&s.failing) == 0:
        atomic_store(&s.failing, 1)
        if s.driver.error_string(rc, &text) == 0:
            snprintf(s.failure, TEXT, b"%s: CUDA error %d: %s", what, rc, text)
        else:
            snprintf(s.failure, TEXT, b"%s: CUDA error %d", what, rc)
    return rc


cdef inline int nccl_failed(GpuState *s, const char *what, int rc) noexcept nogil:
    if rc != 0 and atomic_load(&s.failing) == 0:
        atomic_store(&s.failing, 1)
        snprintf(s.failure, TEXT, b"%s: NCCL error %d: %s", what, rc, s.nccl.error_string(rc))
    return rc


cdef inline int enter(void *self) noexcept nogil:
    """Make the GPU's context the thread's; return the token for `leave`.

    Also take this thread out of other threads' capture of a CUDA graph, which a query of an event
    would break.
    """
    cdef GpuState *s = <GpuState *>self
    cdef int mode = RELAXED
    if failed(s, b"cuCtxPushCurrent", s.driver.push(s.context)) != 0:
        return -1
    s.driver.exchange_capture_mode(&mode)
    return mode


cdef inline void leave(void *self, int token) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    cdef void *was = NULL
    s.driver.exchange_capture_mode(&token)
    s.driver.pop(&was)


cdef inline int copy(
    void *self, void *to, const void *source, uint64_t nbytes, void *stream
) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    return failed(
        s, b"cuMemcpyAsync", s.driver.copy(<uintptr_t>to, <uintptr_t>source, nbytes, stream)
    )


cdef inline int fill(
    void *self, void *at, unsigned char value, uint64_t nbytes, void *stream
) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    return failed(s, b"cuMemsetD8Async", s.driver.fill(<uintptr_t>at, value, nbytes, stream))


cdef inline int record(void *self, void *event, void *stream) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    return failed(s, b"cuEventRecord", s.driver.event_record(event, stream))


cdef inline int wait(void *self, void *stream, void *event) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    return failed(s, b"cuStreamWaitEvent", s.driver.stream_wait(stream, event, 0))


cdef inline int query(void *self, void *event) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    cdef int rc = s.driver.event_query(event)
    if rc == 0:
        return 1
    return 0 if rc == NOT_READY else -failed(s, b"cuEventQuery", rc)


cdef inline void *new_event(void *self) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    cdef void *event = NULL
    return (
        event
        if failed(s, b"cuEventCreate", s.driver.event_new(&event, NO_TIMING)) == 0
        else NULL
    )


cdef inline void drop_event(void *self, void *event) noexcept nogil:
    (<GpuState *>self).driver.event_drop(event)


cdef inline int pin(void *self, void *at, uint64_t nbytes) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    # If a former session had left the address registered, copies would go to its pages. So that is
    # an error too.
    cdef int rc = failed(s, b"cuMemHostRegister", s.driver.host_register(at, nbytes, PORTABLE))
    if rc == 0 and s.n_shared < MOST_SLABS:
        s.shared[s.n_shared] = at
        s.n_shared += 1
    return rc


cdef inline void *host_memory(void *self, uint64_t nbytes) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    cdef void *at = NULL
    if failed(s, b"cuMemHostAlloc", s.driver.host_alloc(&at, nbytes, PORTABLE)) != 0:
        return NULL
    if s.n_slabs < MOST_SLABS:
        s.slabs[s.n_slabs] = at
        s.n_slabs += 1
    return at


cdef inline int collect(
    void *self, int what, const void *send, void *receive, uint64_t count, int dtype, int reduction,
    int root, void *stream
) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    cdef void *comm = s.comm
    cdef int kind = nccl_type(dtype)
    if what == ALL_REDUCE:
        return nccl_failed(
            s, b"ncclAllReduce",
            s.nccl.all_reduce(send, receive, count, kind, reduction, comm, stream)
        )
    if what == REDUCE_SCATTER:
        return nccl_failed(
            s, b"ncclReduceScatter",
            s.nccl.reduce_scatter(send, receive, count, kind, reduction, comm, stream)
        )
    if what == ALL_GATHER:
        return nccl_failed(
            s, b"ncclAllGather", s.nccl.all_gather(send, receive, count, kind, comm, stream)
        )
    if what == REDUCE_TO:
        return nccl_failed(
            s, b"ncclReduce",
            s.nccl.reduce(send, receive, count, kind, reduction, root, comm, stream)
        )
    return nccl_failed(
        s, b"ncclBroadcast", s.nccl.broadcast(send, receive, count, kind, root, comm, stream)
    )


cdef inline int divide(
    void *self, void *at, uint64_t count, int dtype, int64_t divisor, void *stream
) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    cdef void *arguments[3]
    cdef unsigned int blocks = <unsigned int>min(
        (count + s.threads - 1) // max(s.threads, 1), <uint64_t>MOST_BLOCKS
    )
    arguments[0], arguments[1], arguments[2] = &at, &count, &divisor
    if s.dividers[dtype] == NULL:
        return failed(s, b"no kernel divides this element type", NOT_FOUND)
    return failed(
        s, b"cuLaunchKernel",
        s.driver.launch(
            s.dividers[dtype], blocks, 1, 1, s.threads, 1, 1, 0, stream, arguments, NULL
        )
    )


cdef inline int room(Device *d, uint64_t nbytes) noexcept nogil:
    """Grow the `zeros` and `waste` memory to at least ``nbytes`` each.

    The old memory is kept until the end, because queued work may use it. Since the size doubles,
    that is little.
    """
    cdef GpuState *s = <GpuState *>d.self
    cdef uintptr_t at = 0
    cdef uint64_t most = max(nbytes, 2 * d.most)
    if s.n_rooms == MOST_ROOMS:
        return failed(s, b"cuMemAlloc", NOT_FOUND)
    if failed(s, b"cuMemAlloc", s.driver.alloc(&at, 2 * most)) != 0:
        return -1
    s.rooms[s.n_rooms] = at
    s.n_rooms += 1
    d.zeros = <char *>at
    d.waste = <char *>at + most
    d.most = most
    return failed(s, b"cuMemsetD8Async", s.driver.fill(at, 0, 2 * most, d.streams[BETWEEN]))


cdef inline int begin_group(void *self) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    return nccl_failed(s, b"ncclGroupStart", s.nccl.group_start())


cdef inline int end_group(void *self) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    return nccl_failed(s, b"ncclGroupEnd", s.nccl.group_end())


cdef inline bint broken(void *self) noexcept nogil:
    return atomic_load(&(<GpuState *>self).failing) != 0


cdef inline void abort(void *self) noexcept nogil:
    cdef GpuState *s = <GpuState *>self
    cdef void *comm = atomic_take(&s.comm)
    if comm != NULL:
        s.nccl.abort(comm)


cdef inline int init_with(
    Nccl *nccl, void **comm, int size, UniqueId one, int rank, int rings
) noexcept nogil:
    """Same as ncclCommInitRank, with at least ``rings`` channels."""
    cdef Options options
    options.size = sizeof(Options)
    options.magic = 0xCAFEBEEF
    # The NCCL version of this ncclConfig_t; later versions accept it.
    options.version = 21700
    options.blocking = options.cluster = options.most = UNDEFINED
    options.least = rings
    options.net = NULL
    return nccl.init_rank_config(comm, size, one, rank, &options)


cdef inline int enter_nothing(void *self) noexcept nogil:
    """Replacement of `enter` after the GPU has been closed: all events count as fired."""
    return 0


cdef inline void leave_nothing(void *self, int token) noexcept nogil:
    pass


cdef inline int always(void *self, void *event) noexcept nogil:
    return 1


cdef inline int warm(Device *d, int size) noexcept nogil:
    """Have NCCL create its connections now, with one collective of each kind.

    Otherwise the first collective of a kind would wait for them on the core's driver thread.
    Returns 0, or an error.
    """
    cdef void *stream = d.streams[BETWEEN]
    cdef uint64_t count = d.most // size // 4
    cdef int rc = d.collect(d.self, ALL_REDUCE, d.zeros, d.waste, 1, 3, 0, 0, stream)
    rc |= d.collect(d.self, ALL_REDUCE, d.zeros, d.waste, d.most // 4, 3, 0, 0, stream)
    rc |= d.collect(d.self, REDUCE_SCATTER, d.zeros, d.waste, count, 3, 0, 0, stream)
    rc |= d.collect(d.self, ALL_GATHER, d.zeros, d.waste, count, 3, 0, 0, stream)
    rc |= d.collect(d.self, REDUCE_TO, d.zeros, d.waste, count, 3, 0, 0, stream)
    rc |= d.collect(d.self, BROADCAST_FROM, d.zeros, d.waste, count, 3, 0, 0, stream)
    return rc
