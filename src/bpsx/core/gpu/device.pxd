# A GPU as the core sees it: a table of C functions, filled by local/_cuda.pyx.
#
# Streams and events are the driver's handles (CUstream, CUevent). Functions that return int give 0,
# or the library's error number, which `failure` explains. They may be called by whoever has
# entered, one thread at a time but for `record` and `wait`.
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum Collective:
    ALL_REDUCE = 0              # send[0:count] of all, added, into everybody's receive
    REDUCE_SCATTER = 1          # count elements for each: the sum of the process's own part
    ALL_GATHER = 2              # count elements of each, in the order of the group
    REDUCE_TO = 3               # as ALL_REDUCE, but into `root`'s receive only
    BROADCAST_FROM = 4          # root's send into everybody's receive

cdef enum Reduction:
    SUM = 0
    # NCCL's codes; each is divided before it is added, so halves do not overflow
    MEAN = 4

cdef enum:                      # our streams of a GPU
    DOWN = 0                    # copies to the host,
    UP = 1                      # ... from there,
    BETWEEN = 2                 # ... and NCCL's
    N_STREAMS = 3

cdef struct Device:
    void *self
    # the GPU's context is the thread's until `leave`, which gets what this gives, from 0
    int (*enter)(void *self) noexcept nogil
    void (*leave)(void *self, int token) noexcept nogil
    int (*copy)(
        void *self, void *to, const void *source, uint64_t nbytes, void *stream
    ) noexcept nogil
    int (*fill)(
        void *self, void *at, unsigned char value, uint64_t nbytes, void *stream
    ) noexcept nogil
    int (*record)(void *self, void *event, void *stream) noexcept nogil
    # the stream waits, not the caller
    int (*wait)(void *self, void *stream, void *event) noexcept nogil
    # 1: has come, 0: not yet, less than 0: the error, negated
    int (*query)(void *self, void *event) noexcept nogil
    void *(*new_event)(void *self) noexcept nogil       # NULL: there is none
    void (*drop_event)(void *self, void *event) noexcept nogil
    # host memory that the copy engines shall reach
    int (*pin)(void *self, void *at, uint64_t nbytes) noexcept nogil
    # ... of its own; NULL: there is none
    void *(*host_memory)(void *self, uint64_t nbytes) noexcept nogil
    int (*collect)(
        void *self, int what, const void *send, void *receive, uint64_t count, int dtype,
        int reduction, int root, void *stream
    ) noexcept nogil
    # integers, rounding down
    int (*divide)(
        void *self, void *at, uint64_t count, int dtype, int64_t divisor, void *stream
    ) noexcept nogil
    # have so many `zeros`, and as much `waste`
    int (*room)(Device *d, uint64_t nbytes) noexcept nogil
    int (*begin_group)(void *self) noexcept nogil
    int (*end_group)(void *self) noexcept nogil
    # a function has failed; there is a text about it
    bint (*broken)(void *self) noexcept nogil
    # what waits on the GPU for another process ends
    void (*abort)(void *self) noexcept nogil
    void *streams[N_STREAMS]
    void *fence                 # an event of the driver's
    # on the GPU, for who takes part in a collective without a tensor: what it gives,
    char *zeros
    char *waste                 # ... what it gets,
    uint64_t most               # ... and how many bytes each has
    int64_t ready               # the communicators are there; set by any thread


cdef inline uint32_t item_bytes(uint32_t dtype) noexcept nogil:
    """Bytes of an element, by dtypes.py's codes."""
    if dtype == 5 or dtype == 6:
        return 1
    if dtype == 1 or dtype == 2:
        return 2
    return 8 if dtype == 4 or dtype == 8 else 4


cdef inline int mark_end(Device *d, void *over, bint clean, int last) noexcept nogil:
    """Record `over`, which comes with all that a task has queued: that is on the stream `last`
    if it ended well, anywhere if not.
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
