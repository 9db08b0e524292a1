# Where the slots of lost lanes have gone. docs/internals/elastic.md has the rule.
from libc.stdint cimport uint32_t
from libc.stdlib cimport free

from bpsx.core.partition cimport Lane, Partition, Target, Term
from bpsx.core.state cimport Core


cdef inline void free_term(Term *term) noexcept nogil:
    """Free a term and its moves."""
    cdef uint32_t i
    for i in range(term.n if term != NULL and term.moves != NULL else 0):
        free(term.moves[i].targets)
    if term != NULL:
        free(term.moves)
    free(term)


cdef inline void free_terms(Term *term) noexcept nogil:
    """Free a list of terms."""
    cdef Term *following
    while term != NULL:
        following = term.next
        free_term(term)
        term = following


cdef inline void resolve(Core *c, Partition *p) noexcept nogil:
    """Give a partition on a lost lane its place on the lane that took its slot over.

    A process that does not speak to servers has no lanes, and no use for places.
    """
    cdef Lane *lane
    cdef Target *target
    while p.lane < c.lanes.n and c.lanes.at[p.lane].moved != NULL:
        lane = &c.lanes.at[p.lane]
        target = &lane.moved.targets[p.slot % lane.moved.n]
        p.slot = target.base + p.slot // lane.moved.n
        p.lane, p.term = target.lane, lane.lost_in
