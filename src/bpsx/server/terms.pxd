# Decides about the keys that a lane takes over in a term, when workers have told it what they have,
# or when workers have come or gone. docs/internals/elastic.md has the protocol.
from libc.stdint cimport uint32_t

from bpsx.core.wire cimport GIVE, HAVE, Header
from bpsx.server.drops cimport is_stale, take_departures, take_drops, take_entries
from bpsx.server.kept_values cimport is_away
from bpsx.server.lane cimport Lane
from bpsx.server.push cimport finish_takeover
from bpsx.server.rebuild cimport start_rebuilds
from bpsx.server.rounds cimport notice
from bpsx.server.store cimport ASKING, TAKEN, KeyState
from bpsx.server.takeover cimport (
    ask_another, completes, decide, take_given, take_have, take_haves, take_state, tell_taken,
)
from bpsx.server.yields cimport look_at_yields
from bpsx.transports.abi cimport Message


cdef inline void decide_term(Lane *lane, uint32_t term) noexcept nogil:
    """Decide about the keys of a term, if all has been said of them."""
    cdef KeyState *e
    cdef uint32_t i
    if not completes(lane, term):
        return
    for i in range(lane.keys.n):
        e = lane.keys.at[i]
        if e != NULL and e.term == term and e.takeover != NULL:
            decide(lane, e)
            finish_takeover(lane, e)
    start_rebuilds(lane)
    tell_taken(lane, term)


cdef inline void go_without(Lane *lane) noexcept nogil:
    """Ask other senders for the values that absent workers of an asynchronous job were asked for.
    """
    cdef KeyState *e
    cdef uint32_t i, term
    for i in range(lane.keys.n):
        e = lane.keys.at[i]
        if e == NULL or e.takeover == NULL:
            continue
        term = e.term
        if e.takeover.state == ASKING and is_away(lane, e.takeover.holder):
            ask_another(lane, e)
            if e.takeover.state == TAKEN:
                finish_takeover(lane, e)
                tell_taken(lane, term)
        elif e.takeover.state == TAKEN:
            finish_takeover(lane, e)


cdef inline void take_news(Lane *lane) noexcept nogil:
    """Handle other threads' notes of workers that left, joined, were lost or entered."""
    cdef uint32_t term
    cdef bint fewer
    notice(lane)
    take_entries(lane)
    fewer = take_drops(lane)
    if take_departures(lane):
        go_without(lane)
        fewer = True
    if fewer:
        look_at_yields(lane)
        # Fewer senders have to speak: all may have been said.
        for term in range(lane.terms.era, <uint32_t>lane.terms.latest + 1):
            decide_term(lane, term)


cdef inline int note_have(Lane *lane, Header *h, const char *body) noexcept nogil:
    """Handle a HAVE or a HAVES; the last one of a term decides about its keys. -1: malformed."""
    cdef KeyState *e = lane.keys.at[h.slot] if h.slot < lane.keys.n else NULL
    if h.kind == HAVE and is_stale(lane, h):
        return 0
    if h.term < lane.terms.era:
        lane.counters.stale += 1
        return 0
    if (take_have(lane, e, h, body) if h.kind == HAVE else take_haves(lane, h)) != 0:
        return -1
    decide_term(lane, h.term)
    return 0


cdef inline int note_given(
    Lane *lane, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Handle a GIVE, a LOAD or a LOG. Arguments and result as for push()."""
    cdef KeyState *e = lane.keys.at[h.slot] if h.slot < lane.keys.n else NULL
    if is_stale(lane, h):
        return 0
    if (
        take_given(lane, e, h, m, body, kept) if h.kind == GIVE
        else take_state(lane, e, h, m, body, kept)
    ) != 0:
        return -1
    finish_takeover(lane, e)
    tell_taken(lane, h.term)
    return 0
