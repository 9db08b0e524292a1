# C signatures of the summation kernels. `n` counts elements. Pointers may be unaligned but must not
# overlap.
#
# Kernels work in place where input and output have the same type: a vectorised loop needs to know
# that two pointers are either equal or disjoint. Types whose sums need a wider accumulator (halves:
# float32; 8-bit integers: int32) also have `start` and `finish`, for three and more workers. For
# other types these are NULL.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

# a[i] = narrow((wide(a[i]) + wide(b[i])) / divisor)
ctypedef void (*pair_fn)(void *a, void *b, int64_t n, int64_t divisor) noexcept nogil
# acc[i] += 2^-shift wide(src[i]); acc is of the wide type.
#
# `shift`: bfloat16 has the same range as its accumulator, float32. To keep an average from
# overflowing, its parts are added scaled by 2^-shift, which is exact up to a shift of 16. Sums have
# a shift of 0, and other types ignore it. `pair` scales averages by itself.
ctypedef void (*add_fn)(void *acc, void *src, int64_t n, int64_t shift) noexcept nogil
# acc[i] = 2^-shift (wide(a[i]) + wide(b[i]))
ctypedef void (*start_fn)(void *acc, void *a, void *b, int64_t n, int64_t shift) noexcept nogil
# out[i] = narrow((acc[i] + 2^-shift wide(src[i])) / (2^-shift divisor))
ctypedef void (*finish_fn)(
    void *out, void *acc, void *src, int64_t n, int64_t divisor, int64_t shift
) noexcept nogil
# a[i] = narrow(wide(a[i]) / divisor)
ctypedef void (*divide_fn)(void *a, int64_t n, int64_t divisor) noexcept nogil

# Compressors, see codecs.py. encode returns the bytes written. decode returns 0, or -1 for bytes
# that its codec cannot have written.
ctypedef int64_t (*encode_fn)(
    void *g, void *e, void *m, uint8_t *wire, uint8_t *scratch, double *state, int64_t *options,
    int64_t n, uint64_t counter, double factor, double mu
) noexcept nogil
ctypedef int64_t (*decode_fn)(
    uint8_t *wire, int64_t size, void *out, uint8_t *scratch, int64_t *options, int64_t n,
    int64_t add
) noexcept nogil
ctypedef int64_t (*sum_fn)(
    uint8_t *pushes, int64_t stride, int64_t count, int64_t divisor, void *e, uint8_t *wire,
    uint8_t *scratch, double *state, int64_t *options, int64_t n, uint64_t counter, double factor
) noexcept nogil
ctypedef int64_t (*check_fn)(uint8_t *wire, int64_t *options, int64_t n) noexcept nogil
# Steps of PowerSGD, see low_rank.py. `e`: the residual, read if `feedback`. `begin`, `end`: rows;
# in project_back columns.
ctypedef void (*project_fn)(
    void *g, void *e, void *factor, void *out, uint8_t *scratch, int64_t rows, int64_t columns,
    int64_t rank, int64_t begin, int64_t end, int64_t feedback
) noexcept nogil
ctypedef void (*restore_fn)(
    void *g, void *e, void *p, void *sums, void *own, void *out, uint8_t *scratch, int64_t rows,
    int64_t columns, int64_t rank, int64_t begin, int64_t end, int64_t feedback, int64_t broken
) noexcept nogil
ctypedef void (*orthogonalise_fn)(void *p, int64_t rows, int64_t rank) noexcept nogil
ctypedef int64_t (*refresh_fn)(
    void *q, void *sums, int64_t columns, int64_t rank, int64_t seed, uint64_t counter
) noexcept nogil
# out[i] = in[i], in another type
ctypedef void (*convert_fn)(void *out, void *elements, int64_t n) noexcept nogil

cdef struct Kernels:
    int itemsize
    int wide_itemsize           # bytes of an element of the accumulator
    pair_fn pair
    add_fn add
    start_fn start
    finish_fn finish
    divide_fn divide


cdef inline bint wants_wide(const Kernels *k, uint32_t of) noexcept nogil:
    """Whether the sum of `of` parts needs an accumulator of the wide type.

    Two parts do not: they are widened, added and rounded in one pass.
    """
    return k.wide_itemsize != k.itemsize and of > 2


cdef inline int64_t shift_for(uint32_t of, int64_t divisor) noexcept nogil:
    """Return the least shift, at most 16, with which the sum for an average of `of` parts cannot
    overflow.
    """
    cdef int64_t shift = 0
    while divisor > 1 and shift < 16 and <uint32_t>1 << shift < of:
        shift += 1
    return shift


cdef inline void accumulate(
    const Kernels *k, void *sum, void *wide, void *part, uint32_t i, uint32_t of, int64_t n,
    int64_t divisor
) noexcept nogil:
    """Add part `i` of `of`, counted from 0; `sum` holds part 0.

    After the last part `sum` holds the result, already divided. `wide` is the accumulator if
    `wants_wide` says that one is needed.
    """
    cdef bint widen = wants_wide(k, of)
    cdef int64_t shift = shift_for(of, divisor)
    if i == of - 1:
        if widen:
            k.finish(sum, wide, part, n, divisor, shift)
        else:
            k.pair(sum, part, n, divisor)
    elif widen and i == 1:
        k.start(wide, sum, part, n, shift)
    else:
        k.add(wide if widen else sum, part, n, shift)
