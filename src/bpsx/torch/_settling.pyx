# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The wait for the gradients of a step, of which there may be thousands.

Contains the loops over all parameters: the queries before the wait, and the wait itself.
"""
from libc.stdint cimport int64_t, uint64_t

from bpsx.plugin.adapter cimport Handle
from bpsx.torch._gradient_state cimport (
    DEFERRED, NOT_STARTED, Event, allows, is_pushed, is_under_way,
)
from bpsx.torch._gradients cimport UNCOUNTED, Managed, Pushed, counted, place_of

from bpsx.torch.tensors import mark_all_written


def pushed_of(list managed) -> list:
    """Return the parameters whose gradients are to be waited for."""
    return [m for m in managed if is_pushed((<Managed?>m).state)]


def any_under_way(list managed) -> bool:
    """Return whether a gradient is in flight or due to be pushed."""
    cdef Managed m
    for m in managed:
        if is_under_way(m.state):
            return True
    return False


def used_of(list managed) -> list:
    """Return for each parameter whether this worker has a gradient."""
    return [
        is_pushed((<Managed?>m).state) or (<Managed>m).parameter.grad is not None for m in managed
    ]


def frozen_of(list managed, int passes) -> list:
    """Return the parameters that this worker has frozen and does not push."""
    return [
        m for m in managed
        if not is_pushed((<Managed?>m).state) and not is_trained(<Managed>m, passes)
    ]


cdef bint is_trained(Managed m, int passes) except -1:
    """Return whether the parameter is trained, or was when backward last added to its gradient.

    The step uses that gradient even if the parameter is frozen before the step. ``passes``: passes
    of backward per step.
    """
    parameter = m.parameter
    return parameter.requires_grad or (m.passes_left < passes and parameter.grad is not None)


def want_all(list managed) -> None:
    """Mark every parameter as having a gradient on some worker."""
    cdef Managed m
    for m in managed:
        m.wanted = True


def agree(list managed) -> None:
    """Release the gradients that had to wait for the agreement of the workers."""
    cdef Managed m
    for m in managed:
        if m.state == DEFERRED:
            m.agree()


def missing_of(list managed, int passes) -> list:
    """Return the parameters that are trained, wanted and not in flight.

    A push that could not start is dropped and counts as missing. ``passes``: as in
    :func:`frozen_of`.
    """
    cdef Managed m
    cdef list found = []
    for m in managed:
        if m.state == NOT_STARTED:
            m.drop()
        if allows(m.state, Event.START) and m.wanted and is_trained(m, passes):
            found.append(m)
    return found


def settle_here(list managed) -> list:
    """Wait for gradients that hooks have started quickly on the host, and put them into ``grad``.

    Returns the other parameters, and those whose gradient failed, was written to, replaced or
    reallocated.
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
            gradient = m.parameter.grad
            if gradient is not pushed.gradient:
                if gradient is not None:
                    odd.append(m)           # the next wait raises the error
                    continue
                m.parameter.grad = pushed.gradient
            done.append(pushed.gradient)
            core = keep(m, pushed, handle)
    finally:
        mark_all_written(done)
    if core is not None:
        core.reap()             # releases the gradients' memory, as each wait would
    return odd


cdef keep(Managed m, Pushed pushed, Handle handle):
    """Keep the objects for the next step: new ones would keep triggering garbage collection.

    Returns the core.
    """
    m.receive()
    pushed.gradient = pushed.owner = pushed.begun = None
    pushed.spare = handle
    m.spare = pushed
    return handle.rest()


cdef bint is_as_pushed(Managed m) except -1:
    """Return whether a hook started the sum quickly on the host, with the gradient unchanged."""
    cdef Pushed pushed
    if type(m.pushed) is not Pushed:
        return False
    pushed = m.pushed
    if (
        pushed.bucket is None
        or type(pushed.begun) is not Handle
        or (<Handle>pushed.begun).gpu is not None
    ):
        return False
    return (
        counted(pushed.gradient) == pushed.version
        and place_of(pushed.gradient) == pushed.address
    )


def restart(list managed, int passes) -> None:
    """Reset the count of backward passes, and release averages, whose memory may be needed."""
    cdef Managed m
    for m in managed:
        m.passes_left = passes
        if allows(m.state, Event.CLEAR):
            m.clear()


def all_together(list managed) -> bool:
    """Return whether every gradient is this worker's own and in flight in a GPU bucket."""
    cdef Pushed pushed
    cdef Managed m
    for m in managed:
        if type(m.pushed) is not Pushed:
            return False
        pushed = m.pushed
        if pushed.bucket is None or type(pushed.begun) is not Handle or m.stands_in:
            return False
        if (<Handle>pushed.begun).gpu is None:
            return False
    return True


def settle(list managed) -> list:
    """Wait for gradients that are :func:`all_together` and put them into ``grad``.

    Returns the parameters whose gradients need the slow path (failed, written to, replaced or
    reallocated).
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
            now = m.parameter.grad
            if now is not gradient and now is not None:
                odd.append(m)               # the next wait raises the error
                continue
            handle = pushed.begun
            try:
                if by == 0 or not handle.is_behind(stream, by):
                    handle.wait()
                    stream = handle.streams()
                    by = handle.gpu.number_of(stream)
                if now is None:
                    m.parameter.grad = gradient
            except Exception:
                if not handle.has_ended():
                    raise                   # the wait was interrupted
                odd.append(m)               # the next wait raises the failure again
                continue
            done.append(gradient)
            m.receive()
    finally:
        mark_all_written(done)
    return odd
