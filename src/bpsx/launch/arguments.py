"""Command line arguments of back ends: types for argparse, and those that are given."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {low}..{high}")
        return value

    return parse


def seconds(text: str) -> float:
    """Parse a finite number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds, 0 or more")
    return value


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of ``names`` that the command line has, with their values."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}
