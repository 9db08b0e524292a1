"""What MXNet's errors say."""

from __future__ import annotations

import re

#: Characters of what is told of it.
_LONGEST = 600


def in_short(text: str) -> str:
    """One's text on one line, without the addresses of MXNet's own functions that follow."""
    said = re.split(r"^\s*(?:Stack trace|\[bt\])", text, maxsplit=1, flags=re.MULTILINE)[0]
    line = " ".join(said.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " …"
