"""Compression state kept between rounds: saved and restored for checkpoints and suspend().

Each worker has its own residual, momentum and counters. The servers have residuals and counters of
their own, which worker 0, or the first that lives, fetches and sets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from bpsx._core import Core
from bpsx.core._handle import Handle, Request
from bpsx.core._tensor import Tensor
from bpsx.errors import BpsxError, ConfigError

log = logging.getLogger("bpsx.compression.spec")
#: Saved state of a name: ``rank`` (of the worker that saved it), ``dtype``, ``nbytes``, ``codec``
#: (Compression.text()), ``lengths`` (its partitions' bytes), ``worker`` and ``server`` (uint8
#: arrays, partition by partition as in core/codec/state.pxd), ``momentum`` (an array, for tensors
#: that have no encoder to add it). A tensor that is exchanged as factors has ``shape`` (rows and
#: columns) and ``worker`` (as in core/codec/low_rank.pxd), and neither ``lengths`` nor ``server``.
#: Absent state has no key.
Saved = dict[str, Any]
_TYPES = {
    "rank": int,
    "dtype": str,
    "nbytes": int,
    "codec": str,
    "lengths": list,
    "shape": list,
    "worker": np.ndarray,
    "server": np.ndarray,
    "momentum": np.ndarray,
}
_WAIT = 0.01


def check_saved(name: str, saved: Any) -> Saved:
    """Return ``saved`` as a dict if its keys and types are those of :func:`take`.

    Raises :class:`~bpsx.errors.ConfigError` otherwise.
    """
    if not isinstance(saved, Mapping):
        raise ConfigError(
            f"state of compression of {name!r}: expected a mapping, not {type(saved).__name__}"
        )
    for key, value in saved.items():
        if key not in _TYPES or not isinstance(value, _TYPES[key]):
            raise ConfigError(
                f"state of compression of {name!r}: {key!r} is a {type(value).__name__}; expected"
                f" {', '.join(f'{k} ({t.__name__})' for k, t in _TYPES.items())}"
            )
    return dict(saved)


def until_idle(core: Core, tensor: Tensor, seconds: float) -> None:
    """Wait until no push_pull of a tensor is under way.

    Raises :class:`~bpsx.errors.BpsxError` if one still is after ``seconds``.
    """
    end = time.monotonic() + seconds
    while tensor.busy and not core.failed:
        if time.monotonic() >= end:
            raise BpsxError(
                f"cannot access the compression state of {tensor.name!r}: a push_pull of it has"
                f" been under way for more than {seconds:g} s"
            )
        core.wait_for_progress(_WAIT)


def take(core: Core, tensors: Collection[Tensor], with_servers: bool) -> dict[str, Saved]:
    """Return the state of compressed tensors of which no push_pull is under way.

    If the servers cannot be asked any more, logs a warning and leaves out their part.
    """
    found: dict[str, Saved] = {
        tensor.name: {"worker": np.frombuffer(b"".join(tensor.state()), np.uint8)}
        for tensor in tensors
    }
    held = [tensor for tensor in tensors if tensor.server_bytes] if with_servers else []
    asked = [ask(core, tensor, None) for tensor in held]
    try:
        for handle in asked:
            found[handle.name]["server"] = handle.wait()
    except BpsxError as e:
        log.warning(
            "the servers' part of the compression state is missing in what was saved: %s", e
        )
    return found


def ask(core: Core, tensor: Tensor, saved: np.ndarray | None) -> Handle:
    """Ask the servers for their state of a tensor, after replacing it with ``saved`` if given.

    The handle's result is a uint8 array.
    """
    answer = np.empty(tensor.server_bytes, np.uint8)
    source = None if saved is None else (saved.ctypes.data, saved.nbytes)
    request = Request(
        tensor.name,
        source,
        (answer.ctypes.data, answer.nbytes),
        is_codec_state=True,
        owner=(saved, answer),
        result=answer,
    )
    handle = core.prepare(request, answer.nbytes)
    core.release(handle, tensor)
    return handle


def clear(core: Core, tensor: Tensor, with_servers: bool) -> Handle | None:
    """Reset the state of a tensor of which no push_pull is under way."""
    tensor.state([bytes(len(part)) for part in tensor.state()])
    if not (with_servers and tensor.server_bytes):
        return None
    return ask(core, tensor, np.zeros(tensor.server_bytes, np.uint8))


def put(core: Core, tensor: Tensor, saved: Saved, own: bool) -> Handle | None:
    """Restore a state from :func:`take`, for a tensor of which no push_pull is under way.

    If servers need the state, they get it before the next push.

    ``own``: this worker saved the state; of another worker's state only what all workers have in
    common is used.
    Raises :class:`ValueError` if the state belongs to another tensor.
    """
    now, begin, common = [], 0, tensor.common_bytes
    for part in tensor.state():
        given = saved["worker"][begin : begin + len(part)].tobytes()
        now.append(
            given if own or len(given) < len(part) else given[:common] + bytes(len(part) - common)
        )
        begin += len(part)
    server = saved.get("server") if own else None
    if begin != saved["worker"].size or server is not None and server.size != tensor.server_bytes:
        raise ValueError(f"the state has {saved['worker'].size} bytes, this tensor needs {begin}")
    tensor.state(now)
    return None if server is None else ask(core, tensor, np.ascontiguousarray(server))
