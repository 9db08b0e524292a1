# The steps of a matrix that threads of the pool carry out, and what is kept of it between steps.
# docs/internals/powersgd.md describes them.
#
# Each thread takes the next piece until none is left. The pieces depend only on the matrix: which
# thread takes which does not change a bit.
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from bpsx.core.partition cimport (
    ORTHOGONALISING, PROJECTING, PROJECTING_BACK, REFRESHING, Matrix, Partition, Task,
)
from bpsx.system.sync cimport atomic_add

cdef enum:
    PIECE_ELEMENTS = 1 << 16    # about as many of a piece that is some rows
    PIECE_COLUMNS = 256         # of a piece that is some columns
    MATRIX_HEAD = 16            # bytes of the saved state before Q


cdef inline int64_t rows_of_piece(const Matrix *m) noexcept nogil:
    return max(<int64_t>1, PIECE_ELEMENTS // m.columns)


cdef inline int64_t pieces_of(const Matrix *m, int state) noexcept nogil:
    """Number of pieces of the work in a state."""
    if is_on_factors(state):
        return 1
    if state == PROJECTING_BACK:
        return (m.columns + PIECE_COLUMNS - 1) // PIECE_COLUMNS
    return (m.rows + rows_of_piece(m) - 1) // rows_of_piece(m)


cdef inline void do_piece(Matrix *m, Task *task, int64_t piece, uint8_t *scratch) noexcept nogil:
    cdef int64_t begin = piece * rows_of_piece(m), end = min(begin + rows_of_piece(m), m.rows)
    if m.state == PROJECTING:
        m.project(
            task.input, m.residual, m.q, m.shares, scratch, m.rows, m.columns, m.rank, begin, end,
            m.feedback
        )
    elif m.state == ORTHOGONALISING:
        m.orthogonalise(m.sums, m.rows, m.rank)
    elif m.state == PROJECTING_BACK:
        begin = piece * PIECE_COLUMNS
        m.project_back(
            task.input, m.residual, m.sums, m.shares + m.q_offset, scratch, m.rows, m.columns,
            m.rank, begin, min(begin + PIECE_COLUMNS, m.columns), m.feedback
        )
    elif m.state == REFRESHING:
        m.counter += 1
        m.broken = m.refresh(
            m.q, m.sums + m.q_offset, m.columns, m.rank, m.seed, m.counter
        ) != 0
    else:
        m.restore(
            task.input, m.residual, m.sums, m.sums + m.q_offset, m.shares + m.q_offset,
            task.output, scratch, m.rows, m.columns, m.rank, begin, end, m.feedback, m.broken
        )


cdef inline void work_on_matrix(Partition *hand, char *scratch) noexcept nogil:
    """Do pieces of the work that a matrix is at, until all have been taken (pool thread)."""
    cdef Matrix *m = hand.tensor.matrix
    cdef int64_t piece = atomic_add(&m.next_piece, 1) - 1
    while piece < m.pieces:
        do_piece(m, hand.tensor.current, piece, <uint8_t *>scratch)
        piece = atomic_add(&m.next_piece, 1) - 1


# ---- the state between steps

cdef inline void draw_first(Matrix *m) noexcept nogil:
    """Set Q to that of the first step, which is the same on all workers."""
    memset(m.sums + m.q_offset, 0, m.columns * m.rank * m.wide_itemsize)
    m.refresh(m.q, m.sums + m.q_offset, m.columns, m.rank, m.seed, 0)


cdef inline void matrix_free(Matrix *m) noexcept nogil:
    if m != NULL:
        free(m.residual)
        free(m.q)
        free(m.shares)
        free(m.sums)
        if m.hands != NULL:
            free(m.hands[0].gpu)
        free(m.hands)
        free(m)


cdef inline bint is_on_factors(int state) noexcept nogil:
    """Whether the work in a state reads only P or Q, so that the host does it always."""
    return state == ORTHOGONALISING or state == REFRESHING


cdef inline void take_share(Matrix *m) noexcept nogil:
    """Own P or Q has come from the GPU into pinned memory: take it."""
    cdef char *pinned = m.hands[0].gpu.host
    if m.state == PROJECTING:
        memcpy(m.shares, pinned, m.rows * m.rank * m.wide_itemsize)
    elif m.state == PROJECTING_BACK:
        memcpy(m.shares + m.q_offset, pinned + m.q_offset, q_bytes(m))


cdef inline uint64_t q_bytes(const Matrix *m) noexcept nogil:
    return m.columns * m.rank * m.wide_itemsize


cdef inline uint64_t common_state_bytes(const Matrix *m) noexcept nogil:
    """Bytes of the state that all workers have in common: they come first."""
    return MATRIX_HEAD + q_bytes(m)


cdef inline uint64_t residual_bytes(const Matrix *m) noexcept nogil:
    return m.rows * m.columns * m.wide_itemsize if m.feedback else 0


cdef inline void save_matrix(const Matrix *m, char *out) noexcept nogil:
    """Write counter, 8 zero bytes, Q and the residual, little-endian."""
    memset(out, 0, MATRIX_HEAD)
    memcpy(out, &m.counter, 8)
    memcpy(out + MATRIX_HEAD, m.q, q_bytes(m))
    if m.feedback:
        memcpy(out + common_state_bytes(m), m.residual, residual_bytes(m))


cdef inline void load_matrix(Matrix *m, const char *saved) noexcept nogil:
    """Read what save_matrix has written. A counter of 0 stands for the first step's Q."""
    memcpy(&m.counter, saved, 8)
    memcpy(m.q, saved + MATRIX_HEAD, q_bytes(m))
    if m.feedback:
        memcpy(m.residual, saved + common_state_bytes(m), residual_bytes(m))
    if m.counter == 0:
        draw_first(m)
