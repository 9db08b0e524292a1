# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The wait for the gradients of a step, of which there may be thousands.

What is asked of each of them, and how it ends.
"""
from libc.stdint cimport int64_t, uint64_t

from bpsx.plugin.adapter cimport Handle
from bpsx.torch._gradients cimport UNCOUNTED, Failed, Managed, Pushed, counted, place_of

from bpsx.torch.ops import mark_all_written


def pushed_of(list managed) -> list:
    """Those whose gradients are on their way."""
    return [m for m in managed if (<Managed?>m).pushed is not None]


def any_under_way(list managed) -> bool:
    """Whether a gradient is on its way, or due to be."""
    cdef Managed m
    for m in managed:
        if m.pushed is not None or m.deferred:
            return True
    return False


def used_of(list managed) -> list:
    """Whether this worker has a gradient, of each."""
    return [
        (<Managed?>m).pushed is not None or (<Managed>m).parameter.grad is not None for m in managed
    ]


def frozen_of(list managed) -> list:
    """Those that this worker has frozen, and does not push."""
    return [
        m for m in managed
        if (<Managed?>m).pushed is None and not (<Managed>m).parameter.requires_grad
    ]


def want_all(list managed) -> None:
    """Some worker has a gradient of each."""
    cdef Managed m
    for m in managed:
        m.wanted = True


def missing_of(list managed) -> list:
    """Those that are trained, wanted and not on their way.

    What could not begin is not, and goes again.
    """
    cdef Managed m
    cdef list found = []
    for m in managed:
        if type(m.pushed) is Pushed and type((<Pushed>m.pushed).begun) is Failed:
            m.pushed = None
        if m.pushed is None and m.wanted and m.parameter.requires_grad:
            found.append(m)
    return found


def settle_here(list managed) -> list:
    """Wait for gradients on the host that hooks have begun quickly, and see that they are where the
    optimizer looks.

    Return the others, and those that failed, were written to or have other memory.
    """
    cdef Pushed pushed
    cdef Managed m
    cdef Handle handle
    cdef list odd = [], done = []
    core = None
    try:
        for m in managed:
            if not is_as_pushed(m):
                odd.append(m)
                continue
            pushed = m.pushed
            handle = pushed.begun
            if not handle.has_succeeded():
                try:
                    handle.wait()
                except Exception:
                    if not handle.has_ended():
                        raise               # the wait was interrupted
                    odd.append(m)           # the next wait raises the failure again
                    continue
            if m.parameter.grad is not pushed.gradient:
                m.parameter.grad = pushed.gradient
            done.append(pushed.gradient)
            core = keep(m, pushed, handle)
    finally:
        mark_all_written(done)
    if core is not None:
        core.reap()             # lets go of the gradients' memory, as each wait would
    return odd


cdef keep(Managed m, Pushed pushed, Handle handle):
    """Keep the objects for the next step: new ones would make Python look for garbage all the time.

    Returns the core.
    """
    m.pushed = None
    pushed.gradient = pushed.owner = pushed.begun = None
    pushed.spare = handle
    m.spare = pushed
    return handle.rest()


cdef bint is_as_pushed(Managed m) except -1:
    """Whether a hook has begun its sum quickly on the host, and nothing has happened to the
    gradient since.
    """
    cdef Pushed pushed
    if type(m.pushed) is not Pushed:
        return False
    pushed = m.pushed
    if (
        pushed.batch is None
        or type(pushed.begun) is not Handle
        or (<Handle>pushed.begun).gpu is not None
    ):
        return False
    return (
        counted(pushed.gradient) == pushed.version
        and place_of(pushed.gradient) == pushed.address
    )


def restart(list managed, int passes) -> None:
    """Forget backward passes that have been added up so far, and averages, whose memory may be
    wanted.
    """
    cdef Managed m
    for m in managed:
        m.passes_left = passes
        m.averaged = None


def all_together(list managed) -> bool:
    """Whether each of them has a gradient of its own on its way, with others on a GPU."""
    cdef Pushed pushed
    cdef Managed m
    for m in managed:
        if type(m.pushed) is not Pushed:
            return False
        pushed = m.pushed
        if pushed.batch is None or type(pushed.begun) is not Handle or m.stands_in:
            return False
        if (<Handle>pushed.begun).gpu is None:
            return False
    return True


def settle(list managed) -> list:
    """Wait for gradients that are :func:`all_together`, and see that they are where the optimizer
    looks.

    Returns those with which something is the matter, as they are: failed, written to, with other
    memory.
    """
    cdef Pushed pushed
    cdef Managed m
    cdef Handle handle
    cdef uint64_t stream = 0, by = 0
    cdef list odd = [], done = []
    try:
        for m in managed:
            pushed = m.pushed
            gradient = pushed.gradient
            if (
                pushed.version == UNCOUNTED
                or <int64_t>gradient._version != pushed.version
                or place_of(gradient) != pushed.address
            ):
                odd.append(m)
                continue
            handle = pushed.begun
            try:
                if by == 0 or not handle.is_behind(stream, by):
                    handle.wait()
                    stream = handle.streams()
                    by = handle.gpu.number_of(stream)
                if m.parameter.grad is not gradient:
                    m.parameter.grad = gradient
            except Exception:
                if not handle.has_ended():
                    raise                   # the wait was interrupted
                odd.append(m)               # who tries again is told again
                continue
            done.append(gradient)
            m.pushed = None
    finally:
        mark_all_written(done)
    return odd
