"""Parsers of option values: each converts text to a value or raises :class:`ValueError`.

Pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

#: Value with which bpsx chooses.
AUTO = "auto"
#: Allowed values of :func:`flag`, for messages.
FLAG = "0 or 1 (also no, false, off, yes, true, on)"


def integer(low: int, high: int = 2**62) -> Callable[[str], int]:
    """Parser of a whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def zero_or(low: int, high: int) -> Callable[[str], int]:
    """Parser of 0, or a whole number from ``low`` to ``high``."""
    return lambda text: 0 if int(text) == 0 else integer(low, high)(text)


def number(low: float) -> Callable[[str], float]:
    """Parser of a finite number of at least ``low``."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value < float("inf"):
            raise ValueError
        return value

    return parse


def choice(*values: str) -> Callable[[str], str]:
    """Parser of one of ``values``, in lower or upper case."""

    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError
        return text.lower()

    return parse


def word(most: int) -> Callable[[str], str]:
    """Parser of at most ``most`` letters, digits, _ and -; the result is in lower case."""

    def parse(text: str) -> str:
        if len(text) > most or not re.fullmatch(r"[a-z0-9_-]+", text.lower()):
            raise ValueError
        return text.lower()

    return parse


def auto_or(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Parser of "auto", or of what ``parse`` accepts."""
    return lambda text: AUTO if text.lower() == AUTO else parse(text)


def flag(text: str) -> bool:
    """Parse a flag as :data:`FLAG` says; empty text is false."""
    known = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
        "": False,
    }
    try:
        return known[text.strip().lower()]
    except KeyError:
        raise ValueError from None


def modules(text: str) -> str:
    """Parse names of Python modules, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError
    return ",".join(names)


def ranks(text: str) -> tuple[int, ...] | None:
    """Parse distinct numbers from 0, separated by commas; None if there are none."""
    found = tuple(integer(0, 65534)(part.strip()) for part in text.split(",") if part.strip())
    if len(set(found)) != len(found):
        raise ValueError
    return found or None


def host_port(text: str) -> tuple[str, int]:
    """Parse ``port`` or ``host:port``, an IPv6 host in brackets; loopback without a host."""
    host, _, port = text.rpartition(":")
    if (
        not port.isascii()
        or not port.isdigit()
        or int(port) > 65535
        or (":" in host and not host.startswith("["))
    ):
        raise ValueError
    return host.strip("[]") or "127.0.0.1", int(port)


def port_range(text: str) -> range:
    """Parse ``LOW-HIGH``, or one port."""
    low, dash, high = text.strip().partition("-")
    first, last = int(low), int(high) if dash else int(low)
    if not 1 <= first <= last <= 65535:
        raise ValueError
    return range(first, last + 1)


def cpu_list(text: str) -> frozenset[int]:
    """Parse logical CPUs as the kernel writes them: ``0-3,8``. Raises :class:`ValueError`."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        first, last = int(low), int(high) if dash else int(low)
        if not 0 <= first <= last < 65536:
            raise ValueError
        found.update(range(first, last + 1))
    return frozenset(found)


def cpu_lists(text: str) -> str:
    """Check that ``text`` is lists of CPUs separated by colons; returns it unchanged."""
    for part in text.split(":") if text else ():
        cpu_list(part)
    return text


def blacklist(text: str) -> str:
    """Check that ``text`` is -1 or a list of CPUs; returns it unchanged."""
    if text != "-1":
        cpu_list(text)
    return text


def folder(text: str) -> str:
    """Expand ``~`` to the home folder, also where no shell has, as in a file of variables.

    Raises :class:`ValueError` if the home folder is unknown.
    """
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(
            "the user has no home folder (HOME is not set, and passwd has no entry), or does not"
            " exist; write the path without ~"
        )
    return path
