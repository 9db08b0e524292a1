# A compressed partition: its state, and encoding and decoding of its elements. Used by workers and
# lanes.
#
# Only the current owner of the partition (driver, pool thread or lane) accesses this.
# kernels/codecs.py describes the functions.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from bpsx.kernels.abi cimport convert_fn, decode_fn, encode_fn

cdef extern from "stdlib.h" nogil:
    void *aligned_alloc(size_t alignment, size_t size) noexcept

cdef enum:
    N_OPTIONS = 8               # kernels/codecs.py has the same, and SLACK
    ALIKE = 6                   # index in `options` that a lane sets
    N_STATE = 4
    SLACK = 64
    PAGE = 4096
    RATE_BYTES = 8              # with `corrected` a push begins with the learning rate, a float64
    STATE_HEAD = 16 + 8 * N_STATE

# More than 20 fields: the arguments of the codec's two functions.
cdef struct Packed:
    encode_fn encode
    decode_fn decode
    # half types: convert to the wide type and back; NULL: elements have the wide type already
    convert_fn widen
    convert_fn narrow
    uint32_t wide_itemsize
    uint64_t n                  # elements
    uint64_t capacity           # most bytes that encode produces
    # bytes of scratch memory for encode and decode, including the widened elements
    uint64_t scratch
    uint64_t aside              # ... of which the first hold the widened elements
    uint8_t *wire               # encoded bytes: first those to push, then those of the reply
    uint64_t size               # bytes in `wire`
    char *residual              # n elements of the wide type; NULL: no error feedback
    char *momentum              # the same; NULL: no momentum
    double state[N_STATE]
    int64_t options[N_OPTIONS]
    uint64_t counter            # number of encodings
    # The bytes begin with the counter: replies copy it from pushes, and workers adopt it from
    # replies.
    bint counted
    # a lane's error feedback may be limited to the elements that were pushed
    bint sparse
    double mu
    bint corrected
    double rate                 # the last learning rate


cdef inline uint64_t most_bytes(const Packed *p) noexcept nogil:
    """Longest body of a push, in bytes."""
    return p.capacity + (RATE_BYTES if p.corrected else 0)


cdef inline void packed_free(Packed *p) noexcept nogil:
    if p != NULL:
        free(p.wire)
        free(p.residual)
        free(p.momentum)
        free(p)


cdef inline uint64_t state_bytes(const Packed *p) noexcept nogil:
    """Bytes of the state that is kept from round to round.

    Counter, learning rate and `state`, then residual and momentum if there are any; little-endian.
    """
    return STATE_HEAD + p.n * p.wide_itemsize * ((p.residual != NULL) + (p.momentum != NULL))


cdef inline uint64_t server_state_bytes(const Packed *p) noexcept nogil:
    """Bytes of the same state on a server, which has no momentum."""
    return STATE_HEAD + (p.n * p.wide_itemsize if p.residual != NULL else 0)


cdef inline void save_state(const Packed *p, char *out) noexcept nogil:
    """Write the state to `out`: `state_bytes` bytes."""
    cdef uint64_t size = p.n * p.wide_itemsize
    memcpy(out, &p.counter, 8)
    memcpy(out + 8, &p.rate, 8)
    memcpy(out + 16, p.state, sizeof(p.state))
    out += STATE_HEAD
    if p.residual != NULL:
        memcpy(out, p.residual, size)
        out += size
    if p.momentum != NULL:
        memcpy(out, p.momentum, size)


cdef inline void load_state(Packed *p, const char *saved) noexcept nogil:
    """Read the state from `saved`: `state_bytes` bytes."""
    cdef uint64_t size = p.n * p.wide_itemsize
    memcpy(&p.counter, saved, 8)
    memcpy(&p.rate, saved + 8, 8)
    memcpy(p.state, saved + 16, sizeof(p.state))
    saved += STATE_HEAD
    if p.residual != NULL:
        memcpy(p.residual, saved, size)
        saved += size
    if p.momentum != NULL:
        memcpy(p.momentum, saved, size)


cdef inline bint grow_scratch(char **scratch, uint64_t *capacity, uint64_t wanted) noexcept nogil:
    """Make sure of `wanted` bytes of aligned scratch memory, with undefined content.

    Returns False when out of memory.
    """
    if wanted <= capacity[0]:
        return True
    free(scratch[0])
    capacity[0] = (wanted + 4095) & ~(<uint64_t>4095)
    scratch[0] = <char *>aligned_alloc(64, capacity[0])
    if scratch[0] == NULL:
        capacity[0] = 0
    return scratch[0] != NULL


cdef inline double correction(Packed *p, double rate) noexcept nogil:
    """Factor for the residual: the last learning rate over this one, if the compression asks for
    it (arXiv 1905.10936); else 1.
    """
    cdef double factor = 1.0
    if p.corrected and rate > 0:
        if p.rate > 0:
            factor = p.rate / rate
        p.rate = rate
    return factor


cdef inline uint64_t head_of(const Packed *p) noexcept nogil:
    """Bytes of a push before the encoded ones."""
    return RATE_BYTES if p.corrected else 0


cdef inline void adopt_counter(Packed *p, const uint8_t *wire, uint64_t size) noexcept nogil:
    """Continue from the counter in a reply, so that a worker that fell behind, for example by
    join(), catches up with the others.
    """
    if p.counted and size >= sizeof(p.counter):
        memcpy(&p.counter, wire, sizeof(p.counter))


cdef inline void pack(
    Packed *p, char *elements, uint8_t *wire, char *scratch, double rate, bint head
) noexcept nogil:
    """Encode `elements` into `wire`, and set `p.size` to the length in bytes.

    `head`: begin with the learning rate, if the compression sends it. Elements of half types are
    not changed. `scratch`: `p.scratch` bytes, see grow_scratch.
    """
    cdef double factor = correction(p, rate)
    cdef uint64_t begin = head_of(p) if head else 0
    if begin:
        memcpy(wire, &rate, sizeof(rate))
    if p.widen != NULL:
        p.widen(scratch, elements, p.n)
        elements = scratch
    p.counter += 1
    p.size = begin + p.encode(
        elements, p.residual, p.momentum, wire + begin, <uint8_t *>scratch + p.aside, p.state,
        p.options, p.n, p.counter, factor, p.mu
    )


cdef inline int unpack(
    Packed *p, uint8_t *wire, uint64_t size, char *elements, char *scratch
) noexcept nogil:
    """Decode `wire` into `elements`. Returns 0, or -1 if `wire` is invalid.

    Up to SLACK bytes after its end may be read.
    """
    cdef char *wide = scratch if p.narrow != NULL else elements
    if p.decode(wire, size, wide, <uint8_t *>scratch + p.aside, p.options, p.n, 0) != 0:
        return -1
    adopt_counter(p, wire, size)
    if p.narrow != NULL:
        p.narrow(elements, scratch, p.n)
    return 0
