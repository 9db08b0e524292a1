# The wire: one 64-byte little-endian header per record. This file is its only definition.
#
# A message is one or two frames. The first holds records back to back: header, then, if INLINE, the
# body padded to 8 bytes. The body of the last record may be the second frame instead, which is how
# large partitions travel without being copied.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef enum:
    MAGIC = 0x58535042          # "BPSX"
    VERSION = 2
    HEADER_BYTES = 64
    # Bodies up to this size are copied next to their header: 32 KiB cost about 2 us to copy, less
    # than a message of their own costs.
    INLINE_BYTES = 32768
    # A frame of small records is closed when it reaches this size.
    BATCH_BYTES = 131072
    BATCH_RECORDS = 2049        # BATCH_BYTES / HEADER_BYTES, and one that may overhang
    MAX_NAME_BYTES = 4096
    MAX_CODEC_BYTES = 1024
    NONCE_BYTES = 32
    PROOF_BYTES = 32

cdef enum Kind:
    # worker -> lane: slot, key, dtype, partition bytes in `cookie`; body: the name, and behind it
    REGISTER = 1
                                # `priority` bytes that say how the key is compressed, if it is
    PUSH = 2                    # worker -> lane: body is the worker's share; answer with the sum
    ANSWER = 3                  # lane -> worker: body is the result
    # lane -> worker: the round failed; `divisor` holds -status, `slot` and `epoch` two ranks
    ERROR = 4
    # worker -> lane: are you there, and do we mean the same job; body: NONCE_BYTES random bytes
    PING = 5
    # lane -> worker; body: PROOF_BYTES that only who knows the job secret can make of them
    PONG = 6

cdef enum Flag:
    INLINE = 1                  # the body follows the header in the same frame
    # the result is the push of the sender named by `divisor`; others push no body
    BROADCAST = 2
    # PUSH: add to the lane's value of this key, answer at once; with BROADCAST: the result becomes
    # that value
    ASYNC = 4
    # no body: the sender's workers `divisor` and `priority` asked for different operations; the
    # round has failed.
    DISAGREED = 8
                                # If both are one worker, it has called join(), and its broadcast is
                                # what failed.
    PACKED = 16                 # PUSH: the body is compressed, as REGISTER has said
    # PUSH: no share, but what compression shall keep of this key from now on
    # (core/codec/state.pxd); without a body: nothing
    STATE = 32
                                # new. The answer, to the sender alone and at once, is what is kept.
                                # It is no round and not counted as one.

cdef packed struct Header:
    uint32_t magic
    uint8_t version
    uint8_t kind
    uint8_t flags
    uint8_t dtype
    uint64_t job
    uint64_t key
    uint32_t slot               # the lane's index of this key
    # the worker, or the machine whose workers it speaks for; on both ways
    uint32_t sender
    uint32_t epoch
    uint32_t round
    uint32_t divisor            # the sum is divided by this; with BROADCAST: the root's rank
    int32_t priority            # larger is more urgent
    uint64_t cookie             # the worker's partition index, returned as it came
    uint64_t length             # body bytes


cdef inline uint64_t padded(uint64_t n) noexcept nogil:
    return (n + 7) & ~(<uint64_t>7)


cdef inline void header_init(Header *h, uint8_t kind, uint64_t job, uint32_t sender) noexcept nogil:
    memset(h, 0, sizeof(Header))
    h.magic = MAGIC
    h.version = VERSION
    h.kind = kind
    h.job = job
    h.sender = sender


cdef inline int next_record(
    const char *frame, size_t frame_size, char *second, size_t second_size, bint has_second,
    size_t *at, Header *h, char **body,
) noexcept nogil:
    """Read the record at *at: 1 and advance, 0 at the end, -1 if the bytes are no valid record."""
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
