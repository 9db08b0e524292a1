# Checkpoints of compressed keys: a worker reads or sets the state that a lane keeps from round to
# round. Such a push opens no round and is not counted.
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from bpsx.core.wire cimport ANSWER, INLINE_BYTES, Header
from bpsx.core.codec.state cimport load_state, save_state, server_state_bytes
from bpsx.core.status cimport E_PROTOCOL
from bpsx.server.reply cimport Result, put_record, reply_header, result_in, send_error, send_result
from bpsx.server.lane cimport Lane
from bpsx.server.store cimport KeyState


cdef inline int push_state(Lane *lane, KeyState *e, Header *h, const char *body) noexcept nogil:
    """Load the state from the body, if there is one, and reply with the state. -1: malformed."""
    cdef Header reply
    cdef Result *r
    cdef char *memory
    cdef uint64_t size
    if (
        h.key != e.key
        or h.dtype != e.dtype
        or e.compressed == NULL
        or h.length and h.length != server_state_bytes(e.compressed.packed)
    ):
        send_error(lane, h.sender, h.key, h.round, h.cookie, E_PROTOCOL, 0, 0)
        return -1
    if h.length:
        load_state(e.compressed.packed, body)
        e.compressed.restored = True
    size = server_state_bytes(e.compressed.packed)
    memory = <char *>malloc(size)
    if memory == NULL:
        lane.counters.dropped += 1       # the worker would wait for ever
        return 0
    save_state(e.compressed.packed, memory)
    if e.compressed.packed.light:
        # The encoder writes more than the counter, and reads nothing else.
        memset(memory + sizeof(e.compressed.packed.counter), 0,
               size - sizeof(e.compressed.packed.counter))
    if size <= INLINE_BYTES:
        reply_header(lane, &reply, ANSWER, h.sender, e, h.cookie)
        reply.length = size
        put_record(lane, h.sender, &reply, memory)
        free(memory)
        return 0
    r = result_in(lane, NULL, 1)
    if r == NULL:
        free(memory)
        return 0
    r.memory = memory
    send_result(lane, e, h.sender, h.cookie, r, memory, size, NULL)
    return 0
