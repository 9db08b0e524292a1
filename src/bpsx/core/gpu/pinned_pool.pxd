# Pool of pinned memory for partitions of tensors on a GPU, in places of certain sizes. Only the
# driver calls these functions.
#
# The pinned memory is bounded by what is under way at once. For example, a model's weights, which
# are broadcast once, leave only places that its gradients use again.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from bpsx.core.gpu.device cimport Device
from bpsx.core.local.neighbour cimport PAGE, Machine
from bpsx.core.partition cimport PinnedBlock
from bpsx.core.state cimport N_KINDS, Places
from bpsx.transports.abi cimport Endpoint

cdef enum:
    SMALLEST = 8                # log2 of the bytes of the smallest place
    STEPPED = 14                # from here on there are four sizes per power of two
    SLAB = 32 << 20             # bytes that are allocated at once


cdef inline uint64_t bytes_of(uint32_t kind) noexcept nogil:
    """Bytes of a place of this kind: whole pages from one page on."""
    cdef uint32_t steps
    if kind <= STEPPED - SMALLEST:
        return <uint64_t>1 << (SMALLEST + kind)
    steps = kind - (STEPPED - SMALLEST)
    return (<uint64_t>4 + steps % 4) << (STEPPED - 2 + steps // 4)


cdef inline uint32_t kind_for(uint64_t nbytes) noexcept nogil:
    """The smallest kind with room for `nbytes`."""
    cdef uint32_t kind = 0
    while kind < N_KINDS - 1 and bytes_of(kind) < nbytes:
        kind += 1
    return kind


cdef inline bint take_slab(
    Places *all, Endpoint *network, Device *d, Machine *m, uint64_t nbytes
) noexcept nogil:
    """Allocate a slab of pinned memory.

    It comes from the device; with several processes it is in the own segment, where the others can
    reach it. The network may read and write it. Returns False when out of memory.
    """
    cdef uint64_t at
    all.given = all.slab_bytes = 0
    nbytes = (nbytes + SLAB - 1) // SLAB * SLAB
    if m == NULL:
        all.slab = <char *>d.host_memory(d.self, nbytes)
        if all.slab == NULL:
            return False
    else:
        at = (m.used + SLAB - 1) // SLAB * SLAB
        if at + nbytes > m.all[m.me].nbytes:
            return False
        all.slab = <char *>m.all[m.me].segment + at
        if d.pin(d.self, all.slab, nbytes) != 0:
            return False
        all.slab_offset = at
        m.used = at + nbytes
    all.slab_bytes = nbytes
    if network.lend != NULL:
        network.lend(network.self, <uint32_t>-1, all.slab, nbytes)
    return True


cdef inline PinnedBlock *take_place(
    Places *all, Endpoint *network, Device *d, Machine *m, uint64_t nbytes
) noexcept nogil:
    """Return a place of at least `nbytes`; NULL when out of memory."""
    cdef uint32_t kind = kind_for(nbytes)
    cdef uint64_t size = bytes_of(kind), gap
    cdef PinnedBlock *place = all.unused[kind]
    # Until its last copy up has completed, not even the host may write to a place. The other free
    # places of this size were returned later, so they are no better.
    if place != NULL and not (place.used and d.query(d.self, place.up) == 0):
        all.unused[kind] = place.next
        place.used = False
        return place
    gap = -all.given % min(size, <uint64_t>PAGE)
    if all.given + gap + size > all.slab_bytes:
        if not take_slab(all, network, d, m, size):
            return NULL
        gap = 0
    place = <PinnedBlock *>calloc(1, sizeof(PinnedBlock))
    if place == NULL:
        return NULL
    place.up = d.new_event(d.self)
    if place.up == NULL:
        free(place)
        return NULL
    place.kind = kind
    place.next_made = all.made
    all.made = place
    place.host = all.slab + all.given + gap
    place.offset = all.slab_offset + all.given + gap
    place.slab = all.slab_offset
    place.slab_bytes = all.slab_bytes
    all.given += gap + size
    return place


cdef inline void give_place(Places *all, PinnedBlock *place) noexcept nogil:
    place.next = NULL
    if all.unused[place.kind] == NULL:
        all.unused[place.kind] = place
    else:
        all.latest[place.kind].next = place
    all.latest[place.kind] = place


cdef inline void free_places(Places *all, Device *d) noexcept nogil:
    """Free all places. Call in the GPU's context, or with NULL if that is gone."""
    cdef PinnedBlock *place
    while all.made != NULL:
        place = all.made
        all.made = place.next_made
        if d != NULL:
            d.drop_event(d.self, place.up)
        free(place)
