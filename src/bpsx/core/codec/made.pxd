# A compressed partition's state from and to Python objects. Call with the GIL.
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc

from bpsx.core.codec.packed cimport N_OPTIONS, PAGE, SLACK, Packed
from bpsx.core.codec.state cimport (
    aligned_alloc, load_state, most_bytes, packed_free, save_state, state_bytes,
)
from bpsx.kernels.abi cimport convert_fn, decode_fn, encode_fn


cdef inline Packed *packed_new(made) except NULL:
    """Allocate the state for a bpsx.compression.spec.Made. Raises MemoryError."""
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
    p.light = made.light
    p.sparse = made.sparse
    for i in range(N_OPTIONS):
        p.options[i] = made.options[i]
    # Whole pages: a network adapter may register them, and then forked children may lack them.
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


cdef inline bytes state_of(Packed *p, bytes saved):
    """Return the state, after setting it to ``saved`` if that is not None.

    Raises ValueError for bytes of another length.
    """
    cdef bytes found = bytes(state_bytes(p))
    if saved is not None:
        if len(saved) != len(found):
            raise ValueError(
                f"the saved state of a partition has {len(saved)} bytes; expected {len(found)}"
            )
        load_state(p, saved)
    save_state(p, found)
    return found
