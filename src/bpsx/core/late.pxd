# Lanes of servers that join the running job, and the end of lanes whose keys do not move yet.
# docs/internals/elastic-servers.md describes the protocol.
#
# Only the driver calls these functions, or a thread that has its role for a moment (`pause`).
# _late_lanes.pyx calls functions of the driver through Lanes.late, as _core.pyx compiles them.
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc

from bpsx.core.busy cimport count_work
from bpsx.core.partition cimport Lane, Server
from bpsx.core.state cimport Core
from bpsx.system.sync cimport lock, notify_all, unlock

cdef extern from "<unistd.h>" nogil:
    ssize_t write(int descriptor, const void *data, size_t n)

cdef enum:
    MOST_LANES = 1 << 16        # of a job, lost ones included


cdef inline bint allocate_lanes(Core *c, uint32_t least) noexcept nogil:
    """Make room for lanes and servers. False: no memory.

    Pages take memory only when they are used.
    """
    cdef uint32_t n = max(least, <uint32_t>(MOST_LANES if c.settings.elastic else 1))
    c.lanes.capacity = n
    c.lanes.at = <Lane *>calloc(n, sizeof(Lane))
    c.lanes.servers = <Server *>calloc(n, sizeof(Server))
    c.lanes.living = <uint32_t *>calloc(n, sizeof(uint32_t))
    return c.lanes.at != NULL and c.lanes.servers != NULL and c.lanes.living != NULL


cdef inline void count_living(Core *c) noexcept nogil:
    """List the lanes that are not lost, and count each server's."""
    cdef uint32_t i
    c.lanes.n_living = 0
    for i in range(c.lanes.n_servers):
        c.lanes.servers[i].n_lanes = 0
    for i in range(c.lanes.n):
        if c.lanes.at[i].lost:
            continue
        c.lanes.at[i].server.n_lanes += 1
        c.lanes.living[c.lanes.n_living] = i
        c.lanes.n_living += 1


cdef inline bint add_lanes(Core *c, uint32_t n, bint beside) noexcept nogil:
    """Add the lanes of a new server. False: there is no room for their numbers."""
    cdef Server *server
    cdef uint32_t i
    if n == 0 or c.lanes.capacity - c.lanes.n < n or c.lanes.n_servers == c.lanes.capacity:
        return False
    server = &c.lanes.servers[c.lanes.n_servers]
    server.beside = beside
    c.lanes.n_servers += 1
    for i in range(n):
        c.lanes.at[c.lanes.n + i].server = server
    c.lanes.n += n
    count_living(c)
    return True


cdef inline void await_greeting(Core *c, uint32_t peer) noexcept nogil:
    """Let a thread drive until a lane that was sent a PING has replied or is lost."""
    if c.lanes.greeted == 0:
        lock(&c.monitor)
        count_work(c, True)
        unlock(&c.monitor)
    c.lanes.greeted += 1
    c.lanes.at[peer].greeted = True


cdef inline void end_greeting(Core *c, uint32_t peer) noexcept nogil:
    """Tell Python that a lane which joins the running job is ready or lost."""
    cdef uint64_t one = 1
    if not c.lanes.at[peer].greeted:
        return
    c.lanes.at[peer].greeted = False
    c.lanes.greeted -= 1
    if c.lanes.greeted == 0:
        lock(&c.monitor)
        count_work(c, False)
        unlock(&c.monitor)
    write(c.moving.told, &one, sizeof(one))


cdef inline void note_ready(Core *c, uint32_t peer) noexcept nogil:
    """A lane has proved the secret."""
    c.lanes.at[peer].ready = True
    c.lanes.n_ready += 1
    end_greeting(c, peer)


cdef inline void end_lane(Core *c, uint32_t peer) noexcept nogil:
    """End the connection to a lane for ever. Idempotent; count_living() has to follow."""
    cdef Lane *lane = &c.lanes.at[peer]
    lane.lost, lane.mute, lane.n_acks, lane.acks_bytes = True, True, 0, 0
    lane.server.lost = True
    c.moving.untaken -= lane.untaken
    lane.untaken = 0
    end_greeting(c, peer)
    c.endpoint.drop(c.endpoint.self, peer)


cdef inline void resume(Core *c) noexcept nogil:
    """Give the driver's role back after `pause`."""
    lock(&c.monitor)
    c.role.driving = False
    notify_all(&c.monitor)
    unlock(&c.monitor)
