# A connection over RDMA, and an endpoint's state. See endpoint.pyx.
#
# Each end registers an *inbox*, into which the other end writes. The writer alone allocates the
# units of the inbox, so it knows what is free. Each message carries a token. The reader returns the
# token when it has released the message, and the message's units are free again. Each message also
# consumes one receive request of the peer; the requests still available are the writer's *credits*.
# Returned tokens and new credits travel in the prefix of the next message, or in a message of their
# own if none is sent for long.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free

from bpsx.system.sync cimport Monitor, atomic_load, atomic_store, lock, unlock
from bpsx.transports.abi cimport Landing, Message, done_fn
from bpsx.transports.sockets.peers cimport Losses, Peers, add_loss, free_aligned, write
from bpsx.transports.rdma.memory_region cimport Registered
from bpsx.transports.rdma.allocator cimport Units, give_units
from bpsx.transports.rdma.verbs cimport ibv_comp_channel, ibv_cq, ibv_mr, ibv_qp, ibv_wc, reset

cdef extern from "<sys/socket.h>" nogil:
    int SHUT_RDWR
    int shutdown(int fd, int how)

cdef enum:
    # Bytes of memory of a receive request; a message that fits is sent instead of written.
    SMALL = 256
    TOKENS = 1024
    RETURNED = 12               # most tokens that one message returns
    # Credits and send queue entries kept for messages that return tokens, so that the two ends
    # cannot deadlock.
    RESERVED = 2
    POLLED = 16
    MOST_HEAD = 1 << 20
    HEAD_ROOM = 64              # alignment of a body behind prefix and head, bytes
    # Work request ids: of a write its token; of a receive request EXPECTED | its index; of a send
    # FROM_UNIT | the outbox's unit, or NO_TOKEN if it was inline.
    EXPECTED = 1 << 24
    FROM_UNIT = 1 << 25
    NO_TOKEN = 1 << 26

cdef enum Kind:
    WHOLE = 1                   # prefix, head at 64, body behind it at a multiple of 64
    # Prefix, and `length` bytes from offset `begin` of head and body together.
    PIECE = 2
    RETURNS = 3                 # a prefix only
    # Prefix and head; the body was written to address `begin`, where its reader wanted it.
    LANDED = 4

# Header of each message, 64 bytes. In a WHOLE message `begin`, `length` and `rkey` say where the
# body of its reply shall be written.
cdef struct Prefix:
    uint64_t body_size
    uint64_t begin
    uint32_t head_size
    uint32_t length
    uint32_t token
    uint32_t credits            # receive requests posted since the previous message
    uint8_t kind
    uint8_t has_body
    # Much of the inbox is in use, so the reader must copy the message instead of keeping it.
    uint8_t tight
    uint8_t n_returned
    uint16_t returned[RETURNED]
    uint32_t rkey

cdef struct Outgoing:           # a message that is not posted
    Outgoing *next
    char *head
    size_t head_size
    char *body                  # NULL: has none
    size_t body_size
    done_fn head_done
    done_fn body_done
    void *head_hint
    void *body_hint
    size_t sent                 # bytes of head and body together sent in pieces so far
    Landing landing             # see abi.pxd; `key` is an rkey; `at` 0: none

cdef struct Sent:               # a message that is posted
    bint used
    bint written                # completed: the adapter no longer reads the memory here
    bint returned               # the peer has returned the token
    bint landed                 # took two work requests
    uint32_t inbox_unit, n_inbox_units      # units of the peer's inbox: first, number
    uint32_t outbox_unit, n_outbox_units    # units of the outbox: first, number
    Outgoing what               # done callbacks to run on completion

cdef struct Waiting:            # a message received before recv asked for it
    Message m
    Waiting *next

cdef struct Completions:
    bint armed                  # the next completion raises an event
    ibv_wc found[POLLED]        # completions polled
    int n
    int at                      # index of the next completion to handle

cdef struct Inbound:            # receiving
    char *inbox
    uint64_t inbox_bytes
    char *small                 # memory of the receive requests, SMALL bytes each
    uint32_t small_lkey
    uint32_t depth              # number of receive requests
    uint32_t consumed           # receive requests posted again, not yet reported to the peer
    int64_t held                # messages in the inbox that have ever been returned by recv
    char *block                 # a message that arrives in pieces
    Prefix prefix               # prefix of its first piece
    uint64_t filled
    Waiting *first_waiting
    Waiting *last_waiting

cdef struct ReturnedTokens:     # tokens to return: any thread may release messages
    Monitor monitor             # guards the others
    bint open                   # the peer may still get them
    int64_t released            # of the messages that `Inbound.held` counts
    int64_t n
    uint64_t nbytes             # bytes of the messages whose tokens these are
    uint16_t returned[TOKENS]

cdef struct Outbound:           # sending
    uint64_t remote
    uint32_t rkey
    uint32_t remote_depth
    Units inbox_units           # allocation of the peer's inbox
    uint32_t credits
    uint32_t send_room          # free entries of the send queue
    uint32_t most_inline        # bytes that a work request may carry inline
    uint32_t n_unused
    uint16_t unused[TOKENS]     # free tokens; the first `n_unused` are valid
    Sent sent[TOKENS]
    uint32_t n_lent
    uint8_t *lent               # by unit of the outbox: holds a small message in the send queue
    Outgoing *first             # messages that wait for room
    Outgoing *last

cdef struct Connection:
    Connection *next
    EndpointState *state
    uint32_t peer
    bint dead
    bint ends                   # the peer has gone; what has arrived is still read
    int why                     # status of the completion that ended the connection, or 0
    int fd                      # TCP connection, which reports the peer's death
    ibv_qp *qp
    ibv_cq *cq
    ibv_mr *mr                  # the inbox and the memory of the receive requests
    uint64_t mapped             # bytes of both
    Completions completions
    Inbound inbound
    ReturnedTokens tokens
    Outbound outbound

# More than 20 fields: the two that wake the driver, its connections, and the memory it sends from.
cdef struct EndpointState:
    Monitor monitor             # guards `new`, and what other threads read of `all`
    Losses losses
    int epoll
    int wake_fd
    bint woken                  # wake was called, and no wait has ended since
    int64_t parked              # the driving thread is in wait
    ibv_comp_channel *channel
    int since                   # calls of recv since the last epoll_wait()
    uint64_t most_bytes         # largest body accepted
    uint64_t most_written       # largest message sent in one piece; the adapter's limit
    int64_t malformed
    int64_t n_new
    Connection *new
    Connection *all
    Connection *next_to_read
    Connection *ended           # dropped; messages in their inboxes may still be in use
    int64_t n_released          # messages of those that have been released since the last look
    Peers peers
    # Registered memory from which messages are sent that are not in registered memory already:
    char *outbox
    uint32_t outbox_lkey
    Units outbox_units          # allocation of the outbox
    Registered memory
    int64_t copied              # bytes of bodies copied by this end


cdef inline uint64_t before_body(size_t head_size) noexcept nogil:
    """Bytes from a message's prefix to its body."""
    return sizeof(Prefix) + ((head_size + HEAD_ROOM - 1) & ~<uint64_t>(HEAD_ROOM - 1))


cdef inline void tell_done(Outgoing *o) noexcept nogil:
    """Run the done callbacks of a message, once."""
    cdef done_fn head_done = o.head_done, body_done = o.body_done
    o.head_done = o.body_done = NULL
    if head_done != NULL:
        head_done(o.head, o.head_hint)
    if body_done != NULL:
        body_done(o.body, o.body_hint)


cdef inline void end_token(Connection *c, uint32_t token) noexcept nogil:
    c.outbound.sent[token].used = False
    c.outbound.unused[c.outbound.n_unused] = <uint16_t>token
    c.outbound.n_unused += 1


cdef inline void complete(Connection *c, uint32_t token) noexcept nogil:
    """Handle the completion of a write: the adapter no longer reads the memory here."""
    cdef Sent *sent = &c.outbound.sent[token]
    sent.written = True
    give_units(&c.state.outbox_units, sent.outbox_unit, sent.n_outbox_units)
    tell_done(&sent.what)
    if sent.returned:
        end_token(c, token)


cdef inline bint take_back(Connection *c, uint32_t token) noexcept nogil:
    """Free a returned token's units. False: the peer returned a token that it does not have."""
    cdef Sent *sent
    if token >= TOKENS or not c.outbound.sent[token].used or c.outbound.sent[token].returned:
        return False
    sent = &c.outbound.sent[token]
    sent.returned = True
    give_units(&c.outbound.inbox_units, sent.inbox_unit, sent.n_inbox_units)
    if sent.written:
        end_token(c, token)
    return True


cdef inline void put_token(Connection *c, uint32_t token, uint64_t nbytes) noexcept nogil:
    """Store a token that goes back with the next message. The caller has the monitor."""
    if c.tokens.open and c.tokens.n < TOKENS:
        c.tokens.returned[c.tokens.n] = <uint16_t>token
        c.tokens.nbytes += nbytes
        atomic_store(&c.tokens.n, c.tokens.n + 1)


cdef inline void return_token(Connection *c, uint32_t token, uint64_t nbytes) noexcept nogil:
    """Return a token to its writer. Any thread may call it."""
    lock(&c.tokens.monitor)
    put_token(c, token, nbytes)
    unlock(&c.tokens.monitor)
    if atomic_load(&c.state.parked):
        wake_up(c.state)


cdef inline void release_message(Message *m) noexcept nogil:
    """Return a received message's memory. Any thread may call it."""
    cdef Connection *c = <Connection *>m.opaque[2]
    cdef EndpointState *s
    if m.opaque[1]:
        free_aligned(<void *>m.opaque[1])
        return
    s = c.state
    lock(&c.tokens.monitor)
    put_token(c, <uint32_t>m.opaque[0], m.head_size + m.body_size)
    c.tokens.released += 1
    if not c.tokens.open:
        atomic_store(&s.n_released, 1)
    unlock(&c.tokens.monitor)   # the last access: with its last message an ended one is freed
    if atomic_load(&s.parked):
        wake_up(s)


cdef inline void take_unit_back(Connection *c, uint32_t unit) noexcept nogil:
    """Free a unit of the outbox, from which the adapter has sent."""
    c.outbound.lent[unit] = 0
    c.outbound.n_lent -= 1
    give_units(&c.state.outbox_units, unit, 1)


cdef inline void wake_up(EndpointState *s) noexcept nogil:
    cdef uint64_t one = 1
    write(s.wake_fd, &one, sizeof(one))


cdef inline void let_go(Connection *c) noexcept nogil:
    """Stop the queue pair, and run the done callbacks of all messages."""
    cdef Outgoing *o
    cdef uint32_t token
    cdef uint32_t unit
    c.dead = True
    reset(c.qp)
    if c.fd >= 0:
        # Tell the peer, which would not notice without a message to send.
        shutdown(c.fd, SHUT_RDWR)
    for token in range(TOKENS):
        if c.outbound.sent[token].used and not c.outbound.sent[token].written:
            complete(c, token)
    for unit in range(c.state.outbox_units.n if c.outbound.n_lent else 0):
        if c.outbound.lent[unit]:
            take_unit_back(c, unit)
    while c.outbound.first != NULL:
        o, c.outbound.first = c.outbound.first, c.outbound.first.next
        tell_done(o)
        free(o)
    c.outbound.last = NULL
    free_aligned(c.inbound.block)
    c.inbound.block = NULL


cdef inline void lose(EndpointState *s, Connection *c) noexcept nogil:
    """Mark the connection as broken, release what it holds, report the loss."""
    if not c.dead:
        let_go(c)
        add_loss(&s.losses, c.peer)


cdef inline bint take_waiting(Connection *c, Message *m) noexcept nogil:
    cdef Waiting *w = c.inbound.first_waiting
    if w == NULL:
        return False
    m[0] = w.m
    c.inbound.first_waiting = w.next
    free(w)
    return True
