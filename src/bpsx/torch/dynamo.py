"""Code of ours that ``torch.compile`` shall run as it is.

A compiled model calls a process group's methods from inside. PyTorch's own are C++, which the
compiler does not see; ours it would take for a part of the model and try to compile.
``torch.compiler.disable`` says so, too, but imports the whole compiler, seconds for scripts that do
not use it.
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

# What torch.compiler.disable is made of, by release. In a PyTorch that has other things, compiled
# models have to live without.
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
#: Gives the calling thread another compiler, or None, and returns the one it had. None: this
#: release has no such function.
set_compiler: Any = getattr(_frames, "set_eval_frame", None)


def _skip(code: types.CodeType) -> bool:
    """Tell the compiler to leave a function's code alone; whether there was a way."""
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
    """``function``, during which nothing is compiled on this thread; its errors show the caller's
    frames only.
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
    """``cls`` with all its functions made :func:`eager`."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType) and name != "__init__":
            setattr(cls, name, eager(value))
    return cls
