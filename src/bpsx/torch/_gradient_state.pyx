# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""State of one gradient: the states, the events, and the table of transitions.

:class:`bpsx.torch._gradients.Managed` holds the state, and each of its methods is an event, which
also sets the fields that belong to the new state. Only these files call them: ``_bucket.pyx`` (hook
and bucket), ``_settling.pyx`` (waits), ``exchange.py``, ``parallel/averaging.py`` and
``pending_updates.py``.
"""

from bpsx.errors import InternalError

#: The next state by state and event. An event that is not listed cannot occur in that state.
TABLE = {
    State.ADDING: {
        Event.ADD: State.ADDING,
        Event.DEFER: State.DEFERRED,
        Event.BUCKET: State.BUCKETED,
        Event.START: State.IN_FLIGHT,
        Event.CLEAR: State.ADDING,
    },
    State.DEFERRED: {Event.AGREE: State.ADDING},
    State.BUCKETED: {Event.SUBMIT: State.IN_FLIGHT, Event.FAIL: State.NOT_STARTED},
    State.IN_FLIGHT: {
        Event.STEP: State.PENDING,
        Event.RECEIVE: State.AVERAGED,
        Event.DROP: State.ADDING,
    },
    State.NOT_STARTED: {Event.STEP: State.PENDING, Event.DROP: State.ADDING},
    State.PENDING: {Event.RECEIVE: State.AVERAGED, Event.DROP: State.ADDING},
    State.AVERAGED: {
        Event.ADD: State.ADDING,
        Event.BUCKET: State.BUCKETED,
        Event.START: State.IN_FLIGHT,
        Event.CLEAR: State.ADDING,
    },
}


cdef fill_in():
    for state in State:
        for event in Event:
            NEXT[<int>state][<int>event] = TABLE[state].get(event, REFUSED)


fill_in()


cdef int refuse(State state, Event event, str name) except -1:
    """Raise the error for an event that the table does not allow."""
    raise InternalError(
        f"internal error: the gradient of {name!r} is {State(state).name}, where"
        f" {Event(event).name} cannot occur; please report it with the code of the training loop"
    )
