"""Python objects from one worker to all, and from all to all.

Plain values travel in an encoding that runs nothing when it is read. Anything else is pickled, and unpickling runs what the sender wants: so
only in a job with a secret, and only bytes that carry the proof that somebody who knows it has made them.
"""

from __future__ import annotations

import hmac
import io
import json
import pickle
from typing import Any

import torch

from bpsx import _adapter
from bpsx._adapter import check_name, checked_root
from bpsx.errors import BpsxError
from bpsx.torch.broadcast import broadcast_bytes
from bpsx.torch.encoding import Encoder, StateError, decode, empty_for
from bpsx.torch.gather import RowGathering
from bpsx.torch.ops import plain_copy

_PURPOSE = "pickled object"
_PROOF_BYTES = 32
#: What a message is: its first byte.
_PLAIN, _PICKLED, _ERROR = b"v", b"p", b"e"


class _Calls:
    """Calls of each name in this job, which all workers count alike: what was proven for one call is of no use in another."""

    def __init__(self) -> None:
        self._job, self._counts = -1, dict[str, int]()

    def next(self, where: str) -> int:
        """The number of the call of ``where`` that begins now."""
        if self._job != _adapter.session().job:
            self._job, self._counts = _adapter.session().job, {}
        self._counts[where] = self._counts.get(where, 0) + 1
        return self._counts[where]


_calls = _Calls()


def _proof(where: str, call: int, sender: int, body: bytes) -> bytes | None:
    """That worker ``sender`` has made ``body`` for this call of this job; None without a secret."""
    return _adapter.proof(_PURPOSE, _adapter.session().job, where, call, sender, body)


class ObjectError(BpsxError, TypeError):
    """An object cannot travel: neither a plain value nor one that may be, or can be, pickled."""


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """What ``obj`` is on worker ``root_rank``, on every worker: the root gets its own ``obj`` back, the others a copy. Theirs is ignored.

    Plain values always travel: None, bool, int, float, complex, str, bytes, bytearray, NumPy arrays and scalars of numbers and text, dense CPU
    tensors (which arrive contiguous and without autograd), and tuples, lists, sets, dicts, OrderedDicts of these, exactly of these types. Anything
    else is pickled, if the job has a secret (``BPSX_SECRET``; ``bpsx-run --local`` and ``--hostfile`` make one), and unpickled only after it has
    been proven with that. Objects of any size and type may follow one another under one ``name``; calls of one name are matched in order.

    Raises :class:`ObjectError` on all workers if the root's object cannot travel; on a worker alone where it cannot be unpickled;
    :class:`~bpsx.errors.ConfigError` for a root that does not exist; and what :func:`bpsx.torch.synchronize` raises.
    """
    root = checked_root(root_rank, "broadcast_object", _adapter.session().size)
    where = _checked_name(name, "broadcast_object")
    if _adapter.session().size == 1:
        return obj
    is_root, call = _adapter.session().rank == root, _calls.next(where)
    message = broadcast_bytes(_pack(obj, "broadcast_object", where, call) if is_root else b"", root, where)
    copy = _unpack(message, "broadcast_object", where, call, root, ours=is_root)
    return obj if is_root else copy


def all_gather_object(obj: Any, name: str | None = None) -> list[Any]:
    """What ``obj`` is on each worker, by rank, on every worker; the own place holds ``obj`` itself.

    What can travel, and how, is as with :func:`broadcast_object`. Raises :class:`ObjectError` on all workers if an object of one of them cannot
    travel, and as :func:`broadcast_object` otherwise.
    """
    where = _checked_name(name, "all_gather_object")
    ours = _adapter.session()
    if ours.size == 1:
        return [obj]
    call = _calls.next(where)
    message = torch.frombuffer(bytearray(_pack(obj, "all_gather_object", where, call)), dtype=torch.uint8)
    parts, = RowGathering([message], where).wait()
    messages = [p.numpy().tobytes() for p in parts]
    for rank, each in enumerate(messages):
        if each[:1] == _ERROR:
            raise ObjectError(f"worker {rank}: {each[1:].decode(errors='replace')}")
    copies = [_unpack(m, "all_gather_object", where, call, rank, ours=rank == ours.rank) for rank, m in enumerate(messages)]
    return [obj if rank == ours.rank else copy for rank, copy in enumerate(copies)]


def _checked_name(name: Any, verb: str) -> str:
    check_name(name, verb)
    return f"{verb}.{name}" if name else verb


def _pack(obj: Any, verb: str, where: str, call: int) -> bytes:
    """A message for the others, who wait for one whatever happens here: if ``obj`` cannot travel, the reason does."""
    encoder = Encoder(verb, exact=True)
    try:
        text = json.dumps([encoder.encode(obj, "the object"), encoder.described]).encode()
        return _PLAIN + len(text).to_bytes(8, "little") + text + b"".join(_memory(t).tobytes() for t in encoder.tensors)
    except (BpsxError, RecursionError) as e:
        problem = str(e)
    try:
        if _adapter.proof(_PURPOSE) is None:
            return _ERROR + (f"{problem}. Other objects are pickled, which needs a job secret: set BPSX_SECRET on all processes, or start the "
                             "job with bpsx-run --local, which makes one").encode()
        body = pickle.dumps(obj)
        return _PICKLED + (_proof(where, call, _adapter.session().rank, body) or b"") + body
    except Exception as e:      # __reduce__ and its like may raise anything
        return _ERROR + f"{verb}: {type(obj).__name__} cannot be pickled: {type(e).__name__}: {e}".encode(errors="replace")


def _unpack(message: bytes, verb: str, where: str, call: int, sender: int, ours: bool) -> Any:
    """The object in a message. If it is this worker's own (``ours``) nothing is made of it. Raises :class:`ObjectError`."""
    kind, body = message[:1], message[1:]
    if kind == _ERROR:
        raise ObjectError(body.decode(errors="replace"))
    if ours:
        return None
    if kind == _PLAIN:
        return _decoded(body, verb, sender)
    proof, pickled = body[:_PROOF_BYTES], body[_PROOF_BYTES:]
    expected = _proof(where, call, sender, pickled)
    if kind != _PICKLED or expected is None or not hmac.compare_digest(proof, expected):
        raise ObjectError(f"{verb}: what has arrived from worker {sender} does not prove that it knows the job secret and was made for "
                          "this call; it has not been unpickled")
    try:
        return pickle.loads(pickled)
    except Exception as e:
        raise ObjectError(f"{verb}: worker {sender}'s object cannot be unpickled here: {type(e).__name__}: {e}") from e


def _memory(tensor: torch.Tensor) -> Any:
    """The tensor's elements as an array of bytes."""
    if tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.uint8, device="cpu").numpy()
    return plain_copy(tensor).cpu().reshape(-1).view(torch.uint8).numpy()


def _decoded(body: bytes, verb: str, sender: int) -> Any:
    try:
        stream = io.BytesIO(body)
        encoded, described = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        tensors = [empty_for(d) for d in described]
        for tensor in tensors:
            if tensor.numel():
                raw = stream.read(tensor.numel() * tensor.element_size())
                tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return decode(encoded, tensors)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, StateError, RecursionError) as e:
        raise ObjectError(f"{verb}: what has arrived from worker {sender} is no encoded object: {type(e).__name__}: {e}") from e
