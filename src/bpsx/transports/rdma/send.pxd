# Send path of an RDMA connection: post if resources allow, otherwise queue by reference.
#
# A message needs a credit and room in the send queue. A message that is written, not sent, needs a
# token and units of the peer's inbox, and units of the outbox for its prefix and head, and for a
# body that is not in registered memory. The adapters free all of these by themselves, except
# tokens and inbox units. A reader may hold those for long,
# because a lane computes the sum in the first push of a round. Once half of either is in use, the
# prefix therefore asks the reader to copy what it keeps. So readers never hold more than half. If
# the other half has no run of units that is long enough, the message is sent in pieces, which
# readers never hold.
#
# The body of a reply is written where its reader asked for it, if it did, and needs no inbox units.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from bpsx.system.sync cimport atomic_load, atomic_store, lock, unlock
from bpsx.transports.abi cimport Landing, done_fn
from bpsx.transports.rdma.connection cimport (
    FROM_UNIT, LANDED, NO_TOKEN, PIECE, RESERVED, RETURNED, RETURNS, SMALL, TOKENS, WHOLE,
    Connection, Outgoing, Prefix, Sent, EndpointState, before_body, lose, tell_done,
)
from bpsx.transports.rdma.ended cimport take_new
from bpsx.transports.rdma.memory_region cimport Range, find_range, register_lent
from bpsx.transports.rdma.allocator cimport UNIT, give_units, longest_run, take_units, units_for
from bpsx.transports.rdma.verbs cimport IBV_SEND_INLINE, ibv_sge, post, post_both
from bpsx.transports.sockets.peers cimport signal_loss


cdef inline void put_prefix(Connection *c, Prefix *p, Outgoing *o, uint8_t kind) noexcept nogil:
    """Fill in a prefix except for the message's position, and add tokens to return."""
    cdef int64_t i
    memset(p, 0, sizeof(Prefix))
    p.kind, p.token = kind, NO_TOKEN
    if o != NULL:
        p.head_size, p.has_body, p.body_size = <uint32_t>o.head_size, o.body != NULL, o.body_size
    if kind == WHOLE and o.landing.at and not o.landing.remote:
        p.begin, p.length, p.rkey = o.landing.at, <uint32_t>o.landing.room, o.landing.key
    p.credits, c.inbound.consumed = c.inbound.consumed, 0
    if atomic_load(&c.tokens.n) == 0:
        return
    lock(&c.tokens.monitor)
    p.n_returned = <uint8_t>min(c.tokens.n, <int64_t>RETURNED)
    for i in range(p.n_returned):
        p.returned[i] = c.tokens.returned[c.tokens.n - 1 - i]
    atomic_store(&c.tokens.n, c.tokens.n - p.n_returned)
    if c.tokens.n == 0:
        c.tokens.nbytes = 0
    unlock(&c.tokens.monitor)


cdef inline char *place_for(
    EndpointState *s, Connection *c, uint32_t n, char *inline_buffer, uint64_t *number
) noexcept nogil:
    """Return memory to build a message of ``n`` bytes in, and set *number to the request's id.

    It is ``inline_buffer`` if the adapter can send the message inline, else a unit of the outbox.
    NULL: the outbox has no room.
    """
    cdef int64_t unit
    number[0] = NO_TOKEN
    if n <= c.outbound.most_inline:
        return inline_buffer
    unit = take_units(&s.outbox_units, 1)
    if unit < 0:
        return NULL
    number[0] = FROM_UNIT | <uint64_t>unit
    c.outbound.lent[unit] = 1
    c.outbound.n_lent += 1
    return s.outbox + unit * UNIT


cdef inline int send_out(
    EndpointState *s, Connection *c, char *message, uint32_t n, uint64_t number
) noexcept nogil:
    """Post a send. Return 1, or -1 if the connection is broken."""
    cdef ibv_sge piece
    piece.addr, piece.length, piece.lkey = <uint64_t>message, n, s.outbox_lkey
    if post(c.qp, number, &piece, 1, IBV_SEND_INLINE if number == NO_TOKEN else 0, 0, 0, 0) != 0:
        return -1
    c.outbound.credits -= 1
    c.outbound.send_room -= 1
    return 1


cdef inline int post_small(EndpointState *s, Connection *c, Outgoing *o) noexcept nogil:
    cdef char inline_buffer[SMALL]
    cdef uint32_t n = <uint32_t>(sizeof(Prefix) + o.head_size + o.body_size)
    cdef uint64_t number = 0
    cdef char *message = place_for(s, c, n, inline_buffer, &number)
    if message == NULL:
        return 0
    put_prefix(c, <Prefix *>message, o, WHOLE)
    memcpy(message + sizeof(Prefix), o.head, o.head_size)
    if o.body_size:
        memcpy(message + sizeof(Prefix) + o.head_size, o.body, o.body_size)
    if send_out(s, c, message, n, number) < 0:
        return -1
    tell_done(o)
    return 1


cdef inline Sent *take_room(
    EndpointState *s, Connection *c, uint32_t n_inbox, uint32_t n_outbox, uint32_t *token
) noexcept nogil:
    """Reserve a token and units at both ends. NULL: there is no room."""
    cdef int64_t inbox, unit
    cdef Sent *sent
    if c.outbound.n_unused == 0:
        return NULL
    inbox = take_units(&c.outbound.inbox_units, n_inbox) if n_inbox else 0
    if inbox < 0:
        return NULL
    unit = take_units(&s.outbox_units, n_outbox)
    if unit < 0:
        give_units(&c.outbound.inbox_units, <uint32_t>inbox, n_inbox)
        return NULL
    c.outbound.n_unused -= 1
    token[0] = c.outbound.unused[c.outbound.n_unused]
    sent = &c.outbound.sent[token[0]]
    memset(sent, 0, sizeof(Sent))
    sent.used, sent.inbox_unit, sent.n_inbox_units, sent.outbox_unit, sent.n_outbox_units = (
        True, <uint32_t>inbox, n_inbox, <uint32_t>unit, n_outbox
    )
    return sent


cdef inline int write_out(
    Connection *c, Sent *sent, uint32_t token, ibv_sge *pieces, int n, Outgoing *what
) noexcept nogil:
    """Post a write. On completion the callbacks of ``what`` run, unless it is NULL.

    Return 1, or -1 if the connection is broken; no callback has run then.
    """
    if post(
        c.qp, token, pieces, n, 0, c.outbound.remote + <uint64_t>sent.inbox_unit * UNIT,
        c.outbound.rkey, sent.inbox_unit
    ) != 0:
        return -1
    if what != NULL:
        sent.what = what[0]
    c.outbound.credits -= 1
    c.outbound.send_room -= 1
    return 1


cdef inline int post_whole(
    EndpointState *s, Connection *c, Outgoing *o, const Range *registered
) noexcept nogil:
    """Post a message in one write. `registered`: the registered range of its body, or NULL.

    Return 1 if it is posted, 0 if there is no room, -1 if the connection is broken.
    """
    cdef uint64_t begin = before_body(o.head_size)
    cdef ibv_sge pieces[2]
    cdef uint32_t token = 0
    cdef Sent *sent = take_room(
        s, c, units_for(begin + o.body_size),
        units_for(begin + (0 if registered != NULL else o.body_size)), &token
    )
    cdef char *at
    cdef Prefix *p
    if sent == NULL:
        return 0
    at = s.outbox + <uint64_t>sent.outbox_unit * UNIT
    p = <Prefix *>at
    put_prefix(c, p, o, WHOLE)
    p.token, p.tight = (
        token, c.outbound.inbox_units.used > c.outbound.inbox_units.n // 2
        or c.outbound.n_unused < TOKENS // 2
    )
    memcpy(at + sizeof(Prefix), o.head, o.head_size)
    pieces[0].addr, pieces[0].length, pieces[0].lkey = (
        <uint64_t>at, <uint32_t>begin, s.outbox_lkey
    )
    if registered != NULL:
        pieces[1].addr, pieces[1].length, pieces[1].lkey = (
            <uint64_t>o.body, <uint32_t>o.body_size, registered.lkey
        )
    elif o.body_size:
        memcpy(at + begin, o.body, o.body_size)
        s.copied += o.body_size
        pieces[0].length += <uint32_t>o.body_size
    return write_out(c, sent, token, pieces, 2 if registered != NULL else 1, o)


cdef inline bint can_land(EndpointState *s, Outgoing *o, uint32_t n_outbox) noexcept nogil:
    """Whether the body can be written where its reader wants it.

    Its head is sent behind it and needs no room in the inbox.
    """
    return (
        o.landing.remote
        and o.landing.at
        and 0 < o.body_size <= min(o.landing.room, s.most_written)
        and sizeof(Prefix) + o.head_size <= SMALL
        and n_outbox <= s.outbox_units.n // 4
    )


cdef inline int post_landed(
    EndpointState *s, Connection *c, Outgoing *o, const Range *registered
) noexcept nogil:
    """Write the body where its reader wants it, and send the head. Return as post_whole()."""
    cdef uint32_t token = 0
    cdef ibv_sge head, body
    cdef Sent *sent
    cdef Prefix *p
    if c.outbound.send_room <= RESERVED + 1:
        return 0
    sent = take_room(s, c, 0, 1 if registered != NULL else 1 + units_for(o.body_size), &token)
    if sent == NULL:
        return 0
    sent.returned = sent.landed = True          # the message uses no inbox units
    p = <Prefix *>(s.outbox + <uint64_t>sent.outbox_unit * UNIT)
    put_prefix(c, p, o, LANDED)
    p.token, p.begin = NO_TOKEN, o.landing.at
    memcpy(p + 1, o.head, o.head_size)
    head.addr, head.length, head.lkey = <uint64_t>p, <uint32_t>(
        sizeof(Prefix) + o.head_size
    ), s.outbox_lkey
    body.addr, body.length, body.lkey = (
        <uint64_t>o.body, <uint32_t>o.body_size, registered.lkey
        if registered != NULL
        else s.outbox_lkey
    )
    if registered == NULL:
        body.addr = <uint64_t>p + UNIT
        memcpy(<char *>body.addr, o.body, o.body_size)
        s.copied += o.body_size
    if post_both(
        c.qp, token, &body, &head, IBV_SEND_INLINE if head.length <= c.outbound.most_inline else 0,
        o.landing.at, o.landing.key
    ) != 0:
        return -1
    sent.what = o[0]
    c.outbound.credits -= 1
    c.outbound.send_room -= 2
    return 1


cdef inline void copy_piece(char *to, Outgoing *o, uint64_t n) noexcept nogil:
    """Copy the next ``n`` bytes of head and body together."""
    cdef uint64_t of_head = min(n, o.head_size - o.sent) if o.sent < o.head_size else 0
    memcpy(to, o.head + o.sent, of_head)
    if n > of_head:
        memcpy(to + of_head, o.body + (o.sent + of_head - o.head_size), n - of_head)


cdef inline int post_piece(EndpointState *s, Connection *c, Outgoing *o) noexcept nogil:
    """Write as much of the message as fits, at most an eighth of the inbox or the outbox.

    Return 1 if that was the rest, 2 if more remains, 0 if there is no room, -1 if the connection is
    broken.
    """
    cdef uint32_t most = min(
        min(longest_run(&c.outbound.inbox_units), longest_run(&s.outbox_units)),
        min(
            min(c.outbound.inbox_units.n, s.outbox_units.n) // 8,
            <uint32_t>(s.most_written // UNIT)
        )
    )
    cdef uint64_t left = o.head_size + o.body_size - o.sent
    cdef uint32_t token = 0
    cdef Sent *sent
    cdef Prefix *p
    cdef ibv_sge piece
    if most == 0:
        return 0
    left = min(left, <uint64_t>most * UNIT - sizeof(Prefix))
    sent = take_room(
        s, c, units_for(sizeof(Prefix) + left), units_for(sizeof(Prefix) + left), &token
    )
    if sent == NULL:
        return 0
    p = <Prefix *>(s.outbox + <uint64_t>sent.outbox_unit * UNIT)
    put_prefix(c, p, o, PIECE)
    p.token, p.begin, p.length = token, o.sent, <uint32_t>left
    copy_piece(<char *>(p + 1), o, left)
    s.copied += left
    o.sent += left
    piece.addr, piece.length, piece.lkey = <uint64_t>p, <uint32_t>(
        sizeof(Prefix) + left
    ), s.outbox_lkey
    if o.sent == o.head_size + o.body_size:
        return write_out(c, sent, token, &piece, 1, o)      # earlier pieces complete before it
    return -1 if write_out(c, sent, token, &piece, 1, NULL) < 0 else 2


cdef inline bint has_room(Connection *c) noexcept nogil:
    return c.outbound.credits > RESERVED and c.outbound.send_room > RESERVED


cdef inline int post_message(EndpointState *s, Connection *c, Outgoing *o) noexcept nogil:
    """Post a message, whole or in pieces.

    Return 1 if it is posted, 0 if not or not all of it, -1 if the connection is broken. The done
    callbacks of a small message have run; those of others run on completion.
    """
    cdef int rc = 0
    cdef uint32_t wanted, n_outbox
    cdef const Range *registered
    if not has_room(c):
        return 0
    if o.sent == 0:
        if sizeof(Prefix) + o.head_size + o.body_size <= SMALL:
            return post_small(s, c, o)
        registered = find_range(&s.memory, <uint64_t>o.body, o.body_size)
        wanted = n_outbox = units_for(before_body(o.head_size) + o.body_size)
        if registered != NULL:
            n_outbox = units_for(before_body(o.head_size))
        if can_land(s, o, n_outbox):
            return post_landed(s, c, o, registered)
        if (
            wanted <= min(c.outbound.inbox_units.n // 4, <uint32_t>(s.most_written // UNIT))
            and n_outbox <= s.outbox_units.n // 4
        ):
            rc = post_whole(s, c, o, registered)
            # Units that no reader holds become free soon, and then the message may fit.
            if (
                rc
                or c.outbound.inbox_units.used > c.outbound.inbox_units.n // 2
                or longest_run(&c.outbound.inbox_units) >= wanted
            ):
                return rc
    while has_room(c):
        rc = post_piece(s, c, o)
        if rc != 2:
            return rc
    return 0


cdef inline Outgoing *copy_for_queue(Outgoing *o) noexcept nogil:
    """Return a copy of a message for the queue. A head without a done callback is copied."""
    cdef Outgoing *kept = <Outgoing *>malloc(
        sizeof(Outgoing) + (o.head_size if o.head_done == NULL else 0)
    )
    if kept == NULL:
        return NULL
    kept[0] = o[0]
    if o.head_done == NULL:
        kept.head = <char *>(kept + 1)
        memcpy(kept.head, o.head, o.head_size)
    return kept


cdef inline int flush(EndpointState *s, Connection *c) noexcept nogil:
    """Post queued messages as far as resources allow. -1: the connection is broken."""
    cdef Outgoing *o
    cdef int rc
    while c.outbound.first != NULL:
        rc = post_message(s, c, c.outbound.first)
        if rc <= 0:
            return rc
        o, c.outbound.first = c.outbound.first, c.outbound.first.next
        free(o)
    c.outbound.last = NULL
    return 0


cdef inline bint has_returns(Connection *c, bint all_of_it) noexcept nogil:
    cdef int64_t n = atomic_load(&c.tokens.n)
    return (
        c.inbound.consumed >= c.inbound.depth // 4
        or n >= RETURNED
        or (n and (all_of_it or c.tokens.nbytes >= c.inbound.inbox_bytes // 8))
    )


cdef inline bint can_send_returns(Connection *c) noexcept nogil:
    """Whether a RETURNS message may be sent.

    The last credit is reserved for messages that grant credits. Otherwise both ends could run out
    of credits and neither could grant any.
    """
    return (
        c.outbound.send_room
        and (c.outbound.credits > 1 or (c.outbound.credits and c.inbound.consumed))
    )


cdef inline int send_returns(EndpointState *s, Connection *c, bint all_of_it) noexcept nogil:
    """Send RETURNS messages, with tokens and the number of receive requests posted.

    Only if much is to be returned or, with ``all_of_it``, if anything is. -1: the connection is
    broken.
    """
    cdef Prefix inline_buffer
    cdef uint64_t number = 0
    cdef char *message
    while has_returns(c, all_of_it) and can_send_returns(c):
        message = place_for(s, c, sizeof(Prefix), <char *>&inline_buffer, &number)
        if message == NULL:
            return 0
        put_prefix(c, <Prefix *>message, NULL, RETURNS)
        if send_out(s, c, message, sizeof(Prefix), number) < 0:
            return -1
    return 0


cdef inline void take_landing(EndpointState *s, Landing *out, const Landing *wanted) noexcept nogil:
    """Prepare a landing for the peer. `out.at` is 0 if the adapter cannot reach the memory."""
    cdef Range *registered = NULL
    out.at = 0
    if wanted == NULL or wanted.at == 0 or wanted.room > s.most_written:
        return
    out[0] = wanted[0]
    if not wanted.remote:
        registered = find_range(&s.memory, wanted.at, wanted.room)
        if registered == NULL or registered.lent == NULL:
            out.at = 0
        else:
            out.key = registered.lent.rkey


cdef inline int rdma_send(
    void *self, uint32_t peer, void *head, size_t head_size, done_fn head_done, void *head_hint,
    void *body, size_t body_size, done_fn body_done, void *body_hint, const Landing *landing,
) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Connection *c
    cdef Outgoing o
    cdef Outgoing *kept
    cdef int rc = -1
    take_new(s)
    c = <Connection *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    o.next, o.head, o.head_size, o.head_done, o.head_hint = (
        NULL, <char *>head, head_size, head_done, head_hint
    )
    o.body, o.body_size, o.body_done, o.body_hint, o.sent = (
        <char *>body, body_size
        if body != NULL
        else 0, body_done, body_hint, 0
    )
    take_landing(s, &o.landing, landing)
    if c != NULL and not c.dead:
        rc = post_message(s, c, &o) if c.outbound.first == NULL else 0
    if rc == 0:
        kept = copy_for_queue(&o)
        if kept != NULL:
            if c.outbound.first == NULL:
                c.outbound.first = kept
            else:
                c.outbound.last.next = kept
            c.outbound.last = kept
            return 0
        rc = -1
    if rc < 0:
        if c != NULL:
            lose(s, c)          # before tell_done: of two requests the first may have been posted
        tell_done(&o)
    return 0 if rc > 0 else -1


cdef inline void rdma_lend(void *self, uint32_t peer, void *at, uint64_t n) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    if not register_lent(&s.memory, <char *>at, n):
        signal_loss(&s.losses)         # lost() logs the refusal
