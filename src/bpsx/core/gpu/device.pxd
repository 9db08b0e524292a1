# Interface of a GPU: a table of C functions, filled by local/_cuda.pyx.
#
# Streams and events are handles of the NVIDIA driver (CUstream, CUevent). Functions that return int
# return 0 or the library's error number, which `failure` explains. A thread must have entered
# before it calls them; only `record` and `wait` may be called by several threads at once.
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum Collective:
    ALL_REDUCE = 0              # sum send[0:count] of all processes into every process's receive
    REDUCE_SCATTER = 1          # count elements each: the sum of the process's own part
    ALL_GATHER = 2              # count elements of each process, in the order of the group
    REDUCE_TO = 3               # as ALL_REDUCE, but only into the receive of `root`
    BROADCAST_FROM = 4          # copy the root's send into every process's receive

cdef enum Reduction:
    SUM = 0
    # NCCL's codes. MEAN divides each value before it is added, so half types do not overflow.
    MEAN = 4

cdef enum:                      # the core's streams of a GPU
    DOWN = 0                    # copies to the host,
    UP = 1                      # ... from there,
    BETWEEN = 2                 # ... and NCCL's collectives
    N_STREAMS = 3

# More than 20 fields: a table of functions.
cdef struct Device:
    void *self
    # Makes the GPU's context current in this thread; `leave` takes the token, which is >= 0.
    int (*enter)(void *self) noexcept nogil
    void (*leave)(void *self, int token) noexcept nogil
    int (*copy)(
        void *self, void *to, const void *source, uint64_t nbytes, void *stream
    ) noexcept nogil
    int (*fill)(
        void *self, void *at, unsigned char value, uint64_t nbytes, void *stream
    ) noexcept nogil
    int (*record)(void *self, void *event, void *stream) noexcept nogil
    # makes the stream wait, not the caller
    int (*wait)(void *self, void *stream, void *event) noexcept nogil
    # 1: the event has fired, 0: not yet, negative: the negated error
    int (*query)(void *self, void *event) noexcept nogil
    void *(*new_event)(void *self) noexcept nogil       # NULL on failure
    void (*drop_event)(void *self, void *event) noexcept nogil
    # registers host memory for the copy engines
    int (*pin)(void *self, void *at, uint64_t nbytes) noexcept nogil
    # allocates pinned host memory; NULL on failure
    void *(*host_memory)(void *self, uint64_t nbytes) noexcept nogil
    int (*collect)(
        void *self, int what, const void *send, void *receive, uint64_t count, int dtype,
        int reduction, int root, void *stream
    ) noexcept nogil
    # divides integers, rounding down
    int (*divide)(
        void *self, void *at, uint64_t count, int dtype, int64_t divisor, void *stream
    ) noexcept nogil
    # makes `zeros` and `waste` at least this large
    int (*room)(Device *d, uint64_t nbytes) noexcept nogil
    int (*begin_group)(void *self) noexcept nogil
    int (*end_group)(void *self) noexcept nogil
    # whether a function has failed; its error text is kept
    bint (*broken)(void *self) noexcept nogil
    # ends work on the GPU that waits for another process
    void (*abort)(void *self) noexcept nogil
    void *streams[N_STREAMS]
    void *fence                 # event for mark_end; owned by the driver thread
    # on the GPU, for a collective in which this process has no tensor:
    char *zeros                 # memory that it sends,
    char *waste                 # ... memory that it receives into,
    uint64_t most               # ... and the bytes of each
    int64_t ready               # the communicators exist; set by any thread


cdef inline uint32_t item_bytes(uint32_t dtype) noexcept nogil:
    """Bytes of an element, by the codes of dtypes.py."""
    if dtype == 5 or dtype == 6:
        return 1
    if dtype == 1 or dtype == 2:
        return 2
    return 8 if dtype == 4 or dtype == 8 else 4


cdef inline int mark_end(Device *d, void *over, bint clean, int last) noexcept nogil:
    """Record a task's completion event `over` on its last stream.

    After a failure that stream first waits for all others, as work may be queued on any of them.
    """
    cdef int i, rc
    if not clean:
        for i in range(N_STREAMS):
            if i != last:
                rc = d.record(d.self, d.fence, d.streams[i])
                if rc == 0:
                    rc = d.wait(d.self, d.streams[last], d.fence)
                if rc != 0:
                    return rc
    return d.record(d.self, over, d.streams[last])
