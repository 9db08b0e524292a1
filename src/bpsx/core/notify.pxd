# Notifications from other threads of the process to the driver. Any thread may call these.
from bpsx.core.loop cimport tell_news
from bpsx.core.partition cimport Tensor, Term
from bpsx.core.state cimport Core
from bpsx.system.sync cimport atomic_store, lock, unlock


cdef inline void tell_failing(Core *c, Tensor *tensor, int status) noexcept nogil:
    """Ask the driver to end every task of a tensor with `status`. The first status wins."""
    lock(&c.monitor)
    if tensor.failing_status == 0:              # otherwise it is, or has been, in the list
        tensor.failing_status = status
        tensor.next_failing = c.inbox.failing
        c.inbox.failing = tensor
    unlock(&c.monitor)
    tell_news(c)


cdef inline void tell_known(Core *c, Tensor *tensor) noexcept nogil:
    """Ask the driver to adopt a tensor that other processes push."""
    lock(&c.monitor)
    tensor.next_known = c.inbox.known
    c.inbox.known = tensor
    unlock(&c.monitor)
    tell_news(c)


cdef inline void tell_term(Core *c, Term *term) noexcept nogil:
    """Ask the driver to begin a term, after those that it was asked for before."""
    cdef Term **at
    term.next = NULL
    lock(&c.monitor)
    at = &c.inbox.terms
    while at[0] != NULL:
        at = &at[0].next
    at[0] = term
    unlock(&c.monitor)
    tell_news(c)


cdef inline void tell_joined(Core *c) noexcept nogil:
    """Tell the driver that all workers have joined and go on."""
    lock(&c.monitor)
    c.inbox.joins += 1
    unlock(&c.monitor)
    tell_news(c)


cdef inline bint tell_failed(Core *c, int status) noexcept nogil:
    """Ask the driver to end all tasks with `status`. False if the core had already failed."""
    cdef bint first
    lock(&c.monitor)
    first = not c.failed
    if first:
        atomic_store(&c.failed, status)
    unlock(&c.monitor)
    if first:
        tell_news(c)
    return first
