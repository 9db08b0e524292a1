# New places of the slots that lost lanes had, or that living lanes have yielded.
# docs/internals/elastic.md has the rule.
from libc.stdint cimport uint32_t
from libc.stdlib cimport free

from bpsx.core.partition cimport Lane, Move, Partition, Target, Term, Told
from bpsx.core.state cimport Core


cdef inline void free_term(Term *term) noexcept nogil:
    """Free a term and its moves."""
    cdef uint32_t i
    for i in range(term.n if term != NULL and term.moves != NULL else 0):
        free(term.moves[i].targets)
    if term != NULL:
        free(term.moves)
        free(term.told)
    free(term)


cdef inline void free_terms(Term *term) noexcept nogil:
    """Free a list of terms."""
    cdef Term *following
    while term != NULL:
        following = term.next
        free_term(term)
        term = following


cdef inline void attach(Lane *lane, Move *move) noexcept nogil:
    """Add a move to those of its lane, as the latest."""
    cdef Move **at = &lane.moved
    while at[0] != NULL:
        at = &at[0].next
    at[0] = move


cdef inline Target *target_of(Move *move, uint32_t slot) noexcept nogil:
    """Return where a move sends a slot; NULL: it stays."""
    cdef Target *target = &move.targets[slot % move.n]
    return target if slot < move.limit and target.lane != move.lane else NULL


cdef inline bint resolve(Core *c, Partition *p) noexcept nogil:
    """Give a partition the place to which its slot has gone. Returns whether it has moved.

    A slot that its lane has yet to yield is still there. A process that does not speak to servers
    has no lanes, and no use for places.
    """
    cdef Move *move
    cdef Target *target
    cdef bint moved = False
    if p.lane >= c.lanes.n:
        return False
    move = c.lanes.at[p.lane].moved
    while move != NULL:
        target = target_of(move, p.slot) if move.done else NULL
        if target == NULL:
            move = move.next
            continue
        p.slot = target.base + p.slot // move.n
        # Lanes ignore keys with an earlier term than that of their latest lost worker.
        p.lane, p.term = target.lane, max(move.term, c.moving.era)
        moved = True
        move = c.lanes.at[p.lane].moved
    return moved


cdef inline Term *term_under_way(Core *c, uint32_t number) noexcept nogil:
    """Return a term whose keys have not all been taken; NULL: there is no such term."""
    cdef Term *term = c.moving.terms
    while term != NULL and term.number != number:
        term = term.next
    return term


cdef inline void count_have(Term *term, uint32_t lane) noexcept nogil:
    """A HAVE of this term has been sent to a lane."""
    cdef uint32_t i
    for i in range(term.n_told):
        if term.told[i].lane == lane:
            term.told[i].haves += 1
