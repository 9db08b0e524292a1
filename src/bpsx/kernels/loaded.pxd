# Takes compiled kernels over from Python. Call with the GIL.
from libc.stdint cimport uintptr_t

from bpsx.kernels.abi cimport Kernels, add_fn, divide_fn, finish_fn, pair_fn, start_fn


cdef inline int fill_in(Kernels *k, found) except -1:
    """Fill in the addresses of `found`, a bpsx.kernels.Kernels.

    Sets `add` last, because readers test `add` to see whether the kernels are loaded.
    """
    k.itemsize = found.itemsize
    k.wide_itemsize = found.wide_itemsize
    k.start = <start_fn><uintptr_t>found.start
    k.finish = <finish_fn><uintptr_t>found.finish
    k.pair = <pair_fn><uintptr_t>found.pair
    k.divide = <divide_fn><uintptr_t>found.divide
    k.add = <add_fn><uintptr_t>found.add
    return 0
