"""push_pull and broadcast as asynchronous operations of MXNet's engine."""

from collections.abc import Mapping

from bpsx.plugin._async_ops import CallPlan

def load(found: Mapping[str, int]) -> None:
    """Use these addresses of MXNet's functions, by the names of ``Api`` in ``_pushes.pyx``."""

def wait(seconds: float) -> int:
    """Wait at most ``seconds`` until all pushed operations are over.

    Returns the number of operations left. Thread-safe.
    """

def new_turn() -> int:
    """Make the turn of a name, which keeps the order of its operations. It is never freed."""

#: Error text of operations of a name after one that did not begin.
BEHIND: str

def begin_job() -> None:
    """Forget operations of earlier jobs that failed or were left out. Thread-safe, as all below."""

def is_behind(turn: int) -> bool:
    """Whether an operation of that name did not begin.

    Operations that begin after it, through the engine, fail with :data:`BEHIND`.
    """

def left_out() -> bool:
    """Whether the engine has left out an operation because computing its array has failed."""

def why() -> str:
    """Return MXNet's error text for the first operation that it left out.

    Works once; empty if the error has been reported already.
    """

def unheard() -> str:
    """Return MXNet's text of the first failed operation if no error has been reported; else empty.

    From then on the error counts as reported.
    """

def raise_after_fork(kind: type[BaseException]) -> None:
    """Raise ``kind`` in the calling thread once it has forked.

    For handlers that run before a fork, whose exceptions Python would print and forget.
    """

class Refused(CallPlan):
    """Fails with ``error`` in place of an exchange.

    ``again``: an operation on the same array has been refused in this job before.
    """

    def __init__(self, error: Exception, again: bool) -> None: ...

def push(array: int, turn: int, plan: CallPlan, rate: float, priority: int) -> None:
    """Have the engine execute ``plan`` on the NDArray with the handle ``array``.

    The operation begins after earlier writes to the array. ``turn``: the name's, from
    :func:`new_turn`; the core gets the operations of one name in the order of these calls.
    ``rate``: the learning rate, negative where there is none. ``priority``: within the engine.
    Later failures are raised where the array is waited for. Raises :class:`~bpsx.errors.BpsxError`
    if the engine does not take the operation.
    """
