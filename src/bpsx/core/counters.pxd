# Counters and gauges of a core, for Python.
from libc.stdint cimport uint32_t

from bpsx.core.loop cimport busy_ns
from bpsx.core.state cimport Core
from bpsx.system.sync cimport atomic_load


cdef inline dict gauges_of(Core *c):
    """Return the push_pulls under way, partitions that wait to be sent, and bytes handed to the
    transport and not yet written out.
    """
    cdef uint32_t i
    queued, in_flight = 0, 0
    for i in range(c.n_lanes):     # unsynchronized reads while the driver works
        queued += c.lanes[i].size
        in_flight += atomic_load(&c.lanes[i].in_flight)
    return {"outstanding": atomic_load(&c.outstanding), "queued": queued, "in_flight": in_flight}


cdef inline dict counters_of(Core *c):
    """Return totals since the start: bytes, messages, completed push_pulls."""
    return {
        "push_pulls": c.counters.tasks, "tensor_bytes": c.counters.bytes,
        "bytes_sent": c.counters.sent, "bytes_received": c.counters.received,
        "messages_sent": c.counters.messages_out, "messages_received": c.counters.messages_in,
        "malformed": c.counters.malformed, "busy_ns": busy_ns(c)
    }
