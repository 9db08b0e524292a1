"""Compression state of gradients as bytes, for the frameworks' checkpoints."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from bpsx.errors import ConfigError

_VERSION = 1
#: Name of the array that holds everything but arrays, as JSON.
_REST = "rest"


def packed(saved: Mapping[str, Any]) -> bytes:
    """Pack the result of :meth:`bpsx.compression.manager.Compressing.save` as a NumPy archive."""
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
    """Return the state that :func:`packed` was given; for no bytes, an empty state.

    Raises :class:`ConfigError` for bytes that are no such archive.
    """
    if not archive:
        return {}
    try:
        with np.load(io.BytesIO(archive)) as found:  # does not unpickle objects
            rest = json.loads(found[_REST].tobytes())
            if rest["version"] != _VERSION:
                raise ValueError(
                    f"it has version {rest['version']!r}; this bpsx reads version {_VERSION}"
                )
            saved = {name: dict(state) for name, state in rest["names"].items()}
            of = list(saved.values())
            for key in found.files:
                if key != _REST:
                    i, _, what = key.partition(".")
                    of[int(i)][what] = found[key]
    # zipfile, NumPy and JSON raise many types for malformed bytes
    except Exception as e:
        raise ConfigError(
            f"the compression state of {len(archive)} bytes cannot be read: {e}"
        ) from e
    return saved
