# A part of a threaded endpoint: an inner endpoint with some of the peers, the I/O thread that
# drives it, and the commands for this thread. docs/internals/io-threads.md says who owns what.
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc

from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport (
    Monitor, atomic_load, atomic_store, lock, now_ns, unlock, yield_cpu,
)
from bpsx.transports.abi cimport Endpoint, Landing, Message, done_fn
from bpsx.transports.sockets.peers cimport write
from bpsx.transports.threaded.fifo cimport Fifo, Item, append, take_all

cdef enum:
    # After that many messages, and after that many bytes, the commands that have come meanwhile get
    # a turn, before the links run idle.
    MESSAGES_AT_ONCE = 16
    BYTES_AT_ONCE = 1 << 20
    # A sleeping I/O thread looks again after this time, should a wake-up be lost.
    SLEEP_MS = 1000

cdef enum PeerStatus:
    UNKNOWN = 0                 # not connected
    OPEN = 1
    BROKEN = 2                  # a send to it has failed; lost() reports it
    REPORTED = 3                # ... and has done so
    DROPPED = 4                 # for ever, and not to be reported as lost

cdef struct Command:            # send a message, or drop a peer; a copied head follows it in memory
    Item item
    bint drops
    uint32_t peer
    void *head
    size_t head_size
    done_fn head_done
    void *head_hint
    void *body
    size_t body_size
    done_fn body_done
    void *body_hint
    bint lands                  # `landing` is set
    Landing landing

cdef struct Peer:
    int status                  # PeerStatus
    Command *drop               # made when it is connected, so that its end needs no memory

cdef struct Received:
    Item item
    Message message

cdef struct EndpointPart:
    Endpoint *inner
    EndpointState *whole
    Monitor monitor             # guards `commands`
    Fifo commands
    int64_t asleep              # the thread is in the inner endpoint's wait, or about to be

cdef struct EndpointState:
    EndpointPart *parts
    uint32_t n_parts
    int64_t spin_ns             # how long an I/O thread without progress yields before it sleeps
    int64_t stopping
    Monitor monitor             # guards the next three
    Fifo received               # messages that have arrived
    Peer *peers
    uint32_t n_peers
    Item *taken                 # of the driving thread: messages taken from `received`
    int wake_fd
    int64_t woken               # wake was called, and no wait has ended since
    int64_t asleep              # the driving thread is in wait, or about to be


cdef inline void end_memory(
    void *head, done_fn head_done, void *head_hint, void *body, done_fn body_done, void *body_hint
) noexcept nogil:
    """Run a message's done callbacks, which return the memory to its owner."""
    if head_done != NULL:
        head_done(head, head_hint)
    if body_done != NULL:
        body_done(body, body_hint)


cdef inline void ring(int fd) noexcept nogil:
    cdef int64_t one = 1
    write(fd, &one, sizeof(one))


cdef inline Command *new_command(uint32_t peer, size_t copied) noexcept nogil:
    """A command with room for a copied head; NULL: no memory."""
    cdef Command *made = <Command *>malloc(sizeof(Command) + copied)
    if made != NULL:
        made.peer, made.drops, made.lands = peer, False, False
    return made


cdef inline int status_of(EndpointState *s, uint32_t peer) noexcept nogil:
    cdef int found
    lock(&s.monitor)
    found = s.peers[peer].status if peer < s.n_peers else UNKNOWN
    unlock(&s.monitor)
    return found


cdef inline bint add_peer(EndpointState *s, uint32_t peer) noexcept nogil:
    """Note that a peer is being connected. False: no memory."""
    cdef Command *drop = new_command(peer, 0)
    cdef bint done = False
    if drop == NULL:
        return False
    drop.drops = True
    lock(&s.monitor)
    if make_room(&s.peers, &s.n_peers, peer + 1, sizeof(Peer)):
        free(s.peers[peer].drop)
        s.peers[peer].status, s.peers[peer].drop, done = OPEN, drop, True
    unlock(&s.monitor)
    if not done:
        free(drop)
    return done


cdef inline Command *close_peer(EndpointState *s, uint32_t peer) noexcept nogil:
    """Let no message to a peer follow. Returns the command that ends its connection; NULL: it has
    none, or has been dropped before.
    """
    cdef Command *found = NULL
    lock(&s.monitor)
    if peer < s.n_peers and s.peers[peer].status != UNKNOWN:
        s.peers[peer].status = DROPPED
        found, s.peers[peer].drop = s.peers[peer].drop, NULL
    unlock(&s.monitor)
    return found


cdef inline void note_broken(EndpointState *s, uint32_t peer) noexcept nogil:
    lock(&s.monitor)
    if s.peers[peer].status == OPEN:
        s.peers[peer].status = BROKEN
    unlock(&s.monitor)


cdef inline bint take_broken(EndpointState *s, uint32_t peer) noexcept nogil:
    """Whether a send to a peer has failed, which has not been reported."""
    cdef bint found
    lock(&s.monitor)
    found = s.peers[peer].status == BROKEN
    if found:
        s.peers[peer].status = REPORTED
    unlock(&s.monitor)
    return found


# ---- Commands: from the driving thread to an I/O thread

cdef inline void give(EndpointPart *part, Command *command) noexcept nogil:
    """Queue a command, and wake the I/O thread if it sleeps."""
    lock(&part.monitor)
    append(&part.commands, &command.item)
    unlock(&part.monitor)
    if atomic_load(&part.asleep):
        part.inner.wake(part.inner.self)


cdef inline Command *take_commands(EndpointPart *part) noexcept nogil:
    """All commands so far, the oldest first."""
    cdef Command *found
    if atomic_load(&part.commands.n) == 0:
        return NULL
    lock(&part.monitor)
    found = <Command *>take_all(&part.commands)
    unlock(&part.monitor)
    return found


cdef inline void end_command(Command *c) noexcept nogil:
    """Run the done callbacks of a message that is not sent."""
    end_memory(c.head, c.head_done, c.head_hint, c.body, c.body_done, c.body_hint)


cdef inline void carry_out(EndpointPart *part, Command *c) noexcept nogil:
    if c.drops:
        part.inner.drop(part.inner.self, c.peer)
    elif status_of(part.whole, c.peer) == DROPPED:
        # The core may have given the memory back to its owner already.
        end_command(c)
    elif part.inner.send(
        part.inner.self, c.peer, c.head, c.head_size, c.head_done, c.head_hint, c.body,
        c.body_size, c.body_done, c.body_hint, &c.landing if c.lands else NULL
    ) != 0:
        note_broken(part.whole, c.peer)


cdef inline int carry_out_all(EndpointPart *part) noexcept nogil:
    """Carry out the commands so far. Returns their number."""
    cdef Command *c = take_commands(part)
    cdef Command *following
    cdef int n = 0
    while c != NULL:
        following = <Command *>c.item.next
        carry_out(part, c)
        free(c)
        c = following
        n += 1
    return n


cdef inline void forget_commands(EndpointPart *part) noexcept nogil:
    """Drop the commands that no thread carries out any more, and run their done callbacks."""
    cdef Command *c = take_commands(part)
    cdef Command *following
    while c != NULL:
        following = <Command *>c.item.next
        if not c.drops:
            end_command(c)
        free(c)
        c = following


# ---- Messages: from an I/O thread to the driving thread

cdef inline void hand_over(EndpointState *s, Received *r) noexcept nogil:
    """Queue a message for the driving thread, and wake this thread if it sleeps."""
    lock(&s.monitor)
    append(&s.received, &r.item)
    unlock(&s.monitor)
    if atomic_load(&s.asleep):
        ring(s.wake_fd)


cdef inline int take_in(EndpointPart *part) noexcept nogil:
    """Receive messages, up to a bound. Returns their number."""
    cdef Received *r
    cdef int n = 0
    cdef size_t received = 0
    while n < MESSAGES_AT_ONCE and received < BYTES_AT_ONCE:
        r = <Received *>malloc(sizeof(Received))
        if r == NULL:
            break
        r.message.landing.at = 0
        if part.inner.recv(part.inner.self, &r.message) != 1:
            free(r)
            break
        received += r.message.body_size
        hand_over(part.whole, r)
        n += 1
    return n


cdef inline void run_part(EndpointPart *part) noexcept nogil:
    """Drive the inner endpoint until the whole stops: the body of an I/O thread."""
    cdef EndpointState *s = part.whole
    cdef int64_t idle_since = 0, now
    cdef int progress
    while not atomic_load(&s.stopping):
        progress = carry_out_all(part)
        progress += take_in(part)
        if progress:
            idle_since = 0
            continue
        now = now_ns()
        if idle_since == 0:
            idle_since = now
        if now - idle_since < s.spin_ns:
            yield_cpu()
            continue
        atomic_store(&part.asleep, 1)
        if atomic_load(&part.commands.n) == 0 and not atomic_load(&s.stopping):
            part.inner.wait(part.inner.self, SLEEP_MS)
        atomic_store(&part.asleep, 0)
        idle_since = 0
