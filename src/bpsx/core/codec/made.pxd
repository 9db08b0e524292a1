# The state of compressed partitions and of matrices from and to Python objects. Call with the GIL.
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc

from bpsx.core.codec.low_rank cimport (
    common_state_bytes, draw_first, load_matrix, matrix_free, q_bytes, residual_bytes, save_matrix,
)
from bpsx.core.codec.packed cimport N_OPTIONS, PAGE, SLACK, Packed
from bpsx.core.codec.state cimport (
    aligned_alloc, load_state, most_bytes, packed_free, save_state, state_bytes,
)
from bpsx.core.partition cimport Matrix, Partition, Tensor
from bpsx.core.state cimport MAX_THREADS
from bpsx.kernels.abi cimport (
    check_fn, convert_fn, decode_fn, encode_fn, orthogonalise_fn, project_fn, refresh_fn,
    restore_fn, sum_fn,
)


cdef inline Packed *packed_new(made) except NULL:
    """Allocate the state for a bpsx.compression.spec.Made. Raises MemoryError."""
    cdef Packed *p = <Packed *>calloc(1, sizeof(Packed))
    cdef uint32_t i
    if p == NULL:
        raise MemoryError("no memory for a compressed partition")
    p.encode = <encode_fn><uintptr_t>made.encode
    p.decode = <decode_fn><uintptr_t>made.decode
    p.sum = <sum_fn><uintptr_t>made.sum
    p.check = <check_fn><uintptr_t>made.check
    p.pushed = made.pushed
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


cdef inline char *pages(uint64_t size) noexcept:
    """Allocate whole pages for `size` bytes, as a network adapter may register them."""
    return <char *>aligned_alloc(PAGE, (size + PAGE - 1) & ~(<uint64_t>PAGE - 1))


cdef inline Matrix *matrix_new(Tensor *tensor, made) except NULL:
    """Allocate the state for a bpsx.compression.factors.MadeMatrix. Raises MemoryError."""
    cdef Matrix *m = <Matrix *>calloc(1, sizeof(Matrix))
    cdef uint64_t both
    cdef uint32_t i
    if m == NULL:
        raise MemoryError("no memory for a matrix")
    m.project = <project_fn><uintptr_t>made.steps.project
    m.project_back = <project_fn><uintptr_t>made.steps.project_back
    m.restore = <restore_fn><uintptr_t>made.steps.restore
    m.orthogonalise = <orthogonalise_fn><uintptr_t>made.steps.orthogonalise
    m.refresh = <refresh_fn><uintptr_t>made.steps.refresh
    m.rows, m.columns, m.rank = made.rows, made.columns, made.rank
    m.nbytes, m.wide_itemsize, m.scratch = made.nbytes, made.wide_itemsize, made.scratch
    m.feedback, m.seed = made.feedback, made.seed
    m.q_offset, m.n_first = made.q_offset, made.n_first
    both = m.q_offset + q_bytes(m)
    m.q, m.shares, m.sums = pages(q_bytes(m)), pages(both), pages(both)
    m.n_hands = max(1, min(<int>made.threads, MAX_THREADS))
    m.hands = <Partition *>calloc(m.n_hands, sizeof(Partition))
    if m.feedback:
        m.residual = <char *>calloc(1, residual_bytes(m))
    if (
        m.q == NULL or m.shares == NULL or m.sums == NULL or m.hands == NULL
        or m.feedback and m.residual == NULL
    ):
        matrix_free(m)
        raise MemoryError(f"no memory for the factors of {made.nbytes} bytes")
    for i in range(m.n_hands):
        m.hands[i].tensor = tensor
    draw_first(m)
    return m


cdef inline bytes state_of_matrix(Matrix *m, bytes saved):
    """As state_of, for a matrix."""
    cdef bytes found = bytes(common_state_bytes(m) + residual_bytes(m))
    if saved is not None:
        if len(saved) != len(found):
            raise ValueError(
                f"the saved state of a matrix has {len(saved)} bytes; expected {len(found)}"
            )
        load_matrix(m, saved)
    save_matrix(m, found)
    return found
