# A compressed partition: its state, and encoding and decoding of its elements. Used by workers and
# lanes.
#
# Only the current owner of the partition (driver, pool thread or lane) accesses this.
# kernels/codecs.py describes the functions.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from bpsx.core.codec.packed cimport N_STATE, RATE_BYTES, STATE_HEAD, Packed

cdef extern from "stdlib.h" nogil:
    void *aligned_alloc(size_t alignment, size_t size) noexcept


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
