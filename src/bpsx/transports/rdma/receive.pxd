# Receive path of an RDMA connection: completions, one after the other. A WHOLE message is read in
# the inbox, without a copy.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from bpsx.system.sync cimport atomic_add, atomic_store
from bpsx.transports.abi cimport Message
from bpsx.transports.sockets.peers cimport aligned
from bpsx.transports.rdma.connection cimport (
    EXPECTED, FROM_UNIT, HEAD_ROOM, LANDED, MOST_HEAD, NO_TOKEN, PIECE, POLLED, RETURNED, RETURNS,
    SMALL, TOKENS, WHOLE, Connection, Prefix, EndpointState, Waiting, before_body, complete, lose,
    release_message, return_token, take_back, take_unit_back, take_waiting, wake_up,
)
from bpsx.transports.rdma.ended cimport take_new
from bpsx.transports.rdma.memory_region cimport Range, find_range
from bpsx.transports.rdma.allocator cimport UNIT
from bpsx.transports.rdma.progress cimport is_busy, look, see_to
from bpsx.transports.rdma.send cimport flush, has_returns, send_returns
from bpsx.transports.rdma.verbs cimport (
    IBV_WC_RECV_RDMA_WITH_IMM, expect, ibv_poll_cq, ibv_sge, ibv_wc, immediate,
)

cdef enum:
    # Calls of recv before epoll is asked again while there are messages: a peer may have died.
    LOOK_EVERY = 256
    MOST_BODY_GIB = 1024


cdef inline bint expect_one(Connection *c, uint32_t which) noexcept nogil:
    """Post the receive request with index ``which``."""
    cdef ibv_sge piece
    piece.addr, piece.length, piece.lkey = <uint64_t>(
        c.inbound.small + which * SMALL
    ), SMALL, c.inbound.small_lkey
    return expect(c.qp, EXPECTED | which, &piece) == 0


cdef inline bint is_lent(EndpointState *s, uint64_t at, uint64_t n) noexcept nogil:
    cdef Range *registered = find_range(&s.memory, at, n)
    return registered != NULL and registered.lent != NULL


cdef inline bint makes_sense(
    EndpointState *s, Connection *c, Prefix *p, uint64_t room
) noexcept nogil:
    """Check a prefix. ``room``: bytes behind the prefix in which the message must lie."""
    if (
        p.head_size > MOST_HEAD
        or p.has_body > 1
        or p.body_size > s.most_bytes
        or p.body_size >> 30 > MOST_BODY_GIB
    ):
        return False
    if (
        (p.body_size and not p.has_body)
        or p.n_returned > RETURNED
        or p.credits > c.outbound.remote_depth - c.outbound.credits
    ):
        return False
    if p.kind == RETURNS:
        return True
    if p.kind == LANDED:    # the body must be in lent memory
        return (
            p.token == NO_TOKEN
            and p.has_body
            and p.head_size <= room
            and is_lent(s, p.begin, p.body_size)
        )
    if p.kind == WHOLE:     # a small message has its body right behind its head
        return (
            p.head_size + p.body_size if p.token == NO_TOKEN
            else before_body(p.head_size) - sizeof(Prefix) + p.body_size
        ) <= room
    return (
        p.kind == PIECE
        and p.token < TOKENS
        and p.length <= room
        and p.begin + p.length <= p.head_size + p.body_size
        and p.length > 0
    )


cdef inline void fill(
    Connection *c, Message *m, Prefix *p, char *head, char *body, char *block
) noexcept nogil:
    m.peer, m.head, m.head_size, m.has_body, m.body_size = (
        c.peer, head, p.head_size, p.has_body, p.body_size
    )
    m.body = body if p.has_body else NULL
    m.opaque[0], m.opaque[1], m.opaque[2] = p.token, <uint64_t>block, <uint64_t>c
    m.landing.at, m.landing.room, m.landing.key, m.landing.remote = (
        p.begin
        if p.kind == WHOLE
        else 0, p.length, p.rkey, True
    )


cdef inline int take_copy(
    Connection *c, Message *m, Prefix *p, char *head, char *body
) noexcept nogil:
    """Copy the message into memory of its own."""
    cdef uint64_t begin = before_body(p.head_size) - sizeof(Prefix)
    cdef char *block = <char *>aligned(begin + p.body_size + HEAD_ROOM)
    if block == NULL:
        return -1
    memcpy(block, head, p.head_size)
    if p.body_size:
        memcpy(block + begin, body, p.body_size)
        c.state.copied += p.body_size
    fill(c, m, p, block, block + begin, block)
    return 1


cdef inline int take_landed(Connection *c, Message *m, Prefix *p, char *head) noexcept nogil:
    cdef char *block = <char *>aligned(p.head_size)
    if block == NULL:
        return -1
    memcpy(block, head, p.head_size)
    fill(c, m, p, block, <char *>p.begin, block)
    return 1


cdef inline int take_piece(Connection *c, Message *m, Prefix *p, char *at) noexcept nogil:
    """Return 1 if the message is complete, 0 if pieces are missing, -1 if the piece is invalid."""
    cdef uint64_t begin = before_body(p.head_size) - sizeof(Prefix)
    cdef uint64_t of_head
    if p.begin == 0 and c.inbound.block == NULL:
        c.inbound.block = <char *>aligned(begin + p.body_size + HEAD_ROOM)
        c.inbound.prefix, c.inbound.filled = p[0], 0
    if (
        c.inbound.block == NULL
        or p.begin != c.inbound.filled
        or p.head_size != c.inbound.prefix.head_size
        or p.body_size != c.inbound.prefix.body_size
    ):
        return -1
    of_head = min(<uint64_t>p.length, p.head_size - p.begin) if p.begin < p.head_size else 0
    memcpy(c.inbound.block + p.begin, at, of_head)
    if p.length > of_head:
        memcpy(
            c.inbound.block + begin + (p.begin + of_head - p.head_size), at + of_head,
            p.length - of_head
        )
    c.inbound.filled += p.length
    c.state.copied += p.length
    return_token(c, p.token, p.length)
    if c.inbound.filled < p.head_size + p.body_size:
        return 0
    fill(c, m, p, c.inbound.block, c.inbound.block + begin, c.inbound.block)
    c.inbound.block = NULL
    return 1


cdef inline int take_written(Connection *c, Message *m, Prefix *p, char *at) noexcept nogil:
    cdef int rc
    if p.kind == PIECE:
        return take_piece(c, m, p, at)
    if p.kind != WHOLE or p.token >= TOKENS:
        return -1
    if not p.tight:
        c.inbound.held += 1
        fill(c, m, p, at, at + (before_body(p.head_size) - sizeof(Prefix)), NULL)
        return 1
    rc = take_copy(c, m, p, at, at + (before_body(p.head_size) - sizeof(Prefix)))
    return_token(c, p.token, p.head_size + p.body_size)
    return rc


cdef inline int take_arrival(
    EndpointState *s, Connection *c, ibv_wc *wc, Message *m
) noexcept nogil:
    """Handle a message's arrival, reported by the completion ``wc``.

    Return 1 if *m is filled, 0 if there is nothing to deliver, -1 if the connection is broken or
    the message is malformed.
    """
    # A copy, because the peer can overwrite its message while this function runs.
    cdef Prefix p
    cdef uint32_t which = <uint32_t>(wc.wr_id & (EXPECTED - 1)), i
    cdef bint written = wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM
    cdef uint64_t offset = <uint64_t>immediate(wc) * UNIT if written else 0
    cdef uint64_t room = c.inbound.inbox_bytes if written else wc.byte_len
    cdef char *at = c.inbound.inbox + offset if written else c.inbound.small + which * SMALL
    cdef int rc = -1
    if room >= sizeof(Prefix) and offset <= room - sizeof(Prefix):
        memcpy(&p, at, sizeof(Prefix))
        at += sizeof(Prefix)
        if (
            makes_sense(s, c, &p, room - offset - sizeof(Prefix))
            and (p.token == NO_TOKEN) != written
        ):
            c.outbound.credits += p.credits
            c.inbound.consumed += 1
            rc = 0
    for i in range(p.n_returned if rc == 0 else 0):
        if not take_back(c, p.returned[i]):
            rc = -1
    if rc == 0 and p.kind == LANDED:
        rc = take_landed(c, m, &p, at)
    elif rc == 0 and p.kind != RETURNS:
        rc = take_written(c, m, &p, at) if written else take_copy(c, m, &p, at, at + p.head_size)
    if rc < 0:
        atomic_add(&s.malformed, 1)
    elif not expect_one(c, which):
        c.ends = True           # messages that have arrived are still read
    return rc


cdef inline int next_message(EndpointState *s, Connection *c, Message *m) noexcept nogil:
    """Return 1 if *m is filled, 0 if there is no message, -1 if the connection is broken."""
    cdef ibv_wc *wc
    cdef int got
    while True:
        if c.completions.at == c.completions.n:
            c.completions.at, c.completions.n = 0, ibv_poll_cq(c.cq, POLLED, c.completions.found)
            if c.completions.n <= 0:
                got = -1 if c.completions.n < 0 or c.ends else 0
                c.completions.n = 0
                return got
        wc = &c.completions.found[c.completions.at]
        c.completions.at += 1
        if wc.status != 0:
            c.why = wc.status
            return -1
        if wc.wr_id & EXPECTED:
            got = take_arrival(s, c, wc, m)
            if got:
                return got
            continue
        c.outbound.send_room += 1
        if wc.wr_id & FROM_UNIT:
            take_unit_back(c, <uint32_t>(wc.wr_id & (FROM_UNIT - 1)))
        elif wc.wr_id < TOKENS:
            c.outbound.send_room += c.outbound.sent[wc.wr_id].landed
            complete(c, <uint32_t>wc.wr_id)


cdef inline int take_all(EndpointState *s, Connection *c) noexcept nogil:
    """Handle all completions, and queue the messages for recv.

    Needed while recv is not called, because the messages carry and precede returned tokens.
    Returns as next_message() does, but never 1.
    """
    cdef Waiting *w
    cdef int got
    while True:
        w = <Waiting *>malloc(sizeof(Waiting))
        if w == NULL:
            return -1
        got = next_message(s, c, &w.m)
        if got <= 0:
            free(w)
            return got
        w.next = NULL
        if c.inbound.first_waiting == NULL:
            c.inbound.first_waiting = w
        else:
            c.inbound.last_waiting.next = w
        c.inbound.last_waiting = w


cdef inline int from_one(EndpointState *s, Connection *c, Message *m) noexcept nogil:
    """Receive from one connection. Return 1 if *m is filled, else 0.

    Also posts messages that wait for room, where there is some.
    """
    cdef int got = 1 if take_waiting(c, m) else 0 if c.dead else next_message(s, c, m)
    if (
        not c.dead
        and (
            got < 0
            or flush(s, c) < 0
            or (has_returns(c, False) and send_returns(s, c, False) < 0)
        )
    ):
        lose(s, c)              # a received message stays valid as long as the endpoint
    return max(got, 0)


cdef inline int rdma_receive(void *self, Message *m) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *first
    cdef Connection *c
    take_new(s)
    s.since += 1
    if s.since >= LOOK_EVERY:
        look(s, 0)
    first = c = s.next_to_read if s.next_to_read != NULL else s.all
    while c != NULL:
        if (not c.dead or c.inbound.first_waiting != NULL) and from_one(s, c, m):
            s.next_to_read = c.next
            return 1
        c = c.next if c.next != NULL else s.all
        if c == first:
            break
    return 0


cdef inline void rdma_release(void *self, Message *m) noexcept nogil:
    release_message(m)


cdef inline void rdma_wait(void *self, int timeout_ms) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *c
    cdef bint busy = False
    take_new(s)
    c = s.all
    while c != NULL:            # all connections first, because they share the outbox
        if not c.dead and take_all(s, c) < 0:
            lose(s, c)
        c = c.next
    c = s.all
    while c != NULL:
        busy |= see_to(s, c)
        c = c.next
    busy |= s.woken
    atomic_store(&s.parked, 1)
    c = s.all
    while c != NULL:
        busy |= is_busy(s, c)
        c = c.next
    look(s, 0 if busy else timeout_ms)
    atomic_store(&s.parked, 0)
    s.woken = False
    c = s.all
    while c != NULL:
        if c.ends and not c.dead and take_all(s, c) < 0:
            lose(s, c)
        c = c.next


cdef inline void rdma_wake(void *self) noexcept nogil:
    wake_up(<EndpointState *>self)
