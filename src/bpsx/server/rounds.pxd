# The open round of a key: adds pushes to it, and closes or abandons it. server/store.pxd has its
# state, server/reply.pxd the replies.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from bpsx.core.wire cimport Header
from bpsx.core.status cimport E_LEFT, E_MEMORY
from bpsx.system.sync cimport atomic_load, atomic_store
from bpsx.server.lane cimport Lane
from bpsx.server.reply cimport close_round, fail_round, flush_all, let_go, send_error
from bpsx.server.compressed cimport add_packed, hold_packed
from bpsx.server.snapshots cimport save_before_close
from bpsx.server.store cimport (
    ABANDONED, OPEN, KeyState, Share, add, end_round, fail_sum, memory_for,
)
from bpsx.transports.abi cimport Message


cdef inline void hold(
    Lane *lane, KeyState *e, uint32_t sender, Message *m, char *body, uint64_t length, bint *kept
) noexcept nogil:
    """Hold a push until its sender's turn in fixed order. *kept: see push()."""
    cdef Share *share = &e.shares[sender]
    share.length = length
    if e.compressed != NULL:
        if not hold_packed(share, body, length):
            fail_sum(e, E_MEMORY, 0, 0)
        return
    if m != NULL and body == m.body:
        share.message = m
        share.body = body
        kept[0] = True
        return
    share.body = <char *>malloc(max(e.nbytes, <uint64_t>1))
    if share.body == NULL:
        fail_sum(e, E_MEMORY, 0, 0)
    else:
        memcpy(share.body, body, e.nbytes)


cdef inline void add_share(
    Lane *lane, KeyState *e, uint32_t sender, Message *m, char *body, uint64_t length, bint *kept
) noexcept nogil:
    if e.compressed != NULL:
        add_packed(lane, e, sender, body, length)
    elif e.nbytes and add(e, m, body, lane.absent.living, kept) != 0:
        fail_sum(e, E_MEMORY, 0, 0)


cdef inline bint fixed_order(Lane *lane) noexcept nogil:
    """Whether pushes are added in order of sender. Two floats give the same bits in any order."""
    return lane.settings.fixed_order and lane.absent.living > 2


cdef inline void pass_absent(Lane *lane, KeyState *e) noexcept nogil:
    """Skip senders that have called join() or are lost: fixed order must not wait for them."""
    if not lane.absent.any_skipped:
        return
    while (
        e.round.next_sender < lane.settings.senders
        and lane.absent.skipped[e.round.next_sender]
        and not e.shares[e.round.next_sender].pushed
    ):
        e.round.next_sender += 1


cdef inline void add_held(Lane *lane, KeyState *e) noexcept nogil:
    """Add held pushes as long as the next sender's is there."""
    cdef Share *share
    cdef bint kept
    while e.state == OPEN:
        pass_absent(lane, e)
        if e.round.next_sender >= lane.settings.senders:
            return
        if e.shares[e.round.next_sender].body == NULL:
            return
        share = &e.shares[e.round.next_sender]
        kept = False
        add_share(lane, e, e.round.next_sender, share.message, share.body, share.length, &kept)
        if share.message == NULL:
            free(share.body)
        elif not kept:
            let_go(lane, share.message)
        share.message = NULL
        share.body = NULL
        e.round.next_sender += 1


cdef inline void drop_held(Lane *lane, KeyState *e) noexcept nogil:
    cdef uint32_t sender
    for sender in range(lane.settings.senders):
        if e.shares[sender].message != NULL:
            let_go(lane, e.shares[sender].message)
        else:
            free(e.shares[sender].body)
        e.shares[sender].message = NULL
        e.shares[sender].body = NULL


cdef inline void contribute(
    Lane *lane, KeyState *e, Header *h, Message *m, char *body, bint *kept
) noexcept nogil:
    """Add an accepted push to the round's result. *kept: see push()."""
    if e.operation.broadcast:
        if h.sender == e.operation.divisor:
            # Pretend that all were added, so that finish_sum() does not divide.
            e.round.added = lane.settings.senders
            if m != NULL and body == m.body and body != NULL:
                e.memory.first = m
                e.memory.sum = body
                kept[0] = True
            else:
                if not memory_for(&e.memory.small, e.nbytes):
                    fail_sum(e, E_MEMORY, 0, 0)
                    return
                memcpy(e.memory.small, body, e.nbytes)
                e.memory.sum = e.memory.small
        return
    if fixed_order(lane) and e.nbytes:
        pass_absent(lane, e)
        if h.sender != e.round.next_sender:
            hold(lane, e, h.sender, m, body, h.length, kept)
            return
        add_share(lane, e, h.sender, m, body, h.length, kept)
        e.round.next_sender += 1
        add_held(lane, e)
        return
    add_share(lane, e, h.sender, m, body, h.length, kept)


cdef inline bint misses_departed_worker(Lane *lane, KeyState *e, uint32_t *worker) noexcept nogil:
    """Whether the open round lacks the push of a sender one of whose workers has left.

    *worker: that worker's rank.
    """
    cdef uint32_t sender
    for sender in range(lane.settings.senders):
        if atomic_load(&lane.absent.gone[sender]) and not e.shares[sender].pushed:
            worker[0] = <uint32_t>atomic_load(&lane.absent.gone[sender]) - 1
            return True
    return False


cdef inline bint complete(Lane *lane, KeyState *e) noexcept nogil:
    """Whether all living workers have pushed in the open round, except those that called join()."""
    cdef uint32_t sender
    if e.round.pushed == lane.absent.living:
        return True
    if not lane.absent.any_skipped:
        return False
    for sender in range(lane.settings.senders):
        if not e.shares[sender].pushed and not lane.absent.skipped[sender]:
            return False
    return True


cdef inline void finish_round(Lane *lane, KeyState *e) noexcept nogil:
    """Close the open round, which is complete."""
    if lane.settings.shrinks and e.compressed != NULL and e.compressed.saving.due:
        save_before_close(lane, e)
    drop_held(lane, e)
    close_round(lane, e)


cdef inline void drop_pushes(Lane *lane, KeyState *e) noexcept nogil:
    """Free the pushes of the open round, which will not close."""
    drop_held(lane, e)
    let_go(lane, e.memory.first)
    if lane.watch != NULL and e.round.pushed:
        lane.watch.server.open_rounds -= 1


cdef inline void abandon(Lane *lane, KeyState *e, uint32_t worker) noexcept nogil:
    """Fail the open round and all later ones: worker `worker` will never push again."""
    e.failure.status = E_LEFT
    e.failure.a = worker
    fail_round(lane, e)
    drop_pushes(lane, e)
    end_round(e, lane.settings.senders, ABANDONED)


cdef inline int turn_away(Lane *lane, KeyState *e, Header *h, int status) noexcept nogil:
    """Reply to a push with an error, because no round of its key can close.

    The worker's count of rounds advances, so each later push gets the same reply.
    """
    send_error(lane, h.sender, h.key, h.round, h.cookie, status, e.failure.a, 0)
    if h.round == e.shares[h.sender].round:
        e.shares[h.sender].round += 1
    return 0


cdef inline void forget_rounds(Lane *lane) noexcept nogil:
    """Count each sender's rounds from zero if all workers have joined since the last call.

    No round is open then. Otherwise, a lane that takes a key over could not compare the senders'
    counts, as a worker that has joined takes part in fewer rounds. In an asynchronous job it does
    not compare them, and values stay.
    """
    cdef uint32_t i, sender, joins = <uint32_t>atomic_load(&lane.absent.joins)
    if joins == lane.terms.joins:
        return
    lane.terms.joins = joins
    for i in range(lane.keys.n if not lane.settings.asynchronous else 0):
        if lane.keys.at[i] == NULL:
            continue
        for sender in range(lane.settings.senders):
            lane.keys.at[i].shares[sender].round = 0
            lane.keys.at[i].shares[sender].unacknowledged = False
            lane.keys.at[i].shares[sender].settles = False
        lane.keys.at[i].unacknowledged = 0
    # A worker must not get SETTLED of an earlier round after a result of a later one.
    for sender in range(lane.settings.senders):
        lane.outs[sender].n_settled, lane.outs[sender].settled_bytes = 0, 0
    flush_all(lane)


cdef inline void notice(Lane *lane) noexcept nogil:
    """Handle changes of `gone` and `joined`.

    Rounds that need a worker that has left fail. Rounds that lack only joined workers close.
    """
    cdef uint32_t i, worker = 0
    cdef KeyState *e
    atomic_store(&lane.absent.news, 0)
    forget_rounds(lane)
    lane.absent.any_skipped = False
    for i in range(lane.settings.senders):
        if atomic_load(&lane.absent.gone[i]):
            lane.absent.any_gone = True
        lane.absent.skipped[i] = lane.absent.lost[i] or atomic_load(&lane.absent.joined[i]) != 0
        if lane.absent.skipped[i]:
            lane.absent.any_skipped = True
    for i in range(lane.keys.n):
        e = lane.keys.at[i]
        if e == NULL or e.round.pushed == 0:
            continue
        if lane.absent.any_gone and misses_departed_worker(lane, e, &worker):
            abandon(lane, e, worker)
            continue
        if fixed_order(lane) and not e.operation.broadcast:
            add_held(lane, e)
        if complete(lane, e):
            finish_round(lane, e)
