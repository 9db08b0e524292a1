# An endpoint's state, and its peers: the connections that it has made to lanes, the workers whose
# messages a lane takes, and their routing ids.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from bpsx.system.arrays cimport make_room
from bpsx.system.sync cimport atomic_load, atomic_store
from bpsx.transports.abi cimport Message
from bpsx.transports.zeromq.libzmq cimport ZMQ_SRCFD, LibZmq, zmq_msg_t

cdef enum:
    ID_BYTES = 13
    RANK_MASK = 0xFFFF          # see pass_number
    ID_TAG = 1                  # not 0: ZeroMQ reserves ids that begin with a zero byte

cdef struct Connection:         # made by connect()
    char *url                   # NULL: none to this peer
    int64_t dropped

cdef struct Visitor:            # the worker of a rank that has last connected
    bint there
    uint32_t number             # that it shows: see pass_number
    int64_t descriptor          # of its connection, plus 1; 0: not known, -1: it has ended

cdef struct EndpointState:
    LibZmq *lib
    void *socket
    int wake_fd
    uint64_t job
    int64_t malformed
    Visitor *visitors           # by rank, known since the first message. Only a lane has them
    uint32_t n_visitors
    uint32_t *retired           # numbers of workers that others have replaced
    uint32_t n_retired
    uint32_t retired_capacity
    Connection *connections     # by peer number
    uint32_t n_connections
    bint has_aside
    Message aside               # received by zmq_drop; the next receive returns it


cdef inline void put_id(EndpointState *s, char *out, uint32_t index) noexcept nogil:
    out[0] = ID_TAG
    memcpy(out + 1, &index, 4)
    memcpy(out + 5, &s.job, 8)


cdef inline uint32_t number_of(EndpointState *s, uint32_t peer) noexcept nogil:
    """The number in a peer's routing id."""
    return s.visitors[peer].number if peer < s.n_visitors and s.visitors[peer].there else peer


cdef inline void retire(EndpointState *s, Visitor *v) noexcept nogil:
    """Take no more messages of a worker: another one may have its rank."""
    if not v.there:
        return
    if make_room(&s.retired, &s.retired_capacity, s.n_retired + 1, sizeof(uint32_t)):
        s.retired[s.n_retired] = v.number
        s.n_retired += 1
    v.there = False
    atomic_store(&v.descriptor, 0)


cdef inline bint is_retired(EndpointState *s, uint32_t number) noexcept nogil:
    cdef uint32_t i
    for i in range(s.n_retired):
        if s.retired[i] == number:
            return True
    return False


cdef inline bint admit(
    EndpointState *s, uint32_t number, zmq_msg_t *head, uint32_t *rank
) noexcept nogil:
    """Record the sender of a lane's message; *rank: its rank. False: a newer worker holds it."""
    cdef Visitor *v
    rank[0] = number & RANK_MASK
    v = &s.visitors[rank[0]]
    if v.there and v.number == number:
        return True
    if is_retired(s, number):
        return False
    retire(s, v)
    v.there, v.number = True, number
    atomic_store(&v.descriptor, s.lib.msg_get(head, ZMQ_SRCFD) + 1)
    return True


cdef inline bint is_dropped(EndpointState *s, uint32_t peer) noexcept nogil:
    return peer < s.n_connections and atomic_load(&s.connections[peer].dropped)
