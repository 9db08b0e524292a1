# A compressed partition: what it owns, and how its elements become bytes and come back. For workers
# and lanes alike.
#
# Whoever has the partition at the time (driver, pool thread, lane) is the only one to touch this.
# kernels/codecs.py says what the functions do.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from bpsx.kernels.abi cimport convert_fn, decode_fn, encode_fn

cdef extern from "stdlib.h" nogil:
    void *aligned_alloc(size_t alignment, size_t size) noexcept

cdef enum:
    N_OPTIONS = 8               # kernels/codecs.py has the same, and SLACK
    ALIKE = 6                   # the slot of `options` that a lane sets
    N_STATE = 4
    SLACK = 64
    PAGE = 4096
    RATE_BYTES = 8              # `corrected`: a push begins with the learning rate, a float64
    STATE_HEAD = 16 + 8 * N_STATE

cdef struct Packed:
    encode_fn encode
    decode_fn decode
    # half types: to the wide type and back; NULL: elements are of the wide type
    convert_fn widen
    convert_fn narrow
    uint32_t wide_itemsize
    uint64_t n                  # elements
    uint64_t capacity           # the most bytes that encode makes of them
    # bytes that encode and decode work in, those for widened elements included
    uint64_t scratch
    uint64_t aside              # ... which are these first ones
    uint8_t *wire               # what is sent, and then what has been answered
    uint64_t size               # of that
    char *residual              # n elements of the wide type; NULL: no error feedback
    char *momentum              # ... NULL: none
    double state[N_STATE]
    int64_t options[N_OPTIONS]
    uint64_t counter            # of what has been encoded
    # bytes begin with the counter: answers take it from pushes, and workers from answers
    bint counted
    bint sparse                 # a lane's error feedback may keep to what was pushed
    double mu
    bint corrected
    double rate                 # the last learning rate


cdef inline uint64_t most_bytes(const Packed *p) noexcept nogil:
    """A push's longest body."""
    return p.capacity + (RATE_BYTES if p.corrected else 0)


cdef inline void packed_free(Packed *p) noexcept nogil:
    if p != NULL:
        free(p.wire)
        free(p.residual)
        free(p.momentum)
        free(p)


cdef inline Packed *packed_new(made) except NULL:
    """From a bpsx.compression.spec.Made. Raises MemoryError."""
    cdef Packed *p = <Packed *>calloc(1, sizeof(Packed))
    cdef uint32_t i
    if p == NULL:
        raise MemoryError("no memory for a compressed partition")
    p.encode = <encode_fn><uintptr_t>made.encode
    p.decode = <decode_fn><uintptr_t>made.decode
    p.widen = <convert_fn><uintptr_t>made.widen
    p.narrow = <convert_fn><uintptr_t>made.narrow
    p.wide_itemsize = made.wide_itemsize
    p.n = made.n
    p.capacity = made.capacity
    p.aside = (p.n * p.wide_itemsize + 63) & ~(<uint64_t>63) if p.widen != NULL else 0
    p.scratch = p.aside + made.scratch
    p.mu = made.mu
    p.corrected = made.corrected
    p.counted = made.counted
    p.sparse = made.sparse
    for i in range(N_OPTIONS):
        p.options[i] = made.options[i]
    # Whole pages: an adapter may be told of them, and then forked children may not have them.
    p.wire = <uint8_t *>aligned_alloc(
        PAGE, (most_bytes(p) + SLACK + PAGE - 1) & ~(<uint64_t>PAGE - 1)
    )
    if made.residual:
        p.residual = <char *>calloc(max(p.n, 1), p.wide_itemsize)
    if made.momentum:
        p.momentum = <char *>calloc(max(p.n, 1), p.wide_itemsize)
    if (
        p.wire == NULL
        or made.residual and p.residual == NULL
        or made.momentum and p.momentum == NULL
    ):
        packed_free(p)
        raise MemoryError(f"no memory for {made.n} compressed elements")
    return p


cdef inline uint64_t state_bytes(const Packed *p) noexcept nogil:
    """What is kept from round to round: counter, learning rate, `state`, then residual and
    momentum, where there are any; little-endian.
    """
    return STATE_HEAD + p.n * p.wide_itemsize * ((p.residual != NULL) + (p.momentum != NULL))


cdef inline uint64_t server_state_bytes(const Packed *p) noexcept nogil:
    """The same of the server's, which has no momentum."""
    return STATE_HEAD + (p.n * p.wide_itemsize if p.residual != NULL else 0)


cdef inline void save_state(const Packed *p, char *out) noexcept nogil:
    """Write `state_bytes` bytes."""
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
    """The other way round."""
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


cdef inline bytes state_of(Packed *p, bytes saved):
    """What is kept, once it is ``saved``, if that is not None.

    Raises ValueError for another partition's.
    """
    cdef bytes found = bytes(state_bytes(p))
    if saved is not None:
        if len(saved) != len(found):
            raise ValueError(f"{len(saved)} bytes of state for a partition that keeps {len(found)}")
        load_state(p, saved)
    save_state(p, found)
    return found


cdef inline bint grow_scratch(char **scratch, uint64_t *capacity, uint64_t wanted) noexcept nogil:
    """Have `wanted` bytes of aligned memory to work in, whose content is anything.

    False when there is none.
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
    """By what the residual is multiplied: the last learning rate over this one, where that is
    asked for (arXiv 1905.10936).
    """
    cdef double factor = 1.0
    if p.corrected and rate > 0:
        if p.rate > 0:
            factor = p.rate / rate
        p.rate = rate
    return factor


cdef inline uint64_t head_of(const Packed *p) noexcept nogil:
    """Bytes of a push before what is encoded."""
    return RATE_BYTES if p.corrected else 0


cdef inline void adopt_counter(Packed *p, const uint8_t *wire, uint64_t size) noexcept nogil:
    """Go on from an answer's counter: who had fallen behind, by join() say, is where the others
    are.
    """
    if p.counted and size >= sizeof(p.counter):
        memcpy(&p.counter, wire, sizeof(p.counter))


cdef inline void pack(
    Packed *p, char *elements, uint8_t *wire, char *scratch, double rate, bint head
) noexcept nogil:
    """Encode `elements` into `wire`; `p.size` says how long it is.

    `head`: with the learning rate, if it is asked for. Elements of half types are not changed;
    scratch: see there.
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
    """Decode into elements. 0, or -1 if `wire` makes no sense.

    SLACK bytes behind it may be read.
    """
    cdef char *wide = scratch if p.narrow != NULL else elements
    if p.decode(wire, size, wide, <uint8_t *>scratch + p.aside, p.options, p.n, 0) != 0:
        return -1
    adopt_counter(p, wire, size)
    if p.narrow != NULL:
        p.narrow(elements, scratch, p.n)
    return 0
