"""State of compression in the files in which gluon's Trainer saves an optimizer's states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bpsx.plugin.archive import packed, unpacked

#: A file of states ends in bpsx's archive, the archive's length in 8 bytes, and this mark. MXNet
#: does not read beyond its own part, which comes first.
_MARK = b"bpsx.mx1"


def append(path: str, state: Mapping[str, Any]) -> None:
    """Append the state of compression to a file that MXNet has written."""
    archive = packed(state)
    with open(path, "ab") as file:
        file.write(archive + len(archive).to_bytes(8, "little") + _MARK)


def read(path: str) -> dict[str, Any]:
    """Return the state that :func:`append` was given; empty if the file has none.

    Raises :class:`~bpsx.errors.ConfigError` for anything else.
    """
    content = Path(path).read_bytes()
    if not content.endswith(_MARK):
        return {}
    end = len(content) - len(_MARK) - 8
    length = int.from_bytes(content[end : end + 8], "little")
    return unpacked(content[end - length : end])
