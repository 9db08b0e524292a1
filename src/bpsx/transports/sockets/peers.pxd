# Peers by number, the list of lost peers, and aligned memory: shared by our own transports.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free

from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport Monitor, lock, unlock

cdef extern from "<unistd.h>" nogil:
    ssize_t read(int fd, void *buf, size_t count)
    ssize_t write(int fd, const void *buf, size_t count)

cdef extern from *:
    """
    #include <stdint.h>
    #include <stdlib.h>
    static inline void *bpsx_aligned(size_t size) {
        /* Not posix_memalign: it asks malloc for more than it returns, so the hole that a freed
           block leaves never fits an equal block. */
        char *got = size < PTRDIFF_MAX - 64 ? malloc(size + 64) : NULL, *at;
        if (got == NULL)
            return NULL;
        at = (char *)(((uintptr_t)got + 64) & ~(uintptr_t)63);
        ((void **)at)[-1] = got;
        return at;
    }
    static inline void bpsx_free_aligned(void *at) {
        if (at != NULL)
            free(((void **)at)[-1]);
    }
    """
    # Aligned to 64 bytes, so that sums can be computed in place. Free with free_aligned().
    void *aligned "bpsx_aligned"(size_t size) nogil
    void free_aligned "bpsx_free_aligned"(void *at) nogil

cdef struct Peers:              # connections by peer number
    void **at                   # NULL where there is none
    uint32_t capacity

cdef struct Losses:             # peers lost since the last lost()
    Monitor monitor
    int fd                      # eventfd, readable while there are new losses
    uint32_t *peers
    uint32_t n
    uint32_t capacity


cdef inline bint room_for_peer(Peers *p, uint32_t peer) noexcept nogil:
    return make_room(&p.at, &p.capacity, peer + 1, sizeof(void *))


cdef inline void forget_peers(Peers *p) noexcept nogil:
    free(p.at)
    p.at, p.capacity = NULL, 0


cdef inline void signal_loss(Losses *l) noexcept nogil:
    """Signal new losses. Any thread may call it."""
    cdef uint64_t one = 1
    write(l.fd, &one, sizeof(one))


cdef inline void add_loss(Losses *l, uint32_t peer) noexcept nogil:
    """Record that ``peer`` is lost, and signal it. Any thread may call it.

    Without memory the loss is signalled, but :meth:`lost` does not return the peer.
    """
    lock(&l.monitor)
    if make_room(&l.peers, &l.capacity, l.n + 1, sizeof(uint32_t)):
        l.peers[l.n] = peer
        l.n += 1
    unlock(&l.monitor)
    signal_loss(l)


cdef inline void forget_loss(Losses *l, uint32_t peer) noexcept nogil:
    """Remove ``peer`` from the peers that are not reported yet. Any thread may call it."""
    cdef uint32_t i, kept = 0
    lock(&l.monitor)
    for i in range(l.n):
        if l.peers[i] != peer:
            l.peers[kept] = l.peers[i]
            kept += 1
    l.n = kept
    unlock(&l.monitor)
