"""What compression keeps of gradients, as bytes for the checkpoints of frameworks."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from bpsx.errors import ConfigError

_VERSION = 1
#: The array that holds the rest, as JSON.
_REST = "rest"


def packed(saved: Mapping[str, Any]) -> bytes:
    """What :meth:`bpsx.compression.manager.Compressing.save` has given, as an archive of
    NumPy's.
    """
    arrays: dict[str, Any] = {}
    rest = {}
    for i, (name, state) in enumerate(saved.items()):
        arrays.update(
            {f"{i}.{key}": value for key, value in state.items() if isinstance(value, np.ndarray)}
        )
        rest[name] = {
            key: value for key, value in state.items() if not isinstance(value, np.ndarray)
        }
    text = json.dumps({"version": _VERSION, "names": rest}).encode()
    to = io.BytesIO()
    arrays[_REST] = np.frombuffer(text, np.uint8)
    np.savez(to, **arrays)
    return to.getvalue()


def unpacked(archive: bytes) -> dict[str, Any]:
    """What :func:`packed` has been given; of nothing, nothing.

    Raises :class:`ConfigError` for what is no such archive.
    """
    if not archive:
        return {}
    try:
        with np.load(io.BytesIO(archive)) as found:  # which reads no objects
            rest = json.loads(found[_REST].tobytes())
            if rest["version"] != _VERSION:
                raise ValueError(f"version {rest['version']!r}; {_VERSION} is known")
            saved = {name: dict(state) for name, state in rest["names"].items()}
            of = list(saved.values())
            for key in found.files:
                if key != _REST:
                    i, _, what = key.partition(".")
                    of[int(i)][what] = found[key]
    # whatever zip files, NumPy and JSON raise for what is none of theirs
    except Exception as e:
        raise ConfigError(f"state of compression: {len(archive)} bytes that are none: {e}") from e
    return saved
