# What a driver is told by other threads of its process.
from bpsx.core.loop cimport tell_news
from bpsx.core.partition cimport Tensor
from bpsx.core.state cimport Core
from bpsx.system.sync cimport atomic_store, lock, unlock


cdef inline void tell_failing(Core *c, Tensor *tensor, int status) noexcept nogil:
    """Every task of a tensor shall end."""
    lock(&c.monitor)
    tensor.failing_status = status
    tensor.next_failing = c.failing
    c.failing = tensor
    unlock(&c.monitor)
    tell_news(c)


cdef inline void tell_known(Core *c, Tensor *tensor) noexcept nogil:
    """There is a tensor that others push."""
    lock(&c.monitor)
    tensor.next_known = c.known
    c.known = tensor
    unlock(&c.monitor)
    tell_news(c)


cdef inline bint tell_failed(Core *c, int status) noexcept nogil:
    """All tasks shall end. False if that was so already."""
    cdef bint first
    lock(&c.monitor)
    first = not c.failed
    if first:
        atomic_store(&c.failed, status)
    unlock(&c.monitor)
    if first:
        tell_news(c)
    return first
