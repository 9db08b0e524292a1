# A Watch: what the core or a lane records, prints and counts. Its one writer fills it by
# recorder.pxd, without the GIL and without a lock; telemetry/_recorder.pyx reads it from another
# thread.
from libc.stdint cimport int16_t, int64_t, uint8_t, uint32_t, uint64_t

from bpsx.core.slab cimport Slabs

cdef enum:
    BLOCK_RECORDS = 2048
    # Limit for the life of a Watch: 2^20 records. Later records are counted and dropped.
    MOST_BLOCKS = 512
    STAGE_NAMES = 32
    STAGE_NAME_BYTES = 24

cdef enum Recording:
    WINDOW = 1                  # from BYTEPS_TRACE_START_STEP to BYTEPS_TRACE_END_STEP
    LIVE = 2                    # on demand

cdef enum What:                 # kind of a record: a stage (core/partition.pxd), or one of these
    TOTAL = 0                   # whole push_pull of a worker
    RECEIVE = 64                # server: from the arrival of a push to its sum
    SUM = 65
    SEND = 66
    ROUND = 67                  # from the first push to the replies

cdef struct Record:             # 48 bytes; timeline.py reads the same layout
    int64_t begin               # in nanoseconds of the monotonic clock, as `end`
    int64_t end
    uint64_t key
    uint64_t nbytes
    uint32_t step               # number of the tensor's push_pull, from 1
    uint32_t peer               # server: the worker; with ROUND: the worker that pushed last
    uint8_t what
    uint8_t flags
    int16_t status              # with TOTAL: status of the push_pull
    uint32_t spare

cdef struct Block:
    int64_t next                # Block *, published atomically
    int64_t n
    Record records[BLOCK_RECORDS]

cdef struct Named:              # server: a registered key; the list only grows
    Named *next
    uint64_t key
    uint64_t nbytes
    uint8_t dtype
    uint32_t name_bytes
    char name[1]

cdef struct Late:               # rounds and time in which a round waited only for this worker
    int64_t rounds
    int64_t ns

# A server's part of a Watch. Owned by the writer, read by any thread.
cdef struct ServerWatch:
    int64_t now                 # time at which handling of the current message began
    int64_t arrived             # ... and at which it arrived, if it had to wait
    int64_t received            # bytes
    int64_t sent
    int64_t open_rounds
    int64_t waited_ns           # from a round's first push to its last, in total
    int64_t named               # Named *, published atomically
    Slabs slabs                 # memory of that list; owned by its writer
    Late *late                  # by rank
    uint32_t n_late

cdef struct Watch:
    int64_t on                  # any of the next group is on: the only check on the data path
    int64_t live
    bint window
    uint32_t first
    uint32_t last
    bint messages               # PS_VERBOSE=2
    bint values                 # print the values of sample_key
    bint all_values             # ... of every key
    uint64_t sample_key
    bint keys                   # PS_KEY_LOG
    bint show_time
    char who[64]
    char stages[STAGE_NAMES][STAGE_NAME_BYTES]

    Block *tail                 # owned by the writer
    int64_t blocks
    int64_t lost
    Block *head                 # owned by the reader
    int64_t taken
    ServerWatch server
