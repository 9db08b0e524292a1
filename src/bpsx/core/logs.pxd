# A worker's backup of its lanes' compression: its own pushes since the stored snapshot, and
# snapshots. From these another lane continues a key of a lost lane.
# docs/internals/elastic-compression.md has the reasons.
#
# Only the driver calls these functions, except free_backup().
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove

from bpsx.core.codec.state cimport server_state_bytes
from bpsx.core.partition cimport (
    Backup, LogEntry, Partition, Snapshot, SumNumbers, Task, wire_of,
)
from bpsx.core.state cimport Core
from bpsx.core.wire cimport HAS_STATE, STATE, SUMMED, WAS_SET, Coded, Header, counter_in
from bpsx.system.arrays cimport make_room
from bpsx.transports.abi cimport Message


cdef inline Backup *backup_of(Partition *p) noexcept nogil:
    """Return the partition's backup, made at the first call. NULL: no memory."""
    if p.backup == NULL:
        p.backup = <Backup *>calloc(1, sizeof(Backup))
    return p.backup


cdef inline bint has_backup(Partition *p) noexcept nogil:
    """Whether the backup has data that another lane needs to continue the partition."""
    return p.backup != NULL and (p.backup.sum != 0 or p.backup.snapshot.held)


cdef inline uint32_t divisor_of(Core *c, Partition *p) noexcept nogil:
    """The divisor of the partition's push: of an average, the number of workers that are left.

    If a machine has divided its own sum, as of half types, the machines that are left.
    """
    cdef Task *task = p.tensor.current
    if not c.settings.shrinks or task.divisor <= 1 or task.broadcast:
        return p.divisor
    if p.divisor < task.divisor:
        return c.moving.living
    return c.moving.living * c.settings.processes


# ---- the log

cdef inline bint log_push(Core *c, Partition *p, uint32_t sum_) noexcept nogil:
    """Log the partition's encoded push, which has become part of a sum. False: no memory."""
    cdef Backup *b = p.backup
    cdef LogEntry *entry
    if not make_room(&b.entries, &b.entries_capacity, b.n_entries + 1, sizeof(LogEntry)):
        return False
    entry = &b.entries[b.n_entries]
    entry.body = <char *>malloc(max(p.packed.size, <uint64_t>1))
    if entry.body == NULL:
        return False
    memcpy(entry.body, wire_of(p), p.packed.size)
    entry.sum, entry.divisor, entry.length = sum_, divisor_of(c, p), p.packed.size
    b.n_entries += 1
    b.logged += entry.length
    c.counters.logged += entry.length
    return True


cdef inline void drop_snapshot(Core *c, Snapshot *snapshot) noexcept nogil:
    if snapshot.held:
        c.counters.held -= snapshot.length
    if snapshot.in_message:
        c.endpoint.release(c.endpoint.self, &snapshot.message)
    free(snapshot.memory)
    snapshot.held = snapshot.was_set = snapshot.in_message = False
    snapshot.memory = snapshot.body = NULL
    snapshot.length = 0


cdef inline void drop_older(Core *c, Backup *b, uint32_t stored) noexcept nogil:
    """Drop what the stored snapshot, which follows sum `stored`, has made needless."""
    cdef uint32_t n = 0
    while n < b.n_entries and b.entries[n].sum <= stored:
        b.logged -= b.entries[n].length
        c.counters.logged -= b.entries[n].length
        free(b.entries[n].body)
        n += 1
    if n:
        b.n_entries -= n
        memmove(b.entries, b.entries + n, b.n_entries * sizeof(LogEntry))
    if b.snapshot.held and b.snapshot.sum < stored:
        drop_snapshot(c, &b.snapshot)


cdef inline SumNumbers numbers_in(Header *h) noexcept nogil:
    cdef SumNumbers numbers
    numbers.sum, numbers.stored, numbers.counter = h.slot, h.divisor, counter_in(h)
    return numbers


cdef inline bint note_sum(Core *c, Partition *p, SumNumbers *of) noexcept nogil:
    """Handle the numbers of an answer, before its body overwrites the push. False: no memory."""
    cdef Backup *b
    if not c.settings.elastic or p.packed == NULL:
        return True
    b = backup_of(p)
    if b == NULL:
        return False
    b.sum, b.summed = of.sum, True
    b.snapshot.counter = of.counter
    if p.packed.light:
        b.snapshot.held, b.snapshot.was_set, b.snapshot.sum = True, False, of.sum
        return True
    if not log_push(c, p, of.sum):
        return False
    drop_older(c, b, of.stored)
    return True


cdef inline void note_no_sum(Partition *p) noexcept nogil:
    """Note that the partition's latest outcome is an error, and no sum."""
    if p.backup != NULL:
        p.backup.summed = False


cdef inline void note_lost_worker(Core *c, Partition *p) noexcept nogil:
    """Note that sums until now cannot be repeated: another worker's log is lost with it."""
    if p.backup != NULL and not p.packed.light:
        p.backup.gap = p.backup.sum
        drop_older(c, p.backup, p.backup.gap)


# ---- snapshots

cdef inline bint copy_snapshot(
    Core *c, Snapshot *snapshot, const char *body, uint64_t length
) noexcept nogil:
    """Replace a snapshot by a copy. False: no memory; it is as before then."""
    cdef char *memory = <char *>malloc(length)
    if memory == NULL:
        return False
    memcpy(memory, body, length)
    drop_snapshot(c, snapshot)
    snapshot.memory = snapshot.body = memory
    return True


cdef inline void describe_snapshot(
    Core *c, Snapshot *snapshot, uint32_t sum_, uint64_t length, bint was_set
) noexcept nogil:
    snapshot.held, snapshot.was_set, snapshot.sum, snapshot.length = True, was_set, sum_, length
    c.counters.held += length


cdef inline bint note_set(Core *c, Partition *p, Header *h, const char *body) noexcept nogil:
    """Keep the state that this worker has set, which the lane confirms. False: no memory."""
    cdef Backup *b
    if not c.settings.elastic or p.source == NULL:
        return True
    b = backup_of(p)
    if b == NULL:
        return False
    if p.packed.light:
        memcpy(&b.snapshot.counter, body, sizeof(b.snapshot.counter))
        b.snapshot.held, b.snapshot.was_set, b.snapshot.sum = True, True, h.slot
        return True
    if not copy_snapshot(c, &b.snapshot, body, h.length):
        return False
    describe_snapshot(c, &b.snapshot, h.slot, h.length, True)
    return True


cdef inline int take_snapshot(
    Core *c, Message *m, Header *h, char *body, bint *taken
) noexcept nogil:
    """Handle a SNAP. *taken: the message now belongs to the partition. -1: invalid.

    Without memory the snapshot is dropped, and the lane will send another one.
    """
    cdef Partition *p
    cdef Backup *b
    cdef bint was_set = h.flags & STATE != 0
    if <uint32_t>h.cookie >= c.table.n:
        return -1
    p = c.table.at[<uint32_t>h.cookie]
    if (
        p.key != h.key or p.lane != m.peer or p.packed == NULL or p.packed.light
        or h.length != server_state_bytes(p.packed)
    ):
        return -1
    b = backup_of(p)
    if b == NULL:
        return 0
    # A state that was set after the same sum is newer.
    if not b.snapshot.held or b.snapshot.sum < h.round or (
        b.snapshot.sum == h.round and (was_set or not b.snapshot.was_set)
    ):
        if c.endpoint.keeps and m.has_body and body == m.body:
            drop_snapshot(c, &b.snapshot)
            b.snapshot.message, b.snapshot.in_message, b.snapshot.body = m[0], True, body
            taken[0] = True
        elif not copy_snapshot(c, &b.snapshot, body, h.length):
            return 0
        describe_snapshot(c, &b.snapshot, h.round, h.length, was_set)
    b.unconfirmed = True
    return 0


cdef inline bint confirm(Partition *p) noexcept nogil:
    """Whether the push that is being written has to confirm a snapshot."""
    cdef bint due = p.backup != NULL and p.backup.unconfirmed and not p.is_codec_state
    if due:
        p.backup.unconfirmed = False
    return due


# ---- its description for other lanes, and its end

cdef inline void describe(Partition *p, Coded *coded) noexcept nogil:
    """Fill in the body of a HAVE."""
    cdef Backup *b = p.backup
    coded.sum = coded.flags = coded.state = coded.gap = 0
    coded.counter = coded.logged = 0
    if b == NULL:
        return
    b.unconfirmed = False           # by a lane that is lost
    coded.sum, coded.gap, coded.logged = b.sum, b.gap, b.logged
    coded.counter = b.snapshot.counter
    if b.summed:
        coded.flags |= SUMMED
    if b.snapshot.held:
        coded.flags |= HAS_STATE | (WAS_SET if b.snapshot.was_set else 0)
        coded.state = b.snapshot.sum


cdef inline void release_snapshots(Core *c) noexcept nogil:
    """Free all snapshots; the endpoint is about to close."""
    cdef uint32_t i
    for i in range(c.table.n):
        if c.table.at[i].backup != NULL:
            drop_snapshot(c, &c.table.at[i].backup.snapshot)


cdef inline void free_backup(Partition *p) noexcept nogil:
    """Free the partition's backup, after its core has been closed."""
    cdef uint32_t i
    if p.backup == NULL:
        return
    for i in range(p.backup.n_entries):
        free(p.backup.entries[i].body)
    free(p.backup.entries)
    free(p.backup.snapshot.memory)
    free(p.backup)
    p.backup = NULL
