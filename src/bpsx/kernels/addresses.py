"""Addresses of one element type's summation kernels."""

from __future__ import annotations

from typing import NamedTuple


class Kernels(NamedTuple):
    """Addresses of one element type's kernels, and the objects that keep them alive.

    An address of 0 means that the type does not need that kernel.
    """

    itemsize: int
    wide_itemsize: int
    pair: int
    add: int
    start: int
    finish: int
    divide: int
    owners: tuple[object, ...]
