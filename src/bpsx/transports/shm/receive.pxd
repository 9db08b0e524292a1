# Receive path: messages are read in the segments of all links, and come from the inner endpoint.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from bpsx.system.sync cimport atomic_add, atomic_load, atomic_store, lock, unlock
from bpsx.transports.abi cimport Message
from bpsx.transports.shm.connection cimport (
    MOST_HEAD, TOKENS, EndpointState, Link, RingEntry, leave, notice, take_new, wake_up,
)
from bpsx.transports.sockets.peers cimport aligned, free_aligned

cdef enum:
    # Messages from shared memory before the inner transport is asked again.
    LOOK_EVERY = 16


cdef inline bint makes_sense(EndpointState *s, Link *l, RingEntry *e) noexcept nogil:
    return (
        e.head_size <= MOST_HEAD
        and e.head <= l.n_bytes - e.head_size
        and e.has_body <= 1
        and e.body_size <= s.most_bytes
        and (e.body_size <= l.n_bytes and e.body <= l.n_bytes - e.body_size)
        and (e.has_body or not e.body_size)
    )


cdef inline void return_token(Link *l, uint32_t token, bint held) noexcept nogil:
    """Return a message's token to the writer. Any thread may call it.

    ``held``: the message was read in place.
    """
    cdef int64_t at
    lock(&l.monitor)
    if l.mapping.there:
        at = l.back.returned
        l.back.returns[at % TOKENS] = token
        atomic_store(&l.back.returned, at + 1)
    if held and atomic_add(&l.mapping.held, -1) == 0 and l.mapping.dropped:
        leave(l)
    unlock(&l.monitor)


cdef inline bint take_entry(EndpointState *s, Link *l, Message *m) noexcept nogil:
    cdef RingEntry e
    cdef char *copied
    while l.taken != atomic_load(&l.back.posted):
        e = l.back.entries[l.taken % TOKENS]
        l.taken += 1
        atomic_store(&l.back.taken, l.taken)
        if atomic_load(&l.back.starving):
            atomic_store(&l.back.starving, 0)
            wake_up(l)
        if not makes_sense(s, l, &e):
            atomic_add(&s.malformed, 1)
            return_token(l, e.token, False)
            continue
        m.peer, m.has_body = l.peer, e.has_body
        m.head, m.head_size = l.base + e.head, e.head_size
        m.body, m.body_size = l.base + e.body if e.has_body else NULL, e.body_size
        m.opaque[0], m.opaque[1] = e.token, 0
        m.wrapper = <uint64_t>l
        if atomic_load(&l.back.tight):
            copied = <char *>aligned(((e.head_size + 63) & ~<uint64_t>63) + e.body_size)
            if copied != NULL:
                memcpy(copied, m.head, e.head_size)
                m.head = copied
                if e.has_body:
                    memcpy(copied + ((e.head_size + 63) & ~<uint64_t>63), m.body, e.body_size)
                    m.body = copied + ((e.head_size + 63) & ~<uint64_t>63)
                m.opaque[1] = <uint64_t>copied
                return_token(l, e.token, False)
        if not m.opaque[1]:
            atomic_add(&l.mapping.held, 1)
        return True
    return False


cdef inline int shared_receive(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Link *first
    cdef Link *l
    cdef int got
    take_new(s)
    s.turn += 1
    if s.all != NULL and s.turn % LOOK_EVERY:
        first = l = s.next_to_read if s.next_to_read != NULL else s.all
        while True:
            if not l.dead:
                notice(s, l)
            if not l.dead and take_entry(s, l, m):
                s.next_to_read = l.next
                return 1
            l = l.next if l.next != NULL else s.all
            if l == first:
                break
    got = s.inner.recv(s.inner.self, m)
    m.wrapper = 0
    return got


cdef inline void shared_release(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    if m.wrapper == 0:
        s.inner.release(s.inner.self, m)
    elif m.opaque[1]:
        free_aligned(<void *>m.opaque[1])
    else:
        return_token(<Link *>m.wrapper, <uint32_t>m.opaque[0], True)


cdef inline bint has_news(EndpointState *s) noexcept nogil:
    cdef Link *l = s.all
    while l != NULL:
        if (
            not l.dead
            and (
                l.taken != atomic_load(&l.back.posted)
                or l.reclaimed != atomic_load(&l.out.returned)
                or (l.noticed != atomic_load(&l.out.taken)) or atomic_load(&l.gone)
                or atomic_load(&l.back.closed)
            )
        ):
            return True
        l = l.next
    return False


cdef inline void shared_wait(void *self, int timeout_ms) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Link *l
    take_new(s)
    l = s.all
    while l != NULL:
        if not l.dead:
            notice(s, l)
            atomic_store(&l.back.parked, 1)
            if not s.is_lane and l.noticed != l.out.posted:
                atomic_store(&l.out.starving, 1)
        l = l.next
    s.inner.wait(s.inner.self, 0 if has_news(s) else timeout_ms)
    l = s.all
    while l != NULL:
        if not l.dead:
            atomic_store(&l.back.parked, 0)
            notice(s, l)
        l = l.next


cdef inline void shared_wake(void *self) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    s.inner.wake(s.inner.self)
