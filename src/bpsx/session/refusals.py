"""Counting of calls that are refused before they reach the session.

Another worker's call may have been accepted. So the next push_pull of that name must not be summed
with the one that the other worker has already pushed: see "After an error" in
docs/internals/failures.md.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from bpsx import errors

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Errors that reach all workers or end the job; calls that raise them need no counting.
_TOLD = (
    errors.PeerLostError,
    errors.MismatchError,
    errors.StallError,
    errors.ProtocolError,
    errors.ShutdownError,
    errors.JoinedError,
    errors.KernelError,
    errors.DeviceError,
    errors.NotInitializedError,
    errors.RendezvousError,
    errors.TransportError,
)


class _Mine(threading.local):
    """State of the calling thread.

    ``asked``: number of push_pulls that it has asked the session for. ``inside``: whether it is in
    a counted call. ``broken``: whether the session has refused a push_pull of that call.
    """

    asked = 0
    inside = False
    broken = False


def _without_session(kind: str, name: str, count: int) -> None:
    """Do nothing: without a session there is nothing to count."""


mine = _Mine()
#: Set by the module that owns the session; it has the arguments of
#: :meth:`bpsx.session.declarations.Declarations.count_refused`.
count_refused: Callable[[str, str, int], None] = _without_session


def counted(
    verb: str, wire: str = "{}", several: bool = False, argument: str = "name", prefix: str = ""
) -> Callable[[_Function], _Function]:
    """Decorate a verb whose ``argument`` is a name, so that its refused calls are counted.

    Of verbs that call each other only the outermost counts.

    ``verb``: the verb's name; calls without a name have names on the wire that begin with it and
    ".noname.". ``wire``: format that makes the name on the wire from the call's name. ``prefix``:
    the argument whose value is put before the name. ``several``: the verb makes several push_pulls,
    whose names all begin with that name.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        def count(error: BaseException, unasked: bool, args: Any, more: Any) -> None:
            if mine.broken or (unasked or several) and not isinstance(error, _TOLD):
                name = _name(signature.bind_partial, args, more, (prefix, argument), wire)
                kind = "unnamed" if name is None else "below" if several else "name"
                count_refused(kind, verb if name is None else name, int(unasked))

        return _outermost(function, count)

    return decorate


def counted_together(*beginnings: str) -> Callable[[_Function], _Function]:
    """Decorate a verb that makes the push_pulls of all names that begin with one of ``beginnings``.

    After a call that fails with an error that other workers do not get, all these names are
    declared anew.
    """

    def decorate(function: _Function) -> _Function:
        def count(error: BaseException, unasked: bool, args: Any, more: Any) -> None:
            if mine.broken or not isinstance(error, _TOLD):
                for i, beginning in enumerate(beginnings):
                    count_refused("beginning", beginning, int(i == 0 and unasked))

        return _outermost(function, count)

    return decorate


def _outermost(
    function: _Function, count: Callable[[BaseException, bool, Any, Any], None]
) -> _Function:
    """Return ``function`` with its errors passed to ``count``, unless another such verb calls it.

    ``count`` gets the error, whether the call has asked the session for no push_pull, and the
    call's positional and keyword arguments.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        if mine.inside:
            return function(*args, **more)
        mine.inside, mine.broken, asked = True, False, mine.asked
        try:
            return function(*args, **more)
        except BaseException as error:
            count(error, mine.asked == asked, args, more)
            raise
        finally:
            mine.inside = False

    return call  # type: ignore[return-value]


def _name(
    bind: Callable[..., inspect.BoundArguments],
    args: Any,
    more: Any,
    which: tuple[str, str],
    wire: str,
) -> str | None:
    """Return the name on the wire that the call's arguments make, or None if they have no name."""
    try:
        bound = bind(*args, **more)
    except TypeError:  # arguments that the verb does not have
        return None
    bound.apply_defaults()
    prefix, name = (bound.arguments.get(argument) for argument in which)
    if not isinstance(name, str):
        name = getattr(name, "wire", getattr(name, "name", None))  # a gradient, not a string
    if not isinstance(name, str) or not name:
        return None
    return wire.format(f"{prefix}{name}" if isinstance(prefix, str) else name)
