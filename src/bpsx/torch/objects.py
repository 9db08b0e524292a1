"""Broadcast and all_gather of Python objects: :mod:`bpsx.plugin.objects` with tensors."""

from __future__ import annotations

import io
import json
from typing import Any

import torch

from bpsx.plugin import objects
from bpsx.plugin.objects import ObjectError
from bpsx.session.refusals import counted
from bpsx.system.tracebacks import public
from bpsx.torch.serialization import Encoder, decode, empty_for
from bpsx.torch.tensors import plain_copy

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
    return objects.broadcast_object(obj, root_rank, name, _CODEC)


@public
@counted("all_gather_object", "all_gather_object.{}", several=True)
def all_gather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the workers' ``obj``, by rank, on every worker; this worker's entry is ``obj`` itself.

    Which objects can travel, and how, is as with :func:`broadcast_object`. Raises
    :class:`ObjectError` on all workers if an object of one of them cannot travel; otherwise as
    :func:`broadcast_object`.
    """
    return objects.all_gather_object(obj, name, _CODEC, "all_gather_object")


def _encoded(obj: Any, verb: str) -> bytes:
    encoder = Encoder(verb, exact=True)
    text = json.dumps([encoder.encode(obj, "the object"), encoder.described]).encode()
    return (
        len(text).to_bytes(8, "little")
        + text
        + b"".join(_memory(t).tobytes() for t in encoder.tensors)
    )


def _memory(tensor: torch.Tensor) -> Any:
    """Return the tensor's elements as an array of bytes."""
    if tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.uint8, device="cpu").numpy()
    return plain_copy(tensor).cpu().reshape(-1).view(torch.uint8).numpy()


def _decoded(body: bytes) -> Any:
    stream = io.BytesIO(body)
    encoded, described = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    tensors = [empty_for(d) for d in described]
    for tensor in tensors:
        if tensor.numel():
            raw = stream.read(tensor.numel() * tensor.element_size())
            tensor.reshape(-1).view(torch.uint8).copy_(
                torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            )
    return decode(encoded, tensors)


_CODEC = objects.Codec(_encoded, _decoded)
