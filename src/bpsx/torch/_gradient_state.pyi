from enum import IntEnum

class State(IntEnum):
    ADDING = 0
    DEFERRED = 1
    BUCKETED = 2
    IN_FLIGHT = 3
    NOT_STARTED = 4
    PENDING = 5
    AVERAGED = 6

class Event(IntEnum):
    ADD = 0
    DEFER = 1
    AGREE = 2
    BUCKET = 3
    START = 4
    SUBMIT = 5
    FAIL = 6
    STEP = 7
    RECEIVE = 8
    DROP = 9
    CLEAR = 10

#: The next state by state and event. An event that is not listed cannot occur in that state.
TABLE: dict[State, dict[Event, State]]
