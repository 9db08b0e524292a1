# Send path: a message goes into the segment of its peer's link, or else to the inner endpoint.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from bpsx.system.sync cimport atomic_load, atomic_store
from bpsx.transports.abi cimport Landing, done_fn
from bpsx.transports.shm.allocator cimport Block, take_block
from bpsx.transports.shm.connection cimport (
    MOST_HEAD, REGION, TOKENS, EndpointState, Link, RingEntry, Sent, notice, run_dones, take_new,
    wake_up,
)


cdef inline bint is_shared(Link *l, void *body) noexcept nogil:
    return <char *>body >= l.base and <char *>body < l.base + l.n_bytes


cdef inline bint put(
    EndpointState *s, Link *l, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint
) noexcept nogil:
    """Write a message to the segment. False: no room or too large; nothing has changed then.

    A worker's done callbacks run when the lane has taken the message, so messages that wait keep
    the worker's own order. A lane's run at once; a lent body's runs when its token is returned.
    """
    cdef uint64_t head_room = (head_size + 63) & ~<uint64_t>63
    cdef bint lent = s.is_lane and body != NULL and body_size and is_shared(l, body)
    cdef uint64_t n = head_room + (0 if lent or body == NULL else body_size)
    cdef int64_t at = l.out.posted
    cdef Block *block
    cdef Sent *sent
    cdef RingEntry *e
    if l.n_free == 0 or head_size > MOST_HEAD or n > REGION // 4:
        return False
    block = take_block(&l.arena, n)
    if block == NULL:
        return False
    l.n_free -= 1
    e = &l.out.entries[at % TOKENS]
    e.token = l.unused[l.n_free]
    l.order[at % TOKENS] = e.token
    sent = &l.sent[e.token]
    sent.used, sent.block, sent.lent = True, block, lent
    sent.head, sent.head_done, sent.head_hint = head, head_done, head_hint
    sent.body, sent.body_done, sent.body_hint = body, body_done, body_hint
    e.head, e.head_size = l.region - l.base + block.offset, head_size
    e.has_body, e.body_size = body != NULL, body_size if body != NULL else 0
    e.body = <char *>body - l.base if lent else e.head + head_room
    memcpy(l.base + e.head, head, head_size)
    if not lent and e.body_size:
        memcpy(l.base + e.body, body, e.body_size)
    if not l.out.tight and (l.n_free < TOKENS // 2 or l.arena.used > REGION // 2):
        atomic_store(&l.out.tight, 1)
    atomic_store(&l.out.posted, at + 1)
    if atomic_load(&l.out.parked):
        wake_up(l)
    if s.is_lane:
        run_dones(sent, not lent)
    return True


cdef inline int shared_send(
    void *self, uint32_t peer, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Link *l
    cdef int rc
    take_new(s)
    l = <Link *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    if l != NULL and not l.dead:
        notice(s, l)
    if (
        l != NULL
        and not l.dead
        and l.named
        and put(s, l, head, head_size, head_done, head_hint, body, body_size, body_done, body_hint)
    ):
        return 0
    rc = s.inner.send(
        s.inner.self, peer, head, head_size, head_done, head_hint, body, body_size, body_done,
        body_hint, landing
    )
    if l != NULL and rc == 0:
        l.named = True
    return rc


cdef inline void shared_lend(void *self, uint32_t peer, void *at, uint64_t n) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Link *l = <Link *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    if l == NULL or l.dead:             # a live link copies bodies into the segment
        s.inner.lend(s.inner.self, peer, at, n)
