"""Broadcast and all_gather of Python objects: :mod:`bpsx.plugin.objects` with tensors."""

from __future__ import annotations

from typing import Any

import torch

from bpsx.plugin import objects
from bpsx.plugin.objects import ObjectError
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import public
from bpsx.torch.serialization import empty_for
from bpsx.torch.tensors import check_tensor, dtype_name, plain_copy

__all__ = ["ObjectError", "all_gather_object", "broadcast_object"]


@public
@counted("broadcast_object", "broadcast_object.{}", several=True)
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return worker ``root_rank``'s ``obj`` on every worker.

    The root gets its own ``obj`` back, the others a copy; their ``obj`` is ignored.

    Plain values can always travel: None, bool, int, float, complex, str, bytes, bytearray, NumPy
    arrays and scalars of numbers and text, dense CPU tensors (which arrive contiguous and without
    autograd), and tuples, lists, sets, dicts and OrderedDicts of these, of exactly these types.
    Other objects are pickled if the job has a secret (``BPSX_SECRET``; ``bpsx-run --local`` and
    ``--hostfile`` make one). They are unpickled only after they have been authenticated with that
    secret. Objects of any size and type may follow one another under one ``name``; calls of one
    name are matched in order.

    Raises :class:`ObjectError` on all workers if the root's object cannot travel, and on one worker
    if it cannot be unpickled there; :class:`~bpsx.errors.ConfigError` for a root that does not
    exist; and as :func:`bpsx.torch.synchronize`.
    """
    return objects.broadcast_object(obj, root_rank, name, _TENSORS)


@public
@counted("all_gather_object", "all_gather_object.{}", several=True)
def all_gather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the workers' ``obj``, by rank, on every worker; this worker's entry is ``obj`` itself.

    Which objects can travel, and how, is as with :func:`broadcast_object`. Raises
    :class:`ObjectError` on all workers if an object of one of them cannot travel; otherwise as
    :func:`broadcast_object`.
    """
    return objects.all_gather_object(obj, name, _TENSORS, "all_gather_object")


def _taken(value: Any, what: str) -> tuple[str, list[int], bytes] | None:
    if type(value) is not torch.Tensor:
        return None
    check_tensor(value, what)
    flat = plain_copy(value).cpu().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    return dtype_name(value), list(value.shape), raw


def _made(dtype: str, shape: list[int], raw: bytes) -> torch.Tensor:
    empty = empty_for(dtype, shape)
    return torch.frombuffer(bytearray(raw), dtype=empty.dtype).reshape(shape) if raw else empty


_TENSORS = objects.Tensors(_taken, _made)
