"""Removes bpsx's own frames from tracebacks of its errors, and warns at the script's line.

An error shows the script's frames, down to the line that calls bpsx. ``BPSX_FULL_TRACEBACKS=1``
shows all frames. Only ``__traceback__`` of the exceptions changes, so handlers, debuggers and
pytest see the same as the terminal.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from bpsx.config import full_tracebacks
from bpsx.errors import BpsxError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

#: Exceptions whose tracebacks are shortened. Others come from other code, or are a defect of bpsx,
#: whose report needs all frames.
CUT = (BpsxError, KeyboardInterrupt)
#: Packages through which bpsx calls itself. Their frames alone are no reason to show the frames
#: below a call of bpsx.
_FRAMEWORKS = {"torch", "tensorflow", "keras", "mxnet", "numpy", "numba", "cupy"}
_NOT_THE_SCRIPTS = _FRAMEWORKS | {"bpsx", "contextlib", "functools"}


def shorten(error: BaseException) -> None:
    """Remove bpsx's frames from the traceback of ``error`` and of the errors that led to it.

    For the function at which the error leaves bpsx: ``except CUT as error: shorten(error); raise``.
    A bare ``raise`` adds no frame of its own.
    """
    if full_tracebacks():
        return
    error.__traceback__ = _without_ours(error.__traceback__)
    for cause in _causes(error):
        if cause.__traceback__ is not None and not _has_foreign(cause.__traceback__):
            cause.__traceback__ = None


def public(function: _Function) -> _Function:
    """Decorate ``function`` so that its errors show the caller's frames only."""

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        try:
            return function(*args, **more)
        except CUT as error:
            shorten(error)
            raise

    call.cuts = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def public_methods(cls: _Class) -> _Class:
    """Apply :func:`public` to a class's public methods and properties.

    ``__init__`` and ``__call__`` are included.
    """
    for name, value in list(vars(cls).items()):
        if (
            name.startswith("_")
            and name not in ("__init__", "__call__")
            or getattr(value, "cuts", False)
        ):
            continue
        if isinstance(value, types.FunctionType):
            setattr(cls, name, public(value))
        elif isinstance(value, (staticmethod, classmethod)):
            setattr(cls, name, type(value)(public(value.__func__)))
        elif isinstance(value, property):
            functions: list[Any] = [f and public(f) for f in (value.fget, value.fset, value.fdel)]
            get, put, delete = functions
            setattr(cls, name, property(get, put, delete, value.__doc__))
    return cls


def script_frame() -> tuple[types.FrameType | None, int]:
    """Return the script's frame that led here, or None, and its distance from the caller.

    Frames of bpsx and of frameworks are skipped. The distance is the number of frames between the
    caller of this function and the script's frame, or the outermost one without a script's.
    """
    level, frame = 0, sys._getframe(1)
    while _root(frame) in _NOT_THE_SCRIPTS:
        if frame.f_back is None:
            return None, level
        level, frame = level + 1, frame.f_back
    return frame, level


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the script's line."""
    warnings.warn(text, kind, stacklevel=script_frame()[1] + 1)


def _root(frame: types.FrameType) -> str:
    """The top-level package of the code in ``frame``."""
    if frame.f_code.co_filename == "<string>" and frame.f_code.co_name.startswith("bpsx_"):
        return "bpsx"  # TensorFlow generates this code to call bpsx's operations
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


def _frames(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _has_foreign(traceback: types.TracebackType | None) -> bool:
    """Whether it contains user code, such as a closure that an optimizer calls."""
    roots = {_root(entry.tb_frame) for entry in _frames(traceback)}
    return any(
        r != "bpsx" and r not in _FRAMEWORKS and r not in sys.stdlib_module_names for r in roots
    )


def _without_ours(traceback: types.TracebackType | None) -> types.TracebackType | None:
    if not _has_foreign(traceback):
        return None
    kept = None
    for entry in reversed([e for e in _frames(traceback) if _root(e.tb_frame) != "bpsx"]):
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that are shown with ``error``."""
    seen = {id(error)}
    while True:
        found = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if found is None or id(found) in seen:
            return
        seen.add(id(found))
        error = found
        yield error
