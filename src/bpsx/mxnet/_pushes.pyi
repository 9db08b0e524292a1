"""push_pull and broadcast as asynchronous operations of MXNet's engine."""

from collections.abc import Mapping

from bpsx.plugin._async_ops import Plan

def load(found: Mapping[str, int]) -> None:
    """Use these addresses of MXNet's functions, by the names of ``Api`` in ``_pushes.pyx``."""

def wait(seconds: float) -> int:
    """Wait until all that has been pushed is over, at most so long.

    Returns how many operations are left. Thread-safe.
    """

def new_turn() -> int:
    """For a name. It is never freed."""

#: What is said of those that come after one that did not begin.
BEHIND: str

def begin_job() -> None:
    """Forget what has failed, or has been left out, before. Thread-safe, as all below."""

def is_behind(turn: int) -> bool:
    """Whether one of that name did not begin: what begins after it, through the engine, fails with
    :data:`BEHIND`.
    """

def left_out() -> bool:
    """Whether the engine has not executed an operation, because what makes its array has failed."""

def why() -> str:
    """MXNet's text of what has made it leave out the first one; once, and empty if somebody has
    been told already.
    """

def unheard() -> str:
    """MXNet's text of the first error of an operation, if nobody has been told of any; empty
    otherwise.

    From then on somebody has.
    """

def raise_after_fork(kind: type[BaseException]) -> None:
    """For what is called before a fork, whose exceptions Python would print and forget: raise it in
    the calling thread when that has forked.
    """

class Refused(Plan):
    """What fails with ``error`` in place of an exchange; ``again``: the same array has met one in
    this job before.
    """

    def __init__(self, error: Exception, again: bool) -> None: ...

def push(array: int, turn: int, plan: Plan, rate: float, priority: int) -> None:
    """Have the engine do what ``plan`` asks for to the NDArray whose handle is ``array``, when what
    writes to it before has been done.

    ``turn``: the name's, out of :func:`new_turn`: the core gets the operations of one name in the
    order of these calls. ``rate``: the learning rate, negative where there is none; ``priority``:
    within the engine. What goes wrong later is raised where the array is waited for. Raises
    :class:`~bpsx.errors.BpsxError` if the engine does not take it.
    """
