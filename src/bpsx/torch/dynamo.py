"""Functions that ``torch.compile`` runs without compiling them.

A compiled model calls a process group's methods. PyTorch's own are in C++, which the compiler does
not see; it would treat ours as a part of the model and try to compile them.
``torch.compiler.disable`` has the same effect, but imports the whole compiler. That costs seconds
in scripts that do not use it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bpsx.system.tracebacks import CUT, public, shorten

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

# The functions behind torch.compiler.disable, by release. With a PyTorch that has neither, compiled
# models go without.
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
#: Sets the calling thread's compiler (None: no compiler) and returns the previous one. None: this
#: release has no such function.
set_compiler: Any = getattr(_frames, "set_eval_frame", None)


def _skip(code: types.CodeType) -> bool:
    """Tell the compiler to skip a function's code; return whether that was possible."""
    if hasattr(_frames, "set_code_exec_strategy"):
        _frames.set_code_exec_strategy(
            code,
            _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT),
        )
    elif hasattr(_frames, "skip_code"):
        _frames.skip_code(code)
    else:
        return False
    return True


def eager(function: _Function) -> _Function:
    """Wrap ``function`` so that nothing is compiled on this thread while it runs.

    Its errors show the caller's frames only.
    """

    def call(*args: Any, **more: Any) -> Any:
        before = set_compiler(None)
        try:
            return function(*args, **more)
        except CUT as error:
            shorten(error)
            raise
        finally:
            set_compiler(before)

    if set_compiler is None or not _skip(call.__code__):
        return public(function)
    call._torchdynamo_disable = call.cuts = True  # type: ignore[attr-defined]
    return functools.wraps(function)(call)  # type: ignore[return-value]


def eager_methods(cls: _Class) -> _Class:
    """Wrap all functions of ``cls`` in :func:`eager`, and return ``cls``."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType) and name != "__init__":
            setattr(cls, name, eager(value))
    return cls
