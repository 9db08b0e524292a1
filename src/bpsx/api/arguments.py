"""What verbs are called with: names, priorities, ranks, handles.

Every way in has them checked here, so the rules are the same everywhere.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from bpsx.errors import ConfigError

#: Priorities travel as signed integers of 32 bits.
LEAST_URGENT, MOST_URGENT = -(2**31), 2**31 - 1


def integer(value: Any) -> int | None:
    """``value`` as an int, if it is an integer of any kind, as of NumPy; None if it is none, or a
    bool.
    """
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_name(name: Any, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``name`` is None or a string that is not empty."""
    if name is not None and not (isinstance(name, str) and name):
        given = "an empty one" if name == "" else type(name).__name__
        raise ConfigError(
            f"{verb}: name must be a string, not {given}; leave it out, or give None, to call"
            " without a name"
        )


def check_flag(value: Any, argument: str, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``value`` is True or False, or an integer that stands for
    one.

    Anything else, a name that has got into its place or a text that says no, would be a yes.
    """
    if not isinstance(value, int):
        raise ConfigError(f"{verb}: {argument} must be True or False, not {value!r}")


def check_priority(priority: Any, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``priority`` is an integer that fits on the wire."""
    number = integer(priority)
    if number is None or not LEAST_URGENT <= number <= MOST_URGENT:
        raise ConfigError(
            f"{verb}: priority={priority!r}: allowed are integers from {LEAST_URGENT} to"
            f" {MOST_URGENT}"
        )


def checked_root(root_rank: Any, verb: str, size: int) -> int:
    """``root_rank`` as an int.

    Raises :class:`ConfigError` unless there is such a rank among ``size`` workers.
    """
    rank = integer(root_rank)
    if rank is None or not 0 <= rank < size:
        raise ConfigError(f"{verb}: root_rank={root_rank!r}: allowed are 0 to {size - 1}")
    return rank


def checked_passes(passes: Any, verb: str) -> int:
    """``backward_passes_per_step`` as an int. Raises :class:`ConfigError`."""
    number = integer(passes)
    if number is None or number < 1:
        raise ConfigError(
            f"{verb}: backward_passes_per_step={passes!r}: allowed are integers from 1"
        )
    return number


def check_unmasked(array: Any, what: str) -> None:
    """Raise :class:`ConfigError` for a NumPy array that hides some of its elements.

    ``what`` names it.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        hidden = int(np.ma.getmaskarray(array).sum())
        raise ConfigError(
            f"{what}: {hidden} elements of a numpy.ma.MaskedArray are masked, and a mask cannot be"
            " sent: give array.filled(0), or another value for them; where it matters how many"
            " workers have an element, push_pull (~array.mask).astype('int32'), too"
        )


def check_handle(handle: Any, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``handle`` can be asked and waited for, as what the
    ``_async`` verbs return.
    """
    if not (hasattr(handle, "done") and hasattr(handle, "wait")):
        raise ConfigError(
            f"{verb}: a handle is needed, as the _async verbs return it, not"
            f" {type(handle).__name__}"
        )
