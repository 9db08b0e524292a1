# A connection over RDMA, and what an endpoint has of them. See endpoint.pyx.
#
# Each end has registered memory, the *inbox*, that the other one writes into and gives out in
# units: whoever writes knows alone what is free there. A message says which token it is; whoever
# has read it returns the token, and its units are free again. Each message also takes one of the
# receive requests that the other has posted, its *credits*: what is returned, and how many requests
# were posted anew, travels in front of the next message, or in one of its own where there is none
# for long.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free

from bpsx.system.sync cimport Monitor, atomic_load, atomic_store, lock, unlock
from bpsx.transports.abi cimport Landing, Message, done_fn
from bpsx.transports.sockets.peers cimport Losses, Peers, add_loss, free_aligned, write
from bpsx.transports.rdma.memory_region cimport Registered
from bpsx.transports.rdma.allocator cimport Units, give_units
from bpsx.transports.rdma.verbs cimport ibv_comp_channel, ibv_cq, ibv_qp, ibv_wc, reset

cdef extern from "<sys/socket.h>" nogil:
    int SHUT_RDWR
    int shutdown(int fd, int how)

cdef enum:
    # bytes of a receive request's own memory: what is no larger is sent, not written
    SMALL = 256
    TOKENS = 1024
    RETURNED = 12               # tokens that one message can return
    # credits and sends that are kept for returning: so both ends cannot wait for each other's
    RESERVED = 2
    POLLED = 16
    MOST_HEAD = 1 << 20
    HEAD_ROOM = 64              # a multiple of this: where a body begins behind prefix and head
    # A request's number: of one that writes, its token; of a receive request EXPECTED and which; of
    # one that sends, FROM_UNIT and the outbox's unit, or NO_TOKEN.
    EXPECTED = 1 << 24
    FROM_UNIT = 1 << 25
    NO_TOKEN = 1 << 26

cdef enum Kind:
    WHOLE = 1                   # prefix, head at 64, body behind it at a multiple of 64
    # prefix, and `length` bytes of head and body together, from `begin` on
    PIECE = 2
    RETURNS = 3                 # a prefix only
    # prefix and head; the body is where its reader wanted it, at `begin`
    LANDED = 4

# What goes before each message: 64 bytes. Of a whole one `begin`, `length` and `rkey` are where its
# answer's body shall lie.
cdef struct Prefix:
    uint64_t body_size
    uint64_t begin
    uint32_t head_size
    uint32_t length
    uint32_t token
    uint32_t credits            # receive requests posted since the last message
    uint8_t kind
    uint8_t has_body
    # much of the inbox is in use: the reader shall not keep the message there
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
    size_t sent                 # bytes of head and body together that went in pieces
    Landing landing             # as in abi.pxd, with `key`; `at` 0: none

cdef struct Sent:               # a message that is posted
    bint used
    bint written                # the card is done with our memory
    bint returned               # the other is with his
    bint landed                 # it took two requests
    uint32_t there, n_there     # units of his inbox
    uint32_t here, n_here       # ... and of our outbox
    Outgoing what               # whom to tell

cdef struct Waiting:            # a message that has come and was not asked for
    Message m
    Waiting *next

cdef struct Connection:
    Connection *next
    State *state
    uint32_t peer
    bint dead
    bint ends                   # the other one has gone: what has arrived is still read
    int why                     # status of the completion that ended it; 0: none did
    int fd                      # a TCP connection that says when the other dies
    ibv_qp *qp
    ibv_cq *cq
    bint armed                  # the next completion raises an event
    ibv_wc found[POLLED]        # completions that were polled,
    int n_found
    int at_found                # ... and the next one to be looked at
    # What is written to us:
    char *inbox
    uint64_t inbox_bytes
    char *small                 # memory of the receive requests
    uint32_t small_lkey
    uint32_t depth              # receive requests
    uint32_t consumed           # ... that were posted anew, and the other does not know
    char *block                 # a message that comes in pieces
    Prefix prefix               # ... its first one
    uint64_t filled
    Waiting *first_waiting
    Waiting *last_waiting
    Monitor monitor             # guards what follows: messages are released on any thread
    bint mapped                 # our inbox is there
    int64_t n_returned
    uint64_t returned_bytes
    uint16_t returned[TOKENS]
    # Where we write:
    uint64_t remote
    uint32_t rkey
    uint32_t remote_depth
    Units there
    uint32_t credits
    uint32_t send_room          # requests that the send queue has room for
    uint32_t most_inline        # bytes that can travel in a request
    uint32_t n_unused
    uint16_t unused[TOKENS]     # tokens
    Sent sent[TOKENS]
    uint32_t n_lent
    uint8_t *lent               # by unit of the outbox: it holds a small message that is being sent
    Outgoing *first             # what waits for room
    Outgoing *last

cdef struct State:
    Monitor monitor             # guards `new`
    Losses losses
    int epoll
    int wake_fd
    bint woken                  # somebody has written there, and no wait has ended for it
    int64_t parked
    ibv_comp_channel *channel
    int since                   # calls of recv since the last look at connections
    uint64_t most_bytes         # of a message that comes
    uint64_t most_written       # ... that goes in one piece, by the adapter
    int64_t malformed
    int64_t n_new
    Connection *new
    Connection *all
    Connection *next_to_read
    Peers peers
    # Registered memory to send from, for what does not lie in such memory already:
    char *outbox
    uint32_t outbox_lkey
    Units here
    Registered memory
    int64_t copied              # bytes of bodies, by us


cdef inline uint64_t before_body(size_t head_size) noexcept nogil:
    """Bytes from a message's prefix to its body."""
    return sizeof(Prefix) + ((head_size + HEAD_ROOM - 1) & ~<uint64_t>(HEAD_ROOM - 1))


cdef inline void tell_done(Outgoing *o) noexcept nogil:
    """Give back what the caller had handed over, once."""
    cdef done_fn head_done = o.head_done, body_done = o.body_done
    o.head_done = o.body_done = NULL
    if head_done != NULL:
        head_done(o.head, o.head_hint)
    if body_done != NULL:
        body_done(o.body, o.body_hint)


cdef inline void end_token(Connection *c, uint32_t token) noexcept nogil:
    c.sent[token].used = False
    c.unused[c.n_unused] = <uint16_t>token
    c.n_unused += 1


cdef inline void complete(Connection *c, uint32_t token) noexcept nogil:
    """The card is done with what we have written."""
    cdef Sent *sent = &c.sent[token]
    sent.written = True
    give_units(&c.state.here, sent.here, sent.n_here)
    tell_done(&sent.what)
    if sent.returned:
        end_token(c, token)


cdef inline bint take_back(Connection *c, uint32_t token) noexcept nogil:
    """False: the other returns what it does not have."""
    cdef Sent *sent
    if token >= TOKENS or not c.sent[token].used or c.sent[token].returned:
        return False
    sent = &c.sent[token]
    sent.returned = True
    give_units(&c.there, sent.there, sent.n_there)
    if sent.written:
        end_token(c, token)
    return True


cdef inline void return_token(Connection *c, uint32_t token, uint64_t nbytes) noexcept nogil:
    """Any thread."""
    lock(&c.monitor)
    if c.mapped and c.n_returned < TOKENS:
        c.returned[c.n_returned] = <uint16_t>token
        c.returned_bytes += nbytes
        atomic_store(&c.n_returned, c.n_returned + 1)
    unlock(&c.monitor)
    if atomic_load(&c.state.parked):
        wake_up(c.state)


cdef inline void take_unit_back(Connection *c, uint32_t unit) noexcept nogil:
    """The card has sent what lay there."""
    c.lent[unit] = 0
    c.n_lent -= 1
    give_units(&c.state.here, unit, 1)


cdef inline void wake_up(State *s) noexcept nogil:
    cdef uint64_t one = 1
    write(s.wake_fd, &one, sizeof(one))


cdef inline void let_go(Connection *c) noexcept nogil:
    """The card stops, and what was handed over is its owners' again."""
    cdef Outgoing *o
    cdef uint32_t token
    cdef uint32_t unit
    c.dead = True
    reset(c.qp)
    if c.fd >= 0:
        # the other end may have nothing to send by which it would see
        shutdown(c.fd, SHUT_RDWR)
    for token in range(TOKENS):
        if c.sent[token].used and not c.sent[token].written:
            complete(c, token)
    for unit in range(c.state.here.n if c.n_lent else 0):
        if c.lent[unit]:
            take_unit_back(c, unit)
    while c.first != NULL:
        o, c.first = c.first, c.first.next
        tell_done(o)
        free(o)
    c.last = NULL
    free_aligned(c.block)
    c.block = NULL


cdef inline void lose(State *s, Connection *c) noexcept nogil:
    """It is broken: say so."""
    if not c.dead:
        let_go(c)
        add_loss(&s.losses, c.peer)
