# C signatures of the summation kernels. `n` counts elements; pointers may be unaligned but must not overlap.
#
# In place wherever input and output have one type: a vectorised loop needs to know that two pointers are either one or disjoint.
# Types whose sums need a wider accumulator (halves: float32; 8-bit integers: int32) have `start` and `finish` too, for three and
# more workers; for the others they are NULL.
from libc.stdint cimport int64_t

# a[i] = narrow((wide(a[i]) + wide(b[i])) / divisor)
ctypedef void (*pair_fn)(void *a, void *b, int64_t n, int64_t divisor) noexcept nogil
# acc[i] += wide(src[i]); acc is of the wide type
ctypedef void (*add_fn)(void *acc, void *src, int64_t n) noexcept nogil
# acc[i] = wide(a[i]) + wide(b[i])
ctypedef void (*start_fn)(void *acc, void *a, void *b, int64_t n) noexcept nogil
# out[i] = narrow((acc[i] + wide(src[i])) / divisor)
ctypedef void (*finish_fn)(void *out, void *acc, void *src, int64_t n, int64_t divisor) noexcept nogil
# a[i] = narrow(wide(a[i]) / divisor)
ctypedef void (*divide_fn)(void *a, int64_t n, int64_t divisor) noexcept nogil

cdef struct Kernels:
    int itemsize
    int wide_itemsize           # of the accumulator
    pair_fn pair
    add_fn add
    start_fn start
    finish_fn finish
    divide_fn divide
