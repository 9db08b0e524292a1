# Transitions of a task, a partition and a matrix, and the check of all transitions.
#
# docs/internals/states.md and powersgd.md say which event and which thread make each. A build for
# production has neither tables nor checks: the macro drops its arguments. A build with
# BPSX_COUNT_TRANSITIONS, which tests make, counts each transition and those that no table has.
from libc.stdint cimport uint8_t, uint32_t

from bpsx.core.partition cimport (
    AWAITS_INPUT, BROADCAST, COMPRESS, COORDINATE_BROADCAST, COORDINATE_PUSH, COORDINATE_REDUCE,
    COPY, COPYD2H, COPYH2D, DECOMPRESS, END, ENDED, IDLE, ORTHOGONALISING, PCIE_REDUCE, PREPARED,
    PROJECTING, PROJECTING_BACK, PULL, PUSH, REDUCE, REFRESHING, RELEASED, RESTORING, RUNNING,
    SUBMITTED, SUMMING_P, SUMMING_Q, WAITING, Matrix, MatrixState, Partition, Stage, Task,
    TaskState,
)

cdef extern from *:
    """
    #ifdef BPSX_COUNT_TRANSITIONS
    #include <stdint.h>
    /* By machine, state before and state after. */
    __attribute__((visibility("default"))) int64_t bpsx_transitions[4][16][16];
    __attribute__((visibility("default"))) int64_t bpsx_unlisted[4][16][16];
    #define bpsx_count_transition(machine, before, after, followers) do { \\
        int64_t (*counts)[16] = ((followers) >> (after)) & 1 \\
            ? bpsx_transitions[machine] : bpsx_unlisted[machine]; \\
        __atomic_fetch_add(&counts[before][after], 1, __ATOMIC_RELAXED); \\
    } while (0)
    #else
    #define bpsx_count_transition(machine, before, after, followers) ((void)0)
    #endif
    """
    void count_transition "bpsx_count_transition"(
        int machine, int before, int after, uint32_t followers
    ) noexcept nogil

cdef enum StateMachine:
    OF_TASK = 0
    OF_PARTITION = 1
    OF_ROUND = 2                # of a key on a server; server/store.pxd
    OF_MATRIX = 3


cdef inline uint32_t after_task_state(TaskState state) noexcept nogil:
    """States that may follow, as bits."""
    if state == PREPARED:
        return 1 << SUBMITTED | 1 << ENDED
    if state == SUBMITTED:
        return 1 << WAITING | 1 << AWAITS_INPUT | 1 << RUNNING | 1 << ENDED
    if state == WAITING:
        return 1 << AWAITS_INPUT | 1 << RUNNING | 1 << ENDED
    if state == AWAITS_INPUT:
        return 1 << RUNNING | 1 << ENDED
    if state == RUNNING:
        return 1 << ENDED
    if state == ENDED:
        return 1 << RELEASED
    return 0


cdef inline uint32_t after_stage(Stage stage) noexcept nogil:
    """Stages that may follow, as bits: the next one of a list in planning/stages.py, or END."""
    if stage == END:
        return 1 << COORDINATE_REDUCE | 1 << REDUCE | 1 << COMPRESS | 1 << COPYD2H | 1 << PUSH
    if stage == COORDINATE_REDUCE:
        return 1 << REDUCE | 1 << END
    if stage == REDUCE:
        return 1 << COMPRESS | 1 << COPYD2H | 1 << PUSH | 1 << COORDINATE_BROADCAST | (
            1 << BROADCAST | 1 << END
        )
    if stage == COPYD2H:
        return 1 << COORDINATE_PUSH | 1 << COMPRESS | 1 << PUSH | 1 << END
    if stage == COORDINATE_PUSH:
        return 1 << PCIE_REDUCE | 1 << COPYH2D | 1 << END
    if stage == PCIE_REDUCE:
        return 1 << COMPRESS | 1 << PUSH | 1 << END
    if stage == COMPRESS:
        return 1 << COPYD2H | 1 << PUSH | 1 << END
    if stage == PUSH:
        return 1 << PUSH | 1 << PULL | 1 << END
    if stage == PULL:
        return 1 << PUSH | 1 << DECOMPRESS | 1 << COPY | 1 << COPYH2D | 1 << BROADCAST | 1 << END
    if stage == COPY:
        return 1 << COPYH2D | 1 << BROADCAST | 1 << END
    if stage == DECOMPRESS:
        return 1 << COPYH2D | 1 << COORDINATE_BROADCAST | 1 << BROADCAST | 1 << END
    if stage == COPYH2D:
        return 1 << DECOMPRESS | 1 << COORDINATE_BROADCAST | 1 << END
    if stage == COORDINATE_BROADCAST:
        return 1 << BROADCAST | 1 << END
    if stage == BROADCAST:
        return 1 << END
    return 0


cdef inline uint32_t after_matrix_state(MatrixState state) noexcept nogil:
    """States that may follow, as bits."""
    if state == IDLE:
        return 1 << PROJECTING | 1 << SUMMING_P
    if state == PROJECTING:
        return 1 << SUMMING_P | 1 << IDLE
    if state == SUMMING_P:
        return 1 << ORTHOGONALISING | 1 << SUMMING_Q | 1 << IDLE
    if state == ORTHOGONALISING:
        return 1 << PROJECTING_BACK | 1 << IDLE
    if state == PROJECTING_BACK:
        return 1 << SUMMING_Q | 1 << IDLE
    if state == SUMMING_Q:
        return 1 << REFRESHING | 1 << IDLE
    if state == REFRESHING:
        return 1 << RESTORING | 1 << IDLE
    if state == RESTORING:
        return 1 << IDLE
    return 0


cdef inline void move_task(Task *task, TaskState state) noexcept nogil:
    count_transition(OF_TASK, task.state, state, after_task_state(task.state))
    task.state = state


cdef inline void move_partition(Partition *p, int stage) noexcept nogil:
    count_transition(OF_PARTITION, p.stage, stage, after_stage(<Stage>p.stage))
    p.stage = <uint8_t>stage


cdef inline void move_matrix(Matrix *m, int state) noexcept nogil:
    count_transition(OF_MATRIX, m.state, state, after_matrix_state(<MatrixState>m.state))
    m.state = <uint8_t>state
