# Whether there is work for which a thread has to drive, and for how long there has been.
from libc.stdint cimport int64_t

from bpsx.core.state cimport Core
from bpsx.system.sync cimport lock, now_ns, unlock


cdef inline void count_work(Core *c, bint begins) noexcept nogil:
    """Count work for which a thread has to drive, beside tasks. The caller holds the monitor."""
    if begins and c.busy.outstanding == 0:
        c.busy.since = now_ns()
    c.busy.outstanding += 1 if begins else -1
    if c.busy.outstanding == 0:
        c.busy.total += now_ns() - c.busy.since


cdef inline int64_t busy_ns(Core *c) noexcept nogil:
    """Nanoseconds in which at least one push_pull was under way."""
    cdef int64_t total
    lock(&c.monitor)
    total = c.busy.total
    if c.busy.outstanding:
        total += now_ns() - c.busy.since
    unlock(&c.monitor)
    return total
