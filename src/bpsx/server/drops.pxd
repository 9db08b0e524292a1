# Workers that the job has lost and goes on without: the lane takes all of its keys over anew. And
# workers that enter the running job.
# docs/internals/elastic-workers.md and elastic-joins.md describe the protocols.
from libc.stdint cimport uint32_t

from bpsx.core.wire cimport Header
from bpsx.server.kept_values cimport forget_late, hand_over
from bpsx.server.lane cimport Lane
from bpsx.server.rounds cimport drop_pushes
from bpsx.server.store cimport ASKING, KeyState, forget_round
from bpsx.server.takeover cimport begin_takeover, end_takeover, gathering_of, is_gathered
from bpsx.system.sync cimport atomic_load, atomic_store


cdef inline bint is_stale(Lane *lane, Header *h) noexcept nogil:
    """Whether a record was sent before its sender knew of the latest lost worker; count it.

    The sender repeats the record once it knows of the loss.
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

    Earlier pushes do not count: the senders repeat those that no survivor has committed.
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
            # Another worker may get its place.
            lane.outs[sender].n_settled, lane.outs[sender].settled_bytes = 0, 0
            if lane.endpoint.drop != NULL:
                lane.endpoint.drop(lane.endpoint.self, sender)
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


cdef inline bint take_departures(Lane *lane) noexcept nogil:
    """Go on without workers that an elastic asynchronous job has lost, or that have left.

    Others keep the values that these workers alone had. Returns whether there are any since the
    last call.
    """
    cdef uint32_t sender, i
    cdef KeyState *e
    cdef bint any = False
    if lane.applied == NULL or not lane.absent.any_gone:
        return False
    for sender in range(lane.settings.senders):
        if lane.absent.departed[sender] or not atomic_load(&lane.absent.gone[sender]):
            continue
        lane.absent.departed[sender] = any = True
        for i in range(lane.keys.n):
            if lane.keys.at[i] != NULL:
                forget_late(lane.keys.at[i], sender)
    for i in range(lane.keys.n if any else 0):
        e = lane.keys.at[i]
        if e != NULL:
            hand_over(lane, e)
    return any


cdef inline uint32_t note_entries(Lane *lane) noexcept nogil:
    """Note the senders that have entered since the last call.

    Returns the latest term from which one lives, 0: there are none.
    """
    cdef uint32_t sender, term, latest = 0
    for sender in range(lane.settings.senders):
        term = <uint32_t>atomic_load(&lane.absent.entered[sender])
        if term == 0:
            continue
        atomic_store(&lane.absent.entered[sender], 0)
        if lane.absent.lost[sender]:
            lane.absent.living += 1
        lane.absent.lost[sender] = lane.absent.skipped[sender] = False
        latest = max(latest, term)
    return latest


cdef inline void take_entries(Lane *lane) noexcept nogil:
    """Add senders that have entered. No round is open, and each sender has all outcomes.

    Without memory for the term the lane ends.
    """
    cdef uint32_t i, sender, latest = note_entries(lane)
    if latest == 0:
        return
    if gathering_of(lane, latest) == NULL:
        lane.counters.dropped += 1
        return
    lane.terms.at[latest].over = True       # no keys move in this term, so no sender reports any
    lane.terms.era = max(lane.terms.era, latest)
    for i in range(lane.keys.n):
        if lane.keys.at[i] != NULL:
            end_takeover(lane, lane.keys.at[i])
            for sender in range(lane.settings.senders):
                lane.keys.at[i].shares[sender].lacked = False
            lane.keys.at[i].term = latest
