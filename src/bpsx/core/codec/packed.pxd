# State of a compressed partition. Only the current owner of the partition (driver, pool thread or
# lane) accesses it. kernels/codecs.py describes the functions.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from bpsx.kernels.abi cimport check_fn, convert_fn, decode_fn, encode_fn, sum_fn

cdef enum:
    N_OPTIONS = 8               # kernels/codecs.py has the same, SLACK, and MOST_PUSHES
    ALIKE = 6                   # index in `options` that a lane sets
    N_STATE = 4
    MOST_PUSHES = 1024
    SLACK = 64
    PAGE = 4096
    RATE_BYTES = 8              # with `corrected` a push begins with the learning rate, a float64
    STATE_HEAD = 16 + 8 * N_STATE

# More than 20 fields: the arguments of the codec's functions.
cdef struct Packed:
    encode_fn encode
    decode_fn decode
    sum_fn sum                  # of a lane, if the codec has one; else NULL
    check_fn check              # the same; checks pushes of `pushed` bytes before `sum` gets them
    uint64_t pushed             # bytes of every push, if `sum` is not NULL
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
    bint light                  # a lane's state is only the counter
    # a lane's error feedback may be limited to the elements that were pushed
    bint sparse
    double mu
    bint corrected
    double rate                 # the last learning rate
