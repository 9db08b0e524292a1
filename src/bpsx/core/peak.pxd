# The largest rate at which answers have arrived: what the links carry. docs/internals/retuning.md
# says what it is for.
from libc.stdint cimport int64_t

from bpsx.core.state cimport Core
from bpsx.system.sync cimport atomic_load, atomic_store, now_ns

cdef enum:
    PEAK_BYTES = 4 << 20        # of a stretch: several partitions, and longer than a hiccup


cdef inline void note_received(Core *c) noexcept nogil:
    """Note the rate of the stretch that ends now, if it is long enough. The driver.

    A stretch begins with the end of a message. It counts only if there was work all the time.
    Answers of a server on this machine are no part of it: no link carries them.
    """
    cdef int64_t n = c.counters.peak.received
    cdef int64_t now, rate
    cdef bint idled = c.busy.since > c.counters.peak.since_ns
    if n < PEAK_BYTES and not idled:
        return
    now = now_ns()
    if not idled and now > c.counters.peak.since_ns:
        rate = <int64_t>(n * 1e9 / (now - c.counters.peak.since_ns))
        if rate > atomic_load(&c.counters.peak.rate):
            atomic_store(&c.counters.peak.rate, rate)
    c.counters.peak.since_ns, c.counters.peak.received = now, 0
