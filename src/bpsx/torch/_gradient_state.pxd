# States of a gradient and the events that change them; see _gradient_state.pyx. Call with the GIL.

cpdef enum State:
    ADDING                      # backward adds to the gradient, or has still to begin
    DEFERRED                    # sparse and complete: the workers have to agree on its kind first
    BUCKETED                    # in the bucket; the bucket's sums have not started
    IN_FLIGHT                   # the sum has started, and is to be waited for
    NOT_STARTED                 # the bucket's sum could not start
    PENDING                     # CrossBarrier: step() has gone on without a wait
    AVERAGED                    # the wait has ended; backward has added nothing since


cpdef enum Event:
    ADD                         # backward adds to the gradient
    DEFER                       # the gradient is complete and sparse, its kind is not agreed on
    AGREE                       # the workers have agreed on kinds
    BUCKET                      # the gradient is put into the bucket
    START                       # the sum has started, without a bucket
    SUBMIT                      # the sum has started with its bucket
    FAIL                        # the sum could not start with its bucket
    STEP                        # CrossBarrier's step() leaves the wait to the update
    RECEIVE                     # the wait has ended with the sum
    DROP                        # the wait has failed; or the sum is discarded, or started again
    CLEAR                       # the passes of the next step are counted from here


cdef enum:
    REFUSED = -1

#: The next state by state and event, or REFUSED; filled from the table in _gradient_state.pyx.
cdef signed char NEXT[AVERAGED + 1][CLEAR + 1]

cdef int refuse(State state, Event event, str name) except -1


cdef inline bint allows(State state, Event event) noexcept:
    """Return whether the event can occur in this state."""
    return NEXT[<int>state][<int>event] != REFUSED


cdef inline int enter(State *state, Event event, str name) except -1:
    """Change the state of the gradient ``name``.

    Raises :class:`~bpsx.errors.InternalError` if the table does not allow the event.
    """
    cdef int following = NEXT[<int>state[0]][<int>event]
    if following == REFUSED:
        return refuse(state[0], event, name)
    state[0] = <State>following
    return 0


cdef inline bint is_pushed(State state) noexcept:
    """Return whether the bucket or the core has the gradient, and the wait has not ended."""
    return state in (BUCKETED, IN_FLIGHT, NOT_STARTED, PENDING)


cdef inline bint is_under_way(State state) noexcept:
    """Return whether the next wait for all gradients concerns this one."""
    return state in (DEFERRED, BUCKETED, IN_FLIGHT, NOT_STARTED)
