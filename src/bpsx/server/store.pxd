# A lane's state of its keys: which worker has pushed what in the open round. Pure: no sockets, no
# clock.
#
# A round of a key opens with its first push and closes when each worker has pushed once. The lane
# adds pushes as they arrive. With fixed order it adds them by sender, and holds a push until all
# lower senders have been added.
#
# Each worker counts its own rounds: a push carries the number of its sender's earlier pushes of
# this key. The workers' counts differ after join(), because a joined worker takes part in fewer
# rounds. They also differ in asynchronous training, where workers do not wait for each other.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from bpsx.core.wire cimport ASYNC, BROADCAST, DISAGREED, PACKED, Coded, Header
from bpsx.core.codec.packed cimport Packed
from bpsx.core.codec.state cimport most_bytes, packed_free
from bpsx.core.slab cimport Slabs, take_record
from bpsx.core.status cimport E_JOINED, E_MISMATCH
from bpsx.core.transitions cimport OF_ROUND, count_transition
from bpsx.kernels.abi cimport Kernels, accumulate, shift_for, wants_wide
from bpsx.transports.abi cimport Landing, Message

cdef enum Verdict:
    ACCEPTED = 0                # counted
    REPEATED = 1                # this worker has pushed in this round already; ignore it
    MALFORMED = 2               # wrong round, length, dtype or key
    FAILED = 3                  # counted, but the round has failed and ignores its body

# State of the open round of a key; `after_round_state` has the transitions.
cdef enum RoundState:
    EMPTY = 0                   # no push yet
    OPEN = 1
    FAILING = 2                 # it has failed; the lane says so once all senders have pushed
    ABANDONED = 3               # for ever: a worker that has left would have to push
    REFUSED = 4                 # for ever: unknown compression, nothing is summed

cdef struct Share:
    # One worker's part in the open round.
    # Number of the worker's current round of this key; outlives the open round.
    uint32_t round
    bint pushed
    # It was sent the latest result, which has to be acknowledged: it has not done so yet,
    bint unacknowledged
    bint settles                # ... and has not been told that all have
    bint lacked                 # it lacked the latest sum when the lane took the key over
    uint64_t cookie             # echoed in the reply
    # Held until its turn in fixed order; NULL: none is held, or `body` is a copy.
    Message *message
    char *body                  # body of the held push; NULL: none
    uint64_t length             # bytes of `body`
    Landing landing             # address that the worker suggests for the reply's body

cdef struct RoundCount:         # the open round
    uint32_t pushed             # senders that have pushed
    uint32_t added              # senders whose push is in the sum
    uint32_t next_sender        # in fixed order: the next sender to add
    uint32_t opener             # the sender that opened the round and so chose the operation

cdef struct Operation:
    uint32_t divisor
    bint broadcast              # `divisor` is then the root's rank
    bint seeding                # the broadcast's result becomes `value`

cdef struct Failure:
    int status                  # why the round fails; 0: it does not
    uint32_t a, b
    bint named                  # a and b are ranks of workers, not senders

cdef struct RoundMemory:        # freed at the round's end: the key may never be pushed again
    Message *first              # the first large push: its body is the accumulator and the result
    char *small                 # a small key's accumulator and result, nbytes
    # Accumulator in the wide type, for half and 8-bit types summed over three or more senders.
    char *wide
    char *sum                   # the result: first.body or small

cdef struct Saving:             # snapshots of a compressed key; server/snapshots.pxd
    uint32_t stored             # number of the sum that the stored snapshot follows; 0: none is
    uint32_t sent               # ... that the snapshot under way follows
    int holder                  # sender to which it is under way; -1: none is
    bint unasked                # the holder may have sent its next push before it got the snapshot
    uint64_t logged             # bytes of a sender's pushes since the latest snapshot
    uint64_t unstored           # ... and before it, as long as it is under way
    uint64_t due                # bytes in `logged` with which a snapshot is due; 0: none ever is

cdef struct Compressed:         # a compressed key; see core/codec/state.pxd
    Packed *packed
    uint32_t sum                # number of the latest sum
    bint whole                  # `packed` has the state after that sum; else it has to be rebuilt
    bint restored               # ... which no snapshot of that sum has, as it was set later
    # In a job that shrinks: the state before the latest sum, the number of the sum before, and
    # `restored` of then.
    char *before
    uint32_t before_sum
    bint before_restored
    uint64_t longest            # bytes of the longest push since then
    Saving saving
    Kernels *wide_kernels       # of the wide type
    # sum of the open round, elements of the wide type; or its pushes (keeps_pushes())
    char *acc
    double rate                 # the learning rate of the open round
    uint64_t counter            # largest counter of the open round's pushes
    bint alike                  # all pushes of the open round had the same counter

cdef struct KeyState

# State of a key that has come from a lost lane; docs/internals/elastic.md has the transitions.
cdef enum TakeoverState:
    GATHERING = 0               # not all senders have sent their reports
    ASKING = 1                  # an outcome that a sender lacks, or a state, has been asked for
    TAKEN = 2                   # the key is summed like any other; late senders may have to push

cdef struct Have:               # a sender's report (HAVE) on such a key
    uint32_t round
    uint32_t joins              # joins from which `round` counts
    uint32_t cookie
    uint8_t there               # the report has arrived
    uint8_t waits, keeps        # flags WAITS, KEPT
    # 1: it lacks the outcome that others have. 2: it lacks earlier ones, too, which is an error.
    # In an asynchronous job, 1: its unanswered push is part of the value.
    uint8_t late
    # In an asynchronous job, the pushes of each sender in the value that it keeps; or NULL.
    uint32_t *applied

cdef struct HeldPush:           # a push that came before the key was taken
    bint there
    Header header
    Message *message            # NULL: `body` is a copy
    char *body

cdef struct Piece:              # body of a record that is needed later
    bint there
    Message *message            # NULL: `body` is a copy
    char *body
    uint64_t length

cdef struct SenderLog:          # a sender's log of a compressed key
    bint asked                  # it has been asked for
    bint unanswered             # the sender's unanswered push is part of the latest sum
    Piece *parts
    uint32_t n_parts
    uint32_t came               # parts that are there
    uint32_t part               # the part and the place in it up to which it has been read
    uint64_t at

cdef struct Rebuild:            # rebuild of a compressed key's state; server/rebuild.pxd
    int holder                  # sender that holds the snapshot; -1: the state was zero at first
    uint32_t base               # number of the sum that the snapshot follows
    uint32_t last               # number of the latest sum
    Piece snapshot
    SenderLog *logs             # by sender
    uint32_t awaited            # snapshots and logs that have been asked for and are not complete
    uint64_t bytes              # about how many will come
    bint started                # they have been asked for
    KeyState *next              # next key that waits to be rebuilt

cdef struct Takeover:
    TakeoverState state
    uint32_t awaited            # 1 for an outcome that was asked for, and 1 for a state
    bint asked                  # an outcome has been asked for and has not come,
    uint32_t holder             # ... of this sender
    Coded *coded                # by sender; NULL: not compressed, or nothing has been said
    Rebuild *rebuild            # NULL: the state is there
    Have *haves                 # by sender
    uint32_t most               # most rounds whose outcome a sender has
    HeldPush *held              # by sender; NULL: none so far
    uint32_t late               # senders that have not been given the outcome that they lack
    # The outcome that late senders lack: a status below 0 with two ranks, or a result.
    int status
    uint32_t a, b
    uint64_t length
    char *body
    Message *message            # holds `body`; NULL: it is a copy

cdef struct RoundTrace:         # server/trace.pxd; times in ns
    int64_t opened_ns           # first push of the open round
    int64_t latest_ns           # latest push of the open round
    uint32_t latest             # sender of the latest push
    int64_t closing_ns          # when the replies began
    uint8_t recorded            # recordings to which the round belongs

cdef struct KeyState:
    uint64_t key
    uint64_t nbytes
    uint8_t dtype
    Kernels *kernels
    uint32_t term               # see Header
    RoundState state            # set by move_round
    uint32_t rounds             # rounds that have ended
    RoundCount round
    Operation operation
    Failure failure
    Share *shares               # by sender
    RoundMemory memory
    Compressed *compressed      # NULL: not compressed
    Takeover *takeover          # NULL: the key has been here always, or all of it has been taken
    KeyState *spare             # next in Keys.spare
    uint32_t unacknowledged     # senders whose Share.unacknowledged is set
    # Value to which asynchronous pushes are added, nbytes; NULL: none yet, that is zeros.
    char *value
    int64_t holder              # sender that was sent the value last; -1: none was, or all were
    RoundTrace trace


cdef inline KeyState *entry_new(
    Slabs *slabs, KeyState **spare, const Header *h, Kernels *kernels, uint32_t senders,
) noexcept nogil:
    """Create the entry that a REGISTER describes, with its shares; its memory is part of `slabs`.

    `spare`: a list of entries of the same lane that may be used again. NULL: no memory.
    """
    cdef KeyState *e = spare[0]
    cdef size_t size = sizeof(KeyState) + senders * sizeof(Share)
    if e != NULL:
        spare[0] = e.spare
        memset(e, 0, size)
    else:
        e = <KeyState *>take_record(slabs, size)
    if e == NULL:
        return NULL
    e.shares = <Share *>(e + 1)
    e.key, e.nbytes, e.dtype, e.term = h.key, h.cookie, h.dtype, h.term
    e.holder = -1
    e.kernels = kernels
    return e


cdef inline void free_memory(char **where) noexcept nogil:
    free(where[0])
    where[0] = NULL


cdef inline void free_round(KeyState *e) noexcept nogil:
    """Free the memory of the open round. Its result must have been handed over."""
    free_memory(&e.memory.small)
    free_memory(&e.memory.wide)
    if e.compressed != NULL:
        free_memory(&e.compressed.acc)
    e.memory.sum = NULL


cdef inline void entry_free(KeyState *e) noexcept nogil:
    """Free all that the entry refers to; the entry itself belongs to the slabs."""
    free_round(e)
    free(e.value)
    if e.compressed != NULL:
        packed_free(e.compressed.packed)
        free(e.compressed.before)
    free(e.compressed)


cdef inline uint32_t after_round_state(RoundState state) noexcept nogil:
    """States that may follow, as bits."""
    if state == EMPTY:
        return 1 << OPEN | 1 << REFUSED
    if state == OPEN:
        return 1 << EMPTY | 1 << FAILING | 1 << ABANDONED
    if state == FAILING:
        return 1 << EMPTY | 1 << ABANDONED
    return 0


cdef inline void move_round(KeyState *e, RoundState state) noexcept nogil:
    count_transition(OF_ROUND, e.state, state, after_round_state(e.state))
    e.state = state


cdef inline void fail_sum(KeyState *e, int status, uint32_t a, uint32_t b) noexcept nogil:
    """Let the open round fail: nothing is added any more."""
    e.failure.status, e.failure.a, e.failure.b, e.failure.named = status, a, b, False
    move_round(e, FAILING)


cdef inline void end_round(KeyState *e, uint32_t senders, RoundState following) noexcept nogil:
    """End the open round, after the replies; the workers that pushed advance by one round.

    Held messages must have been removed before.
    """
    cdef uint32_t sender
    for sender in range(senders):
        if e.shares[sender].pushed:
            e.shares[sender].round += 1
            e.shares[sender].pushed = False
    e.rounds += 1
    e.round.pushed = 0
    e.round.added = 0
    e.round.next_sender = 0
    e.failure.status = 0
    e.memory.first = NULL
    free_round(e)
    move_round(e, following)


cdef inline void forget_round(KeyState *e, uint32_t senders) noexcept nogil:
    """Drop the open round: it is as though nothing had been pushed in it.

    Held messages must have been removed before.
    """
    cdef uint32_t sender
    for sender in range(senders):
        e.shares[sender].pushed = False
    e.round.pushed = e.round.added = e.round.next_sender = 0
    e.failure.status = 0
    e.memory.first = NULL
    free_round(e)
    if e.state == OPEN or e.state == FAILING:
        move_round(e, EMPTY)


cdef inline Verdict count_push(KeyState *e, Header *h, uint32_t senders) noexcept nogil:
    """Check a push against its key and count it. Looks at the header only."""
    cdef Share *share = &e.shares[h.sender]
    cdef bint broadcast = (h.flags & BROADCAST) != 0
    cdef bint seeding = (h.flags & ASYNC) != 0
    cdef uint64_t expected = e.nbytes
    cdef bint disagreed = (h.flags & DISAGREED) != 0
    if disagreed or broadcast and h.divisor != h.sender:
        expected = 0
    elif e.compressed != NULL and not broadcast:
        if not h.flags & PACKED or h.length > most_bytes(e.compressed.packed):
            return MALFORMED
        expected = h.length
    if (
        h.key != e.key
        or h.dtype != e.dtype
        or h.length != expected
        or h.divisor == 0 and not (broadcast or disagreed)
    ):
        return MALFORMED
    if broadcast and not disagreed and h.divisor >= senders:
        return MALFORMED
    if h.round != share.round:
        return REPEATED if h.round + 1 == share.round else MALFORMED
    if share.pushed:
        return REPEATED
    share.pushed = True
    share.cookie = h.cookie
    e.round.pushed += 1
    if e.round.pushed == 1:
        e.operation.divisor = h.divisor
        e.operation.broadcast = broadcast
        e.operation.seeding = seeding
        e.round.opener = h.sender
        move_round(e, OPEN)
    if disagreed and e.state == OPEN:
        fail_sum(
            e, E_MISMATCH if h.divisor != <uint32_t>h.priority else E_JOINED, h.divisor,
            <uint32_t>h.priority
        )
        e.failure.named = True
    elif (
        e.round.pushed > 1 and e.state == OPEN
        and (
            e.operation.divisor != h.divisor or e.operation.broadcast != broadcast
            or e.operation.seeding != seeding
        )
    ):
        fail_sum(e, E_MISMATCH, e.round.opener, h.sender)
    return FAILED if e.state == FAILING else ACCEPTED


cdef inline void note_landing(KeyState *e, uint32_t sender, const Message *m) noexcept nogil:
    """Store a counted push's landing. `m`: its message, if the body is the message's own."""
    e.shares[sender].landing.at = 0
    if m != NULL:
        e.shares[sender].landing = m.landing


cdef inline bint memory_for(char **where, uint64_t nbytes) noexcept nogil:
    if where[0] == NULL:
        where[0] = <char *>malloc(max(nbytes, 1))
    return where[0] != NULL


cdef inline int add(
    KeyState *e, Message *m, char *body, uint32_t senders, bint *kept
) noexcept nogil:
    """Add a push to the sum; *kept says that the message now belongs to the entry.

    The first large push becomes the accumulator, without a copy. Return 0, or -1 if there is no
    memory.
    """
    cdef Kernels *k = e.kernels
    cdef int64_t n = e.nbytes // k.itemsize
    kept[0] = False
    e.round.added += 1
    if e.round.added == 1:
        if m != NULL and body == m.body:
            e.memory.first = m
            e.memory.sum = body
            kept[0] = True
        else:
            if not memory_for(&e.memory.small, e.nbytes):
                return -1
            memcpy(e.memory.small, body, e.nbytes)
            e.memory.sum = e.memory.small
        if senders == 1 and e.operation.divisor > 1:
            k.divide(e.memory.sum, n, e.operation.divisor)
        return 0
    if wants_wide(k, senders) and not memory_for(&e.memory.wide, n * k.wide_itemsize):
        return -1
    accumulate(
        k, e.memory.sum, e.memory.wide, body, e.round.added - 1, senders, n, e.operation.divisor
    )
    return 0


cdef inline void finish_sum(KeyState *e, uint32_t senders) noexcept nogil:
    """Finish the sum without the last worker's push, which `add` would have finished.

    The missing senders have joined and count as zeros.
    """
    cdef Kernels *k = e.kernels
    cdef int64_t n = e.nbytes // k.itemsize
    if e.round.added == 0 or e.round.added >= senders or e.nbytes == 0 or e.compressed != NULL:
        return
    if e.round.added > 1 and wants_wide(k, senders):
        memset(e.memory.sum, 0, e.nbytes)
        k.finish(
            e.memory.sum, e.memory.wide, e.memory.sum, n, e.operation.divisor,
            shift_for(senders, e.operation.divisor)
        )
    elif e.operation.divisor > 1:
        k.divide(e.memory.sum, n, e.operation.divisor)
    e.round.added = senders
