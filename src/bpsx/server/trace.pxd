# Trace of a lane: writes to its Watch. Called by the lane's thread, only if there is a Watch.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from bpsx.core.wire cimport Header
from bpsx.core.slab cimport take_record
from bpsx.system.sync cimport atomic_load, atomic_store, now_ns
from bpsx.core.trace.watch cimport RECEIVE, ROUND, SEND, SUM, Named, Watch
from bpsx.core.trace.recorder cimport (
    dtype_name, put, recording, say, say_values, wants_values, watched,
)
from bpsx.server.lane cimport Lane
from bpsx.server.store cimport OPEN, KeyState
from bpsx.transports.abi cimport Message

ctypedef unsigned long long big


cdef inline void note_message(Watch *w, Message *m) noexcept nogil:
    """Record that a message is about to be handled."""
    w.server.now = now_ns()
    if w.server.arrived == 0:
        w.server.arrived = w.server.now           # the message did not wait in the priority queue
    w.server.received += m.head_size + m.body_size


cdef inline void note_key(Watch *w, Header *h, const char *name) noexcept nogil:
    """Record a key's name, when the key is announced for the first time.

    Without memory the name stays unknown, with no other effect.
    """
    cdef Named *n = <Named *>take_record(&w.server.slabs, sizeof(Named) + h.length)
    if n == NULL:
        return
    n.next = <Named *>atomic_load(&w.server.named)
    n.key = h.key
    n.nbytes = h.cookie
    n.dtype = h.dtype
    n.name_bytes = <uint32_t>h.length
    memcpy(n.name, name, h.length)
    n.name[h.length] = 0
    atomic_store(&w.server.named, <int64_t>n)
    if w.keys:
        say(
            w.who, w.show_time, b"key %llu is %s: %s, %llu bytes", <big>h.key, n.name,
            dtype_name(h.dtype), <big>h.cookie
        )


cdef inline int64_t note_push(Lane *lane, KeyState *e, Header *h, const char *body) noexcept nogil:
    """Record a counted push. Return the time its sum begins if that is to be recorded, else 0."""
    cdef Watch *w = lane.watch
    if e.round.pushed == 1:
        e.trace.opened_ns = w.server.now
        e.trace.recorded = recording(w, e.rounds + 1) if watched(w) else 0
        w.server.open_rounds += 1
    elif e.round.pushed == lane.absent.living:
        w.server.waited_ns += w.server.now - e.trace.opened_ns
        if h.sender < w.server.n_late:
            w.server.late[h.sender].rounds += 1
            w.server.late[h.sender].ns += w.server.now - e.trace.latest_ns
    e.trace.latest_ns = w.server.now
    e.trace.latest = h.sender
    if not watched(w):
        return 0
    if w.messages:
        say(
            w.who, w.show_time, b"received PUSH key %llu round %u %llu bytes, worker %u",
            <big>h.key, h.round, <big>h.length, h.sender
        )
    if wants_values(w, h.key):
        say_values(w.who, w.show_time, b"received", h.key, h.round + 1, h.dtype, body, h.length)
    return now_ns() if e.trace.recorded else 0


cdef inline void note_sum(Lane *lane, KeyState *e, Header *h, int64_t begin) noexcept nogil:
    """Record that a push was added to the sum."""
    cdef Watch *w = lane.watch
    cdef bint wide = (
        e.memory.wide != NULL
        and 1 < e.round.added < lane.absent.living
        and not e.operation.broadcast
    )
    if begin:
        put(
            w, RECEIVE, e.trace.recorded, e.key, e.rounds + 1, w.server.arrived, begin, h.length,
            h.sender, 0
        )
        put(w, SUM, e.trace.recorded, e.key, e.rounds + 1, begin, now_ns(), h.length, h.sender, 0)
    if wants_values(w, h.key) and e.state == OPEN:
        if wide:            # the accumulator: int32 for 8-bit types, else float32
            say_values(
                w.who, w.show_time, b"sum so far", h.key, h.round + 1,
                7 if e.kernels.itemsize == 1 else 3, e.memory.wide,
                e.nbytes // e.kernels.itemsize * e.kernels.wide_itemsize
            )
        else:
            say_values(
                w.who, w.show_time, b"sum so far", h.key, h.round + 1, e.dtype, e.memory.sum,
                e.nbytes
            )


cdef inline void note_closing(Lane *lane, KeyState *e) noexcept nogil:
    """Record that a round is complete and its replies are about to be sent.

    Prints the result's values here, because the result may be freed afterwards.
    """
    cdef Watch *w = lane.watch
    cdef uint32_t sender
    w.server.open_rounds -= 1
    if not watched(w):
        return
    e.trace.closing_ns = now_ns()
    if wants_values(w, e.key):
        say_values(
            w.who, w.show_time, b"send", e.key, e.rounds + 1, e.dtype,
            e.memory.sum if e.state == OPEN else NULL, e.nbytes
        )
    for sender in range(lane.settings.senders if w.messages else 0):
        if not e.shares[sender].pushed:
            continue
        say(
            w.who, w.show_time, b"sent %s key %llu round %u %llu bytes, worker %u",
            b"ANSWER" if e.state == OPEN else b"ERROR", <big>e.key, e.rounds,
            <big>(e.nbytes if e.state == OPEN else 0), sender
        )


cdef inline void note_delta(Lane *lane, KeyState *e, Header *h, int64_t begin) noexcept nogil:
    """Record an asynchronous push, with its reply, as a round of its own."""
    cdef Watch *w = lane.watch
    cdef uint8_t flags = recording(w, e.rounds)
    if w.messages:
        say(
            w.who, w.show_time, b"added and answered PUSH key %llu round %u %llu bytes, worker %u",
            <big>h.key, h.round, <big>h.length, h.sender
        )
    if wants_values(w, h.key):
        say_values(w.who, w.show_time, b"value", h.key, h.round + 1, h.dtype, e.value, h.length)
    if flags:
        put(w, RECEIVE, flags, e.key, e.rounds, w.server.arrived, begin, h.length, h.sender, 0)
        put(w, SUM, flags, e.key, e.rounds, begin, now_ns(), h.length, h.sender, 0)


cdef inline void note_closed(Lane *lane, KeyState *e) noexcept nogil:
    """Record that the round's replies were handed to the transport."""
    cdef int64_t now
    if e.trace.recorded and watched(lane.watch):
        now = now_ns()
        put(
            lane.watch, SEND, e.trace.recorded, e.key, e.rounds + 1, e.trace.closing_ns, now,
            e.nbytes, 0, e.failure.status
        )
        put(
            lane.watch, ROUND, e.trace.recorded, e.key, e.rounds + 1, e.trace.opened_ns, now,
            e.nbytes, e.trace.latest, e.failure.status
        )
    e.trace.recorded = 0
