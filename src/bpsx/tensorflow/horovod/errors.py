"""Makes errors of eager exchanges bpsx's own, which users catch as HorovodInternalError."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from bpsx import errors
from bpsx.errors import BpsxError
from bpsx.session.refusals import counted_together
from bpsx.tensorflow.tracing import as_it_is

F = TypeVar("F", bound=Callable[..., Any])
#: An error of bpsx's in the text of one of TensorFlow's errors.
_TOLD = re.compile(r"\b([A-Z]\w*Error): (.*?)\s*(\[Op:\w+\].*)?", re.DOTALL)


#: Exception classes derived from both kinds: code for either kind catches them.
_both: dict[tuple[str, str], type[Exception]] = {}


def _class_of_both(ours: type[BpsxError], theirs: type[Exception]) -> type[Exception]:
    content = {"__module__": ours.__module__, "__str__": lambda self: str(self.args[0])}
    key = ours.__name__, theirs.__name__
    return _both.setdefault(key, type(ours.__name__, (ours, theirs), content))


def _translated(error: Any) -> Exception:
    """Return ``error``, one of TensorFlow's, as the bpsx error that its text reports as well."""
    at = _TOLD.search(error.message)
    told = _TOLD.fullmatch(error.message, at.start()) if at else None
    kind = getattr(errors, told[1], None) if told else None
    if told is None or not (isinstance(kind, type) and issubclass(kind, BpsxError)):
        return error  # type: ignore[no-any-return]
    made = _class_of_both(kind, type(error))(told[2])
    made.__dict__.update(error.__dict__)  # TensorFlow's own attributes: message, op and so on
    return made


def verb(function: F) -> F:
    """Decorate a verb: AutoGraph leaves it alone, and its errors are bpsx's and TensorFlow's.

    A refused call counts as well. Names on the wire begin with the verb's name, or with that of a
    group's members.
    """
    names = {f"{function.__name__}.", f"{function.__name__.removeprefix('grouped_')}."}
    counting = counted_together(*sorted(names))(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return counting(*args, **kwargs)
        except tf.errors.OpError as e:
            raise _translated(e) from None

    return as_it_is(called)  # type: ignore[return-value]
