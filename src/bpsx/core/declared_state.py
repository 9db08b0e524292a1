"""Life of a worker's declaration of a name, as a table of transitions."""

from __future__ import annotations

from enum import Enum

from bpsx.system.transitions import Table


class DeclaredState(Enum):
    """State of a declaration on a worker; ``_tensor.pyx`` holds it as a number."""

    ASKED = 0  #: the scheduler has not answered; push_pulls wait in ``pending``
    PLACED = 1  #: the tensor has its keys; other threads may submit directly
    RETIRING = 2  #: as ASKED, but the name's next push_pull declares it anew
    RETIRED = 3  #: as PLACED, for the push_pulls in progress only
    FAILED = 4


class DeclaredEvent(Enum):
    """Event in the life of a declaration on a worker."""

    PLACED = 0  #: the scheduler's answer, or ADOPT
    DISPUTED = 1  #: FAILED: the workers disagree about it
    CALL_REFUSED = 2  #: a push_pull of the name was refused or interrupted on this worker
    RESET = 3  #: a new epoch begins
    SESSION_ENDS = 4  #: no answer will come any more
    ENDED = 5  #: its last push_pull has begun: a successor follows


_State, _Event = DeclaredState, DeclaredEvent
_FAILS = {_Event.DISPUTED: _State.FAILED, _Event.RESET: _State.FAILED}

DECLARED: Table[DeclaredState, DeclaredEvent] = Table(
    "a declaration",
    {
        _State.ASKED: {
            _Event.PLACED: _State.PLACED,
            _Event.CALL_REFUSED: _State.RETIRING,
            _Event.SESSION_ENDS: _State.FAILED,
            **_FAILS,
        },
        _State.PLACED: {
            _Event.CALL_REFUSED: _State.RETIRED,
            _Event.ENDED: _State.RETIRED,
            _Event.SESSION_ENDS: _State.PLACED,
            **_FAILS,
        },
        _State.RETIRING: {
            _Event.PLACED: _State.RETIRED,
            _Event.CALL_REFUSED: _State.RETIRING,
            _Event.SESSION_ENDS: _State.FAILED,
            **_FAILS,
        },
        _State.RETIRED: {
            _Event.CALL_REFUSED: _State.RETIRED,
            _Event.SESSION_ENDS: _State.RETIRED,
            **_FAILS,
        },
        _State.FAILED: {
            _Event.CALL_REFUSED: _State.FAILED,
            _Event.RESET: _State.FAILED,
            _Event.SESSION_ENDS: _State.FAILED,
        },
    },
)
