"""Texts of MXNet's errors."""

from __future__ import annotations

import re

#: Maximum length of a shortened text, in characters.
_LONGEST = 600


def in_short(text: str) -> str:
    """Return an error's text on one line, without the stack trace of MXNet's functions."""
    said = re.split(r"^\s*(?:Stack trace|\[bt\])", text, maxsplit=1, flags=re.MULTILINE)[0]
    line = " ".join(said.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " …"
