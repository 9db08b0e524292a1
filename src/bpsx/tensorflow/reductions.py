"""Names of reductions: BytePS's ``op`` and its older ``average``."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from bpsx.errors import ConfigError


class ReduceOps(StrEnum):
    """BytePS's names of reductions. Equal to the strings that are their values."""

    Average = "Average"
    Sum = "Sum"
    Adasum = "Adasum"


Average, Sum, Adasum = ReduceOps.Average, ReduceOps.Sum, ReduceOps.Adasum


def averages(op: Any, average: Any, verb: str) -> bool:
    """Return whether ``op`` or ``average`` asks for an average, which is the default.

    Raises :class:`ConfigError` for both at once, for Adasum, which BytePS took for a plain sum, and
    for other values.
    """
    if average is not None:
        if op is not None:
            raise ConfigError(
                f"{verb}: op={op!r} and average={average!r} exclude each other; give only one of"
                " them"
            )
        if not isinstance(average, bool):
            raise ConfigError(f"{verb}: average={average!r}: expected True, False or None")
        return average
    if op is None:
        return True
    if op == ReduceOps.Adasum:
        raise ConfigError(f"{verb}: op=Adasum is not supported; expected Average or Sum")
    if op not in (ReduceOps.Average, ReduceOps.Sum):
        raise ConfigError(f"{verb}: op={op!r}: expected Average or Sum")
    return bool(op == ReduceOps.Average)


def handle_average_backwards_compatibility(op: Any, average: Any) -> ReduceOps:
    """Return the reduction that ``op`` and the older ``average`` ask for together.

    Raises :class:`ConfigError` as :func:`push_pull` does.
    """
    return (
        ReduceOps.Average
        if averages(op, average, "handle_average_backwards_compatibility")
        else ReduceOps.Sum
    )
