# The state of one lane: a thread's share of a server. Nothing here is shared with other lanes.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bpsx.core.slab cimport Slabs
from bpsx.core.trace.recorder cimport Watch
from bpsx.kernels.abi cimport Kernels
from bpsx.server.store cimport Entry
from bpsx.transports.abi cimport Endpoint, Message

cdef enum:
    N_DTYPES = 32
    MAX_SLOTS = 1 << 22
    MAX_PARTITION_BYTES = 1099511627776
    RECEIVE_AT_ONCE = 16        # then what was batched is sent

cdef struct Out:                # small answers on their way to one worker
    char *frame
    size_t size

# with BYTEPS_SERVER_ENABLE_SCHEDULE: a message that waits for its turn
cdef struct Pending:
    Message *message
    int64_t urgency
    int64_t arrived             # when it came
    uint64_t order

cdef struct Lane:
    Endpoint *endpoint
    uint64_t job
    uint32_t epoch
    uint32_t workers            # that speak to us
    uint32_t processes          # for how many each of them speaks
    bint asynchronous           # pushes may ask to be added to a value of the lane's
    bint fixed_order
    bint scheduled
    char *scratch               # for compressed keys, one after the other
    uint64_t scratch_bytes
    int64_t spin_ns
    Entry **entries             # by slot
    Slabs slabs                 # where they are
    uint32_t n_entries
    Out *outs                   # by rank
    Kernels kernels[N_DTYPES]   # by dtype code; add is NULL until loaded
    void *owner                 # the Python object that loads kernels
    Pending *pending
    uint32_t n_pending
    uint32_t pending_capacity
    uint64_t arrivals
    int64_t news                # `gone`, `joined` or `stopping` has changed
    int64_t stopping
    int64_t *gone               # by sender: the rank of who has left the job, plus 1
    bint somebody_gone
    int64_t *joined             # by rank: has called join(); rounds close without it
    bint somebody_joined
    Watch *watch                # NULL: nobody wants to know
    # Counters
    int64_t rounds
    int64_t bytes               # of closed rounds
    int64_t messages_in
    int64_t messages_out
    int64_t malformed
    int64_t repeated
    int64_t dropped
