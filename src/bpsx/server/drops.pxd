# Workers that the job has lost and goes on without: the lane takes all of its keys over anew.
# docs/internals/elastic-workers.md describes the protocol.
from libc.stdint cimport uint32_t

from bpsx.core.wire cimport Header
from bpsx.server.lane cimport Lane
from bpsx.server.rounds cimport drop_pushes
from bpsx.server.store cimport ASKING, KeyState, forget_round
from bpsx.server.takeover cimport begin_takeover, end_takeover, is_gathered
from bpsx.system.sync cimport atomic_load


cdef inline bint is_stale(Lane *lane, Header *h) noexcept nogil:
    """Whether a record was sent before its sender knew of the latest lost worker; count it.

    The sender says all of it again.
    """
    cdef KeyState *e = lane.keys.at[h.slot] if h.slot < lane.keys.n else NULL
    if not lane.settings.shrinks:
        return False
    if h.term >= lane.terms.era and (e == NULL or e.key != h.key or h.term >= e.term):
        return False
    lane.counters.stale += 1
    return True


cdef inline bint renew(Lane *lane, KeyState *e, uint32_t term) noexcept nogil:
    """Begin a takeover of a key by its own lane. False: no memory.

    What was pushed before counts no more: the senders push what no survivor has committed again.
    """
    cdef uint32_t sender
    drop_pushes(lane, e)
    forget_round(e, lane.settings.senders)
    if e.takeover != NULL:
        if e.takeover.state == ASKING:
            lane.terms.at[e.term].asking -= 1
        end_takeover(lane, e)
    for sender in range(lane.settings.senders):
        e.shares[sender].unacknowledged = e.shares[sender].settles = False
    e.unacknowledged = 0
    e.term = term
    return is_gathered(lane, term) or begin_takeover(lane, e)


cdef inline uint32_t note_drops(Lane *lane) noexcept nogil:
    """Note the senders that have been dropped since the last call.

    Returns the latest term of these drops, 0: there are none.
    """
    cdef uint32_t sender, term, latest = 0
    for sender in range(lane.settings.senders):
        term = <uint32_t>atomic_load(&lane.absent.dropped[sender])
        # A scheduler that took over may have dropped it again, in a later term.
        if term == 0 or lane.absent.lost[sender] and term <= lane.terms.era:
            continue
        if not lane.absent.lost[sender]:
            lane.absent.living -= 1
        lane.absent.lost[sender] = lane.absent.skipped[sender] = lane.absent.any_skipped = True
        latest = max(latest, term)
    return latest


cdef inline bint take_drops(Lane *lane) noexcept nogil:
    """Begin takeovers of all keys if senders have been dropped; returns whether any have.

    Without memory for a takeover the lane ends.
    """
    cdef uint32_t i, latest = note_drops(lane)
    cdef KeyState *e
    if latest == 0:
        return False
    lane.terms.era = max(lane.terms.era, latest)
    for i in range(lane.keys.n):
        e = lane.keys.at[i]
        if e != NULL and e.term < latest and not renew(lane, e, latest):
            lane.counters.dropped += 1
    return True
