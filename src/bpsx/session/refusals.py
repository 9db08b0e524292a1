"""Counts calls that are refused before they reach the session as those that are not.

Another worker's call may have been accepted. So the next one under that name must not meet what the
other has pushed for this one: see "After an error" in
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
#: What all workers hear of, or what ends the job: it needs no counting.
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
    """What the calling thread has done: push_pulls that it has asked the session for, whether it is
    in a counted call, and whether the session has refused a push_pull of that.
    """

    asked = 0
    inside = False
    broken = False


def _without_session(kind: str, name: str, count: int) -> None:
    """There is nothing to count yet."""


mine = _Mine()
#: Set by the module that has the session, and called as
#: :meth:`bpsx.session.declarations.Declarations.refused` is.
refused: Callable[[str, str, int], None] = _without_session


def counted(
    verb: str, wire: str = "{}", several: bool = False, argument: str = "name", prefix: str = ""
) -> Callable[[_Function], _Function]:
    """Decorate a verb whose ``argument`` is a name.

    Of verbs that call each other the outermost counts.

    ``verb``: with ".noname." behind it, names on the wire begin so where the call has none.
    ``wire``: what the call's name is there; ``prefix``: the argument that is put before it.
    ``several``: it makes several push_pulls, whose names begin with that.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        def count(error: BaseException, unasked: bool, args: Any, more: Any) -> None:
            if mine.broken or (unasked or several) and not isinstance(error, _TOLD):
                name = _name(signature.bind_partial, args, more, (prefix, argument), wire)
                kind = "unnamed" if name is None else "below" if several else "name"
                refused(kind, verb if name is None else name, int(unasked))

        return _outermost(function, count)

    return decorate


def counted_together(*beginnings: str) -> Callable[[_Function], _Function]:
    """Decorate a verb that makes the push_pulls of all names that begin with one of
    ``beginnings``.
    """

    def decorate(function: _Function) -> _Function:
        def count(error: BaseException, unasked: bool, args: Any, more: Any) -> None:
            if mine.broken or not isinstance(error, _TOLD):
                for i, beginning in enumerate(beginnings):
                    refused("beginning", beginning, int(i == 0 and unasked))

        return _outermost(function, count)

    return decorate


def _outermost(
    function: _Function, count: Callable[[BaseException, bool, Any, Any], None]
) -> _Function:
    """``function``, whose errors go to ``count`` unless it was called by another such verb.

    ``count`` gets the error, whether the call has asked the session for no push_pull, and the
    call's arguments.
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
    """What the call's arguments make the name on the wire; None without one."""
    try:
        bound = bind(*args, **more)
    except TypeError:  # arguments that the verb does not have
        return None
    bound.apply_defaults()
    prefix, name = (bound.arguments.get(argument) for argument in which)
    if not isinstance(name, str):
        name = getattr(name, "wire", getattr(name, "name", None))  # a gradient's
    if not isinstance(name, str) or not name:
        return None
    return wire.format(f"{prefix}{name}" if isinstance(prefix, str) else name)
