# State of a lane, which is a server thread with a share of the keys. Lanes share nothing of it.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from bpsx.core.slab cimport Slabs
from bpsx.core.trace.watch cimport Watch
from bpsx.core.wire cimport Settlement
from bpsx.kernels.abi cimport Kernels
from bpsx.server.store cimport KeyState
from bpsx.transports.abi cimport Endpoint, Message

cdef enum:
    N_DTYPES = 32
    MAX_SLOTS = 1 << 22
    MAX_PARTITION_BYTES = 1099511627776
    RECEIVE_AT_ONCE = 16        # messages received before batched replies are sent

cdef struct Out:                # batch of small replies to one worker
    char *frame
    size_t size
    # results that all have got, to be said with the next message to it
    Settlement *settled
    uint32_t n_settled
    uint32_t settled_capacity
    uint64_t settled_bytes      # bytes of those results

cdef struct Said:               # a sender's reports on keys that came here in a term
    uint32_t came               # HAVEs that have arrived
    uint32_t due                # HAVEs that it has sent, if
    bint all                    # ... it has said how many

cdef struct Gathered:           # all senders' reports on keys that came here in a term
    Said *by                    # by sender; NULL: nothing so far
    bint over                   # all have said how many, and all HAVEs have arrived
    uint32_t asking             # keys for which an outcome has been asked for and has not come

cdef struct Rebuilds:           # compressed keys whose state has to be rebuilt
    KeyState *first             # keys that wait to be rebuilt, by Rebuild.next
    KeyState *last
    uint64_t under_way          # bytes that are on their way for others

cdef struct Terms:
    Gathered *at                # by term
    uint32_t n
    int64_t latest              # latest term that a worker has reported; any thread reads it
    uint32_t joins              # joins of all workers that have ended; see Have.joins
    uint32_t born               # latest term before the lane began: it gets no key in it
    # latest term in which a worker was dropped or entered; what was sent before is ignored
    # (drops.pxd)
    uint32_t era
    uint32_t reset              # latest term in which a residual was lost

cdef struct Yield:              # slots that the lane yields in a term: server/yields.pxd
    uint32_t term
    # A slot is yielded if it is below `limit` and bit slot % n of `classes` is set.
    uint32_t limit
    uint32_t n
    uint64_t classes
    uint8_t *said               # by sender: it has sent YIELD
    bint over                   # all senders have, and the lane has forgotten the keys

cdef struct Yields:
    Yield *at
    uint32_t n
    uint32_t capacity

# With BYTEPS_SERVER_ENABLE_SCHEDULE: a received message that has not been handled.
cdef struct Pending:
    Message *message
    int64_t urgency             # highest priority of its pushes
    int64_t arrived             # time of arrival, ns
    uint64_t order              # sequence number of its arrival

cdef struct PendingQueue:       # sorted, the most urgent last
    Pending *items
    uint32_t n
    uint32_t capacity
    uint64_t arrivals           # messages that have been queued so far

cdef struct LaneSettings:       # constant while the lane runs
    uint64_t job
    uint32_t senders            # one per worker, or one per machine
    uint32_t processes          # workers for which each sender speaks
    bint asynchronous           # pushes may be added to a value that the lane keeps
    bint fixed_order            # sum in the order of senders
    bint scheduled              # handle the most urgent message first
    bint shrinks                # the job goes on without workers that it loses
    # bytes of a sender's log of a compressed key, as a multiple of the key's state; 0: no snapshots
    double log_ratio
    int64_t spin_ns

cdef struct Scratch:
    char *at
    uint64_t size               # bytes

cdef struct Keys:
    KeyState **at               # by slot
    uint32_t n
    Slabs slabs                 # memory of the states
    KeyState *spare             # states of keys that have left, by KeyState.spare
    # Numbers of slots and of keys up to the highest ones that workers have named; any thread.
    int64_t slots_named
    int64_t keys_named

# Workers that left, joined, were lost or have entered; any thread sets `news`, gone, joined,
# dropped, entered.
cdef struct Absent:
    int64_t news                # one of these fields has changed since the last notice()
    int64_t *gone               # by sender: rank of a worker that has left the job, plus 1; or 0
    bint any_gone
    int64_t *joined             # by sender: has called join(), so rounds close without it
    int64_t *dropped            # by sender: term in which the job has lost it; 0: it has not
    int64_t *entered            # by sender: term of entry, until the lane handles it; else 0
    # The last two as of the last notice(): they must not change while the lane handles a push.
    bint *lost
    bint *skipped               # it has joined, or is lost
    bint any_skipped
    uint32_t living             # senders that are not lost
    bint *departed              # by sender: its values are with others (kept_values.pxd)
    int64_t joins               # joins that have ended

cdef struct LaneCounters:
    int64_t rounds
    int64_t bytes               # bytes of the results of closed rounds
    int64_t messages_in
    int64_t messages_out
    int64_t malformed
    int64_t repeated
    int64_t taken_over          # keys that have come from lost lanes
    int64_t yielded             # keys that have gone to other lanes while this one lives
    # records about such keys that came later, or from before a worker was lost; ignored
    int64_t stale
    int64_t snapshots           # sent
    int64_t replayed            # sums of compressed keys
    int64_t undone              # sums of compressed keys that were taken back
    int64_t reset               # compressed keys whose residual was lost with a worker
    int64_t dropped

cdef struct Lane:
    Endpoint *endpoint
    LaneSettings settings
    Scratch scratch             # working memory of the codecs, for one key at a time
    Keys keys
    Out *outs                   # by sender
    char *head                  # room for the records before a large body
    # By sender, its pushes in the value that is about to be sent; NULL: senders keep no values.
    uint32_t *applied
    Kernels kernels[N_DTYPES]   # by dtype code; add is NULL until loaded
    void *owner                 # the Python object that loads kernels
    PendingQueue pending
    int64_t stopping
    Absent absent
    Terms terms
    Rebuilds rebuilds
    Yields yields
    uint8_t *beside             # by sender: it is on this machine
    Watch *watch                # counters and trace; NULL: neither is wanted
    LaneCounters counters
