# Link between a worker and a lane of one machine: the layout of the shared segment, and the private
# state of each side.
#
# All workers of a lane map one segment. Each worker has a slot in it. For each direction a slot has
# a ring of entries and a region, in which the writer allocates blocks for its messages. An entry
# gives a message's position in the segment. A body already in the segment is not copied: a sum
# computed in a worker's push is in it, so the replies to all workers refer to it. The reader of a
# message returns its token. The block, or the lent body, then belongs to its owner again.
#
# No lock is shared between processes. Each word has one writer, except `starving`, which one side
# sets and the other clears.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from posix.mman cimport munmap
from posix.unistd cimport close as close_descriptor

from bpsx.system.sync cimport (
    Monitor, atomic_add, atomic_load, atomic_store, lock, monitor_destroy, unlock,
)
from bpsx.transports.abi cimport Endpoint, done_fn
from bpsx.transports.sockets.peers cimport Peers, room_for_peer, write
from bpsx.transports.shm.allocator cimport Arena, Block, forget_blocks, give_block

cdef enum:
    TOKENS = 4096               # messages of one direction that have not been returned
    PAGE = 4096
    REGION = 1 << 30            # bytes of address space; pages are allocated when written
    MOST_HEAD = 1 << 20

cdef struct RingEntry:
    uint64_t head               # offset in the segment, bytes
    uint64_t head_size
    uint64_t body               # offset in the segment, bytes
    uint64_t body_size
    uint32_t has_body
    uint32_t token

cdef struct Way:
    # Written by the direction's writer:
    int64_t posted              # number of entries written
    # Much of the region is allocated, so the reader must copy messages instead of keeping them.
    int64_t tight
    int64_t closed              # no entry follows
    int64_t starving            # the writer asks to be woken when the reader takes an entry
    int64_t apart[4]            # padding to a cache line of its own
    # Written by the direction's reader:
    int64_t taken               # number of entries read
    int64_t returned            # number of tokens in `returns`
    int64_t parked              # the reader sleeps, so the writer must wake it
    int64_t apart_too[5]        # padding
    RingEntry entries[TOKENS]
    uint32_t returns[TOKENS]    # ring of tokens returned by the reader

cdef struct Slot:
    Way to_lane
    Way to_worker

cdef struct Sent:               # a message that the reader has not returned
    bint used
    Block *block                # holds the head, and a body that was copied
    void *head
    void *body
    done_fn head_done           # not NULL: not called yet
    done_fn body_done
    void *head_hint
    void *body_hint
    bint lent                   # the body was in the segment already and was not copied

cdef struct Mapping:
    bint there                  # the segment is mapped
    bint own                    # it is mapped for this link alone: a worker's
    bint dropped                # unmap it with the last message
    int64_t held                # received messages in it that are not released

# More than 20 fields: the state of the peer, where the segment is, and how far each side has come.
cdef struct Link:
    Link *next
    uint32_t peer
    bint dead
    # A worker's first message takes the network, so that the lane knows whose connection that is:
    # it reports the worker when the connection ends, and can send it what memory has no room for.
    bint named
    int64_t gone                # the peer's process has exited; set by any thread
    # Guards `returned` and `mapping`, because any thread may release messages.
    Monitor monitor
    Mapping mapping
    int wake_fd                 # eventfd that wakes the peer
    char *base                  # start of the segment
    uint64_t n_bytes            # size of the segment
    Way *out                    # direction in which this side writes
    Way *back                   # direction in which the peer writes
    char *region                # region in which this side writes
    int64_t taken               # entries of `back` read by this side
    int64_t noticed             # entries of `out` that this side knows the peer has read
    int64_t reclaimed           # tokens of `out` that this side has taken back
    Arena arena
    uint32_t n_free
    uint32_t unused[TOKENS]     # free tokens; the first `n_free` are valid
    uint32_t order[TOKENS]      # token of each entry in `out`
    Sent sent[TOKENS]

cdef struct EndpointState:
    Endpoint *inner             # for peers elsewhere, and for messages that are too large
    bint is_lane
    Monitor monitor             # guards `new`, and changes of `all`
    int64_t n_new
    Link *new
    Link *all
    Link *dropped               # no longer in `all`, but a message may refer to it
    Link *next_to_read
    Peers peers
    uint64_t most_bytes
    int64_t malformed
    uint32_t turn


cdef inline uint64_t slot_bytes() noexcept nogil:
    return (sizeof(Slot) + PAGE - 1) // PAGE * PAGE + 2 * <uint64_t>REGION


cdef inline void wake_up(Link *l) noexcept nogil:
    cdef uint64_t one = 1
    write(l.wake_fd, &one, sizeof(one))


cdef inline void set_up(
    Link *l, char *base, uint64_t n_bytes, uint32_t slot, bint is_lane
) noexcept nogil:
    """Attach the link to slot number ``slot`` of the segment that is mapped at ``base``."""
    cdef Slot *at = <Slot *>(base + slot * slot_bytes())
    cdef uint64_t head = (sizeof(Slot) + PAGE - 1) // PAGE * PAGE
    cdef uint32_t i
    l.base, l.n_bytes, l.mapping.there, l.mapping.own = base, n_bytes, True, not is_lane
    l.named = is_lane
    l.out, l.back = (&at.to_worker, &at.to_lane) if is_lane else (&at.to_lane, &at.to_worker)
    l.region = <char *>at + head + (REGION if is_lane else 0)
    l.arena.room = REGION
    l.n_free = TOKENS
    for i in range(TOKENS):
        l.unused[i] = i


cdef inline void take_new(EndpointState *s) noexcept nogil:
    """Add the links that other threads made since the last call."""
    cdef Link *l
    cdef Link *following
    if atomic_load(&s.n_new) == 0:
        return
    lock(&s.monitor)
    l, s.new = s.new, NULL
    atomic_store(&s.n_new, 0)
    while l != NULL:
        following = l.next
        l.next, s.all = s.all, l
        if room_for_peer(&s.peers, l.peer):
            s.peers.at[l.peer] = l
        else:
            l.dead = True
        l = following
    unlock(&s.monitor)


cdef inline void take_out(EndpointState *s, Link *l) noexcept nogil:
    """Move a link from the list of all to the dropped ones."""
    cdef Link **at = &s.all
    lock(&s.monitor)
    while at[0] != l:
        at = &at[0].next
    at[0] = l.next
    unlock(&s.monitor)
    s.peers.at[l.peer] = NULL
    s.next_to_read = NULL
    l.next, s.dropped = s.dropped, l


cdef inline void leave(Link *l) noexcept nogil:
    """Tell the peer that no entry follows, and unmap the segment. The link's monitor is locked."""
    if not l.mapping.there:
        return
    atomic_store(&l.out.closed, 1)
    wake_up(l)
    l.mapping.there = False
    if l.mapping.own:
        munmap(l.base, l.n_bytes)


cdef inline void leave_when_released(Link *l) noexcept nogil:
    """Unmap the segment now or with the last message in it."""
    lock(&l.monitor)
    l.mapping.dropped = True
    if atomic_load(&l.mapping.held) == 0:
        leave(l)
    unlock(&l.monitor)


cdef inline bint is_released(Link *l) noexcept nogil:
    """Whether no message refers to a dropped link any more."""
    cdef bint found
    lock(&l.monitor)
    found = atomic_load(&l.mapping.held) == 0
    unlock(&l.monitor)
    return found


cdef inline void run_dones(Sent *sent, bint body_too) noexcept nogil:
    """Run the done callbacks that have not run: the head's, and with ``body_too`` the body's."""
    cdef done_fn head_done = sent.head_done, body_done = sent.body_done
    if head_done != NULL:
        sent.head_done = NULL
        head_done(sent.head, sent.head_hint)
    if body_too and body_done != NULL:
        sent.body_done = NULL
        body_done(sent.body, sent.body_hint)


cdef inline void take_back(Link *l, uint32_t token) noexcept nogil:
    """Free the block and token of a returned message."""
    cdef Sent *sent = &l.sent[token]
    run_dones(sent, True)
    give_block(&l.arena, sent.block)
    sent.used = False
    l.unused[l.n_free] = token
    l.n_free += 1
    if not l.dead and l.out.tight and l.n_free > TOKENS // 4 * 3 and l.arena.used < REGION // 4:
        atomic_store(&l.out.tight, 0)


cdef inline void drop_link(Link *l) noexcept nogil:
    """Close the link: the peer has left or died, or this endpoint closes, and reads nothing more.

    Does not touch the segment, because forked children do not have it.
    """
    cdef uint32_t i
    if l.dead:
        return
    l.dead = True
    for i in range(TOKENS):
        if l.sent[i].used:
            take_back(l, i)


cdef inline void notice(EndpointState *s, Link *l) noexcept nogil:
    """Process the entries that the peer has read and the tokens it has returned.

    Closes the link if the peer has gone.
    """
    cdef int64_t there = atomic_load(&l.out.taken)
    cdef int64_t returned
    cdef uint32_t token
    while l.noticed < there and l.noticed < l.out.posted:
        token = l.order[l.noticed % TOKENS]
        l.noticed += 1
        if l.sent[token].used and not l.sent[token].lent:
            run_dones(&l.sent[token], True)
    returned = atomic_load(&l.out.returned)
    while l.reclaimed < returned:
        token = l.out.returns[l.reclaimed % TOKENS]
        l.reclaimed += 1
        if token < TOKENS and l.sent[token].used:
            take_back(l, token)
        else:
            atomic_add(&s.malformed, 1)
    if (
        atomic_load(&l.gone)
        or (atomic_load(&l.back.closed) and l.taken == atomic_load(&l.back.posted))
    ):
        drop_link(l)


cdef inline void free_link(Link *l) noexcept nogil:
    if l != NULL:
        if l.wake_fd >= 0:
            close_descriptor(l.wake_fd)     # os.close may be gone at the interpreter's end
        monitor_destroy(&l.monitor)
        forget_blocks(&l.arena)
        free(l)


cdef inline void free_dropped(EndpointState *s) noexcept nogil:
    """Free the dropped links that no message refers to."""
    cdef Link **at = &s.dropped
    cdef Link *l
    while at[0] != NULL:
        l = at[0]
        if is_released(l):
            at[0] = l.next
            free_link(l)
        else:
            at = &l.next


cdef inline void shared_drop(void *self, uint32_t peer) noexcept nogil:
    cdef EndpointState *s = <EndpointState *>self
    cdef Link *l
    take_new(s)
    l = <Link *>s.peers.at[peer] if peer < s.peers.capacity else NULL
    if l != NULL:
        drop_link(l)
        take_out(s, l)
        leave_when_released(l)
    s.inner.drop(s.inner.self, peer)
    free_dropped(s)
