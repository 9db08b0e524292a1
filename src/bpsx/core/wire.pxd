# Format of the data plane: records with a 64-byte little-endian header. This file is its only
# definition.
#
# A message is one or two frames. The first frame holds records back to back: a header, then, if
# INLINE, the body padded to 8 bytes. The body of the last record may be the second frame instead,
# so large partitions travel without a copy.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef enum:
    MAGIC = 0x58535042          # "BPSX"
    VERSION = 3
    HEADER_BYTES = 64
    # Bodies up to this size are copied next to their header: 32 KiB cost about 2 us to copy, less
    # than a message of their own.
    INLINE_BYTES = 32768
    # A frame of small records is closed when it reaches this size.
    BATCH_BYTES = 131072
    # BATCH_BYTES / HEADER_BYTES, and one record that may exceed the limit
    BATCH_RECORDS = 2049
    # Only larger results are acknowledged: for smaller ones that would cost more than their memory.
    LEAST_ACKNOWLEDGED = 4096
    # ACK and SETTLED travel with other messages, unless they concern results of this many bytes:
    # memory that is kept for long is out of the caches when it is used again.
    PROMPT_BYTES = 2097152
    MAX_NAME_BYTES = 4096
    MAX_CODEC_BYTES = 1024
    NONCE_BYTES = 32
    PROOF_BYTES = 32
    MOST_CLASSES = 64           # classes of slots in a YIELD: bits of Header.key

cdef enum Kind:
    # worker -> lane: slot, key, dtype, the partition's bytes in `cookie`. The body is the name,
    # followed by `priority` bytes that describe the compression, if there is one. `divisor`: 1 if
    # the worker is on the lane's machine, else 0
    REGISTER = 1
    PUSH = 2                    # worker -> lane: the body is the worker's share; reply: the sum
    # lane -> worker: the body is the result. Of a compressed key: `slot` is the number of its
    # latest sum, `divisor` that of the sum that the stored snapshot follows, `term` and `priority`
    # are the halves of the lane's counter
    ANSWER = 3
    # lane -> worker: the round failed; `divisor` holds -status, `slot` and `term` two ranks
    ERROR = 4
    # worker -> lane: checks that the lane is alive and of the same job; body: NONCE_BYTES random
    # bytes
    PING = 5
    # lane -> worker; body: PROOF_BYTES computed from the nonce and the job secret
    PONG = 6
    # The next six keep results alive and hand the keys of a lost lane over: see
    # docs/internals/elastic.md.
    #
    # worker -> lane: the sender has the outcome of `round` rounds of this key, counted since join()
    # number `divisor` (flags WAITS, KEPT); `cookie` as in REGISTER's push. Body: Coded of a
    # compressed key; in an asynchronous job, if KEPT, what APPLIED has said of the kept value
    HAVE = 7
    HAVES = 8                   # worker -> lane: `cookie` HAVEs of this term have been sent
    WANT = 9                    # lane -> worker: send the outcome of this round
    # worker -> lane: that outcome. The body is the result; or `divisor` holds -status of an error,
    # `priority` and `cookie` its ranks
    GIVE = 10
    ACK = 11                    # worker -> lane: results that have arrived; body: Settlements
    SETTLED = 12                # lane -> worker: results that all have got; body: Settlements
    TOOK = 13                   # lane -> worker: all keys that came in this term have been taken
    # The next four let the lane's state of a compressed key survive the lane: see
    # docs/internals/elastic-compression.md.
    #
    # lane -> worker: keep this state, which follows sum `round` of the key; `cookie` as in an
    # ANSWER; body: as core/codec/state.pxd saves it. Flag STATE: it replaces others after that sum
    SNAP = 14
    # lane -> worker: send what the log of this key has after sum `round` and, with flag STATE, the
    # kept state. The unanswered push is part of sum `divisor`; 0: of none that has been encoded
    FETCH = 15
    LOAD = 16                   # worker -> lane: the kept state
    # worker -> lane: part `round` of the log, of `divisor` parts; body: LogHeads, each followed by
    # a push and padded to 8 bytes
    LOG = 17
    # The next two move keys from a lane that lives: see docs/internals/elastic-balance.md.
    #
    # worker -> lane: the sender knows term `term`, in which the lane yields those of its slots s
    # below `slot` for which bit s % `divisor` of `key` is set
    YIELD = 18
    LEFT = 19                   # lane -> worker: the lane has forgotten these slots
    # The next two let the values of asynchronous training survive their lane: see
    # docs/internals/asynchronous.md.
    #
    # lane -> worker: the next record of the message is an ANSWER or a VALUE. In its body are this
    # many pushes of each sender; body: a uint32_t by sender
    APPLIED = 20
    # lane -> worker: keep this value for others; the body and `cookie` as in an ANSWER
    VALUE = 21

cdef enum Flag:
    INLINE = 1                  # the body follows the header in the same frame
    # The result is the push of the sender named by `divisor`; other senders push no body.
    BROADCAST = 2
    # PUSH: add the body to the lane's value of this key and reply at once. With BROADCAST the
    # body of the root becomes that value.
    ASYNC = 4
    # No body: the sender's workers `divisor` and `priority` asked for different operations, and the
    # round has failed. If both numbers are the same, this worker has called join(), and its
    # broadcast has failed.
    DISAGREED = 8
    PACKED = 16                 # PUSH: the body is compressed as REGISTER has described
    # PUSH: the body is not a share, but the compression state that the lane is to keep for this key
    # (core/codec/state.pxd); without a body the state stays as it is. The lane replies at once, to
    # the sender only, with the state that it keeps. This is not counted as a round.
    STATE = 32
    WAITS = 64                  # HAVE: the sender waits for the outcome of round `round`
    # HAVE: the sender keeps the outcome of the round before. PUSH: it keeps the latest SNAP
    KEPT = 128

cdef enum CodedFlag:
    HAS_STATE = 1               # the sender has `counter` or, with a residual, keeps the state
    WAS_SET = 2                 # ... which was set from a checkpoint after sum `state`
    SUMMED = 4                  # the sender's latest outcome was sum `sum`

cdef packed struct Coded:       # body of a HAVE of a compressed key
    uint32_t sum                # number of the latest sum whose outcome the sender has
    uint32_t flags              # CodedFlags
    uint32_t state              # number of the sum that its state follows
    # number of the latest sum before a worker was lost: replay has to begin there, or later
    uint32_t gap
    uint64_t counter            # the lane's counter in that state, or after sum `sum`
    uint64_t logged             # bytes of the log

cdef packed struct LogHead:     # one push of a LOG's body
    uint32_t sum                # number of the sum that it is part of
    uint32_t divisor
    uint64_t length             # bytes that follow, without padding

cdef packed struct Settlement:  # one item of an ACK's or a SETTLED's body
    uint32_t which              # ACK: the lane's slot; SETTLED: the worker's partition index
    uint32_t round              # as in the messages of that round

cdef packed struct Header:
    uint32_t magic
    uint8_t version
    uint8_t kind
    uint8_t flags
    uint8_t dtype
    uint64_t job
    uint64_t key
    uint32_t slot               # the lane's index of this key
    # the worker, or the machine whose workers it speaks for; the same in both directions
    uint32_t sender
    # term in which the key came to this lane; 0: it has never moved. ERROR has a rank here
    uint32_t term
    uint32_t round
    uint32_t divisor            # divides the sum; with BROADCAST: the root's rank
    int32_t priority            # larger is more urgent
    # the worker's partition index, which the lane copies into its reply; PUSH, and thus ANSWER,
    # ERROR and SNAP: in the upper half the term, as above
    uint64_t cookie
    uint64_t length             # bytes of the body


cdef inline uint64_t padded(uint64_t n) noexcept nogil:
    return (n + 7) & ~(<uint64_t>7)


cdef inline void header_init(Header *h, uint8_t kind, uint64_t job, uint32_t sender) noexcept nogil:
    memset(h, 0, sizeof(Header))
    h.magic = MAGIC
    h.version = VERSION
    h.kind = kind
    h.job = job
    h.sender = sender


cdef inline void set_counter(Header *h, uint64_t counter) noexcept nogil:
    """Write the lane's counter into an ANSWER."""
    h.term = <uint32_t>counter
    h.priority = <int32_t>(counter >> 32)


cdef inline uint64_t counter_in(const Header *h) noexcept nogil:
    return <uint64_t>h.term | <uint64_t><uint32_t>h.priority << 32


cdef inline int next_record(
    const char *frame, size_t frame_size, char *second, size_t second_size, bint has_second,
    size_t *at, Header *h, char **body,
) noexcept nogil:
    """Read the record at *at. Returns 1 and advances, 0 at the end, or -1 for an invalid record."""
    cdef size_t left = frame_size - at[0]
    if left == 0:
        return 0
    if left < HEADER_BYTES:
        return -1
    memcpy(h, frame + at[0], HEADER_BYTES)
    at[0] += HEADER_BYTES
    left -= HEADER_BYTES
    if h.magic != MAGIC or h.version != VERSION:
        return -1
    if h.flags & INLINE:
        if h.length > left or padded(h.length) > left:
            return -1
        body[0] = <char *>(frame + at[0])
        at[0] += padded(h.length)
        return 1
    if h.length == 0:
        body[0] = NULL
        return 1
    if left != 0 or not has_second or second_size != h.length:
        return -1
    body[0] = second
    return 1
