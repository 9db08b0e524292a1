"""The names that workers have declared, as one of them tells a worker that joins the job.

A name that has been declared with several shapes, or after an error, has several generations. All
workers have to go on with the same ones. Pure.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Name, shape, dtype code and text of the compression.
Signature = tuple[str, tuple[int, ...], int, str]


class ToldNames(NamedTuple):
    """The declared names, for a newcomer.

    ``current``: generation with which each signature goes on. ``following``: of each name's next
    declaration. ``renewed``: refusals by the pattern of their names.
    """

    current: dict[Signature, int]
    following: dict[str, int]
    renewed: Counter[tuple[str, str]]


def packed(
    current: Mapping[Signature, int],
    following: Mapping[str, int],
    renewed: Mapping[tuple[str, str], int],
) -> str:
    """Return the names as text for a message; :func:`parse` reads it."""
    said = [
        [[*signature, generation] for signature, generation in current.items()],
        list(following.items()),
        [[*pattern, count] for pattern, count in renewed.items()],
    ]
    return base64.b85encode(zlib.compress(json.dumps(said).encode())).decode()


def parse(text: str) -> ToldNames:
    """Return what :func:`packed` has written; nothing for an empty text."""
    if not text:
        return ToldNames({}, {}, Counter())
    said: list[Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    current, following, renewed = said
    return ToldNames(
        {(name, tuple(shape), dtype, codec): n for name, shape, dtype, codec, n in current},
        dict(following),
        Counter({(kind, name): count for kind, name, count in renewed}),
    )
