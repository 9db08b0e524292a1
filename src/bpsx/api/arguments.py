"""Checks of the verbs' arguments: names, priorities, ranks, handles.

Every entry point uses these checks, so the rules are the same everywhere.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from bpsx.errors import ConfigError

#: Priorities travel as signed integers of 32 bits.
LEAST_URGENT, MOST_URGENT = -(2**31), 2**31 - 1


def as_integer(value: Any) -> int | None:
    """Return ``value`` as an int if it is an integer of any kind, including NumPy's.

    Returns None for other values and for a bool.
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
    """Raise :class:`ConfigError` unless ``value`` is True, False or an integer.

    Any other value, such as a misplaced name or the text "no", would count as true.
    """
    if not isinstance(value, int):
        raise ConfigError(f"{verb}: {argument} must be True or False, not {value!r}")


def check_priority(priority: Any, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``priority`` is an integer that fits on the wire."""
    number = as_integer(priority)
    if number is None or not LEAST_URGENT <= number <= MOST_URGENT:
        raise ConfigError(
            f"{verb}: priority={priority!r}: expected an integer from {LEAST_URGENT} to"
            f" {MOST_URGENT}"
        )


def checked_root(root_rank: Any, verb: str, size: int) -> int:
    """Return ``root_rank`` as an int.

    Raises :class:`ConfigError` unless it is a rank among ``size`` workers.
    """
    rank = as_integer(root_rank)
    if rank is None or not 0 <= rank < size:
        raise ConfigError(f"{verb}: root_rank={root_rank!r}: expected 0 to {size - 1}")
    return rank


def checked_passes(passes: Any, verb: str) -> int:
    """Return ``backward_passes_per_step`` as an int. Raises :class:`ConfigError`."""
    number = as_integer(passes)
    if number is None or number < 1:
        raise ConfigError(
            f"{verb}: backward_passes_per_step={passes!r}: expected an integer from 1"
        )
    return number


def check_unmasked(array: Any, what: str) -> None:
    """Raise :class:`ConfigError` for a NumPy array with masked elements.

    ``what`` names the array.
    """
    # The first look at np.ma imports it, which takes longer than a small push_pull.
    if type(array) is np.ndarray or not isinstance(array, np.ndarray):
        return
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        hidden = int(np.ma.getmaskarray(array).sum())
        raise ConfigError(
            f"{what}: {hidden} elements of a numpy.ma.MaskedArray are masked, and a mask cannot be"
            " sent. Give array.filled(0), or fill in another value. If you need to know how many"
            " workers have each element, also push_pull (~array.mask).astype('int32')"
        )


def check_handle(handle: Any, verb: str) -> None:
    """Raise :class:`ConfigError` unless ``handle`` has the methods of a handle."""
    if not (hasattr(handle, "done") and hasattr(handle, "wait")):
        raise ConfigError(
            f"{verb}: expected a handle, as the _async verbs return it, not {type(handle).__name__}"
        )
