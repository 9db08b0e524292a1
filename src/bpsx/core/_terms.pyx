# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Makes terms for the driver from what the scheduler says. docs/internals/elastic.md."""
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc

from bpsx.core.partition cimport Move, Target, Term, Told
from bpsx.core.targets cimport free_term
from bpsx.core.wire cimport MOST_CLASSES


cdef int fill_move(Move *move, uint32_t lanes, uint32_t lane, list targets) except -1:
    cdef uint32_t i
    if move.yields and len(targets) > MOST_CLASSES:
        raise ValueError(f"lane {lane} yields to {len(targets)} targets; at most 64 may be")
    named = [lane] + [target for target, _ in targets]
    if not targets or max(named) >= lanes:
        raise ValueError(f"lane {lane} moves to {targets}; there are {lanes} lanes")
    move.targets = <Target *>calloc(len(targets), sizeof(Target))
    if move.targets == NULL:
        raise MemoryError("no memory for targets")
    move.lane, move.n = lane, <uint32_t>len(targets)
    for i, (target, base) in enumerate(targets):
        # Relative to the target's slots, so it may be negative: slots are counted modulo 2**32.
        move.targets[i].lane, move.targets[i].base = target, base & 0xFFFFFFFF
    return 0


cdef Term *new_term(
    uint32_t lanes, uint32_t number, list lost, bint missed, list yields, uint32_t living,
    bint enters,
) except NULL:
    """Make a term from what TERM says: see :meth:`bpsx._core.Core.begin_term`.

    ``lanes``: number of lanes that there are. ``lost``, ``yields``: lane, number of slots, targets.
    """
    cdef Term *term = <Term *>calloc(1, sizeof(Term))
    cdef uint32_t i
    cdef list moves = lost + yields
    told = sorted({to for lane, _, targets in moves for to, _ in targets if to != lane})
    if term != NULL:
        term.moves = <Move *>calloc(max(len(moves), 1), sizeof(Move))
        # If workers are lost, the driver fills in the lanes that live.
        term.room = max(<uint32_t>len(told), lanes if living else 0, <uint32_t>1)
        term.told = <Told *>calloc(term.room, sizeof(Told))
    if term == NULL or term.moves == NULL or term.told == NULL:
        free_term(term)
        raise MemoryError("no memory for a term")
    term.number, term.missed, term.living, term.n_told = number, missed, living, len(told)
    term.enters = enters
    try:
        for i, to in enumerate(told):
            term.told[i].lane = to
        for i, (lane, limit, targets) in enumerate(moves):
            term.n = i + 1
            term.moves[i].term, term.moves[i].limit = number, limit
            term.moves[i].yields = i >= <uint32_t>len(lost)
            fill_move(&term.moves[i], lanes, lane, targets)
    except BaseException:
        free_term(term)
        raise
    return term
