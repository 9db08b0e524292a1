"""Sends Python objects from one worker to all, and from all to all.

Plain values travel in an encoding whose decoding runs no code. Other objects are pickled, and
unpickling runs whatever code the sender wants. So pickling needs a job secret, and a worker
unpickles only bytes with a proof that a process that knows the secret made them.
"""

from __future__ import annotations

import hmac
import io
import json
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bpsx.errors import BpsxError
from bpsx.plugin import adapter
from bpsx.plugin.adapter import Handle, TensorView, check_name, checked_root, padded_length
from bpsx.plugin.encoding import Encoder, decode

_PURPOSE = "pickled object"
_CALL_BITS = 48
_PROOF_BYTES = 32
#: Kinds of messages: the first byte.
_PLAIN, _PICKLED, _ERROR = b"v", b"p", b"e"


class ObjectError(BpsxError, TypeError):
    """An object cannot be sent: it is no plain value, and may not or cannot be pickled."""


class Tensors(NamedTuple):
    """Converts a framework's tensors to bytes and back.

    ``taken(value, what)`` returns a tensor's dtype, shape and bytes, and None for other values. It
    raises :class:`~bpsx.errors.BpsxError` for a tensor that cannot be sent, which ``what`` names.
    ``made(dtype, shape, raw)`` returns the tensor, and raises whatever fits for a wrong message.
    """

    taken: Callable[[Any, str], tuple[str, list[int], bytes] | None]
    made: Callable[[str, list[int], bytes], Any]


class _Calls:
    """Counts the calls of each name in this job; all workers count alike.

    All begin anew when workers enter. The number is part of the proof, so the proof of one call is
    useless in another.
    """

    def __init__(self) -> None:
        self._since, self._counts = (-1, 0), dict[str, int]()

    def next(self, where: str) -> int:
        """Return the number of the call of ``where`` that begins now."""
        since = adapter.session().job, adapter.session().entries
        if self._since != since:
            self._since, self._counts = since, {}
        self._counts[where] = self._counts.get(where, 0) + 1
        return since[1] << _CALL_BITS | self._counts[where]


_calls = _Calls()


def _proof(where: str, call: int, sender: int, body: bytes) -> bytes | None:
    """Proof that worker ``sender`` made ``body`` for this call; None if the job has no secret."""
    return adapter.proof(_PURPOSE, adapter.session().job, where, call, sender, body)


def broadcast_object(obj: Any, root_rank: int, name: str | None, tensors: Tensors) -> Any:
    """Return worker ``root_rank``'s ``obj``: the object itself on the root, a copy elsewhere.

    Raises :class:`ObjectError` on all workers if the root's object cannot be sent, and on a single
    worker that cannot unpickle it; :class:`~bpsx.errors.ConfigError` for a root that does not
    exist.
    """
    verb = "broadcast_object"
    root = checked_root(root_rank, verb, adapter.session().size)
    where = _checked_name(name, verb)
    if adapter.session().size == 1:
        return obj
    is_root, call = adapter.session().rank == root, _calls.next(where)
    own = _pack(obj, verb, where, call, tensors) if is_root else b""
    copy = _unpack(broadcast_bytes(own, root, where), verb, where, call, root, is_root, tensors)
    return obj if is_root else copy


def all_gather_object(obj: Any, name: str | None, tensors: Tensors, verb: str) -> list[Any]:
    """Return the ``obj`` of each worker, by rank; this worker's entry is ``obj`` itself.

    Raises :class:`ObjectError` on all workers if an object of one of them cannot be sent.
    """
    where = _checked_name(name, verb)
    ours = adapter.session()
    if ours.size == 1:
        return [obj]
    call = _calls.next(where)
    messages = gather_bytes(_pack(obj, verb, where, call, tensors), where)
    for rank, each in enumerate(messages):
        if each[:1] == _ERROR:
            raise ObjectError(f"worker {rank}: {each[1:].decode(errors='replace')}")
    copies = [
        _unpack(message, verb, where, call, rank, rank == ours.rank, tensors)
        for rank, message in enumerate(messages)
    ]
    return [obj if rank == ours.rank else copy for rank, copy in enumerate(copies)]


def _checked_name(name: Any, verb: str) -> str:
    check_name(name, verb)
    return f"{verb}.{name}" if name else verb


def _pack(obj: Any, verb: str, where: str, call: int, tensors: Tensors) -> bytes:
    """Return a message with ``obj``, or with the reason why ``obj`` cannot be sent.

    The other workers wait for a message in any case.
    """
    try:
        return _PLAIN + _encoded(obj, verb, tensors)
    except (BpsxError, RecursionError) as e:
        problem = str(e)
    try:
        if adapter.proof(_PURPOSE) is None:
            return (
                _ERROR
                + (
                    f"{problem}. Other objects are pickled, which needs a job secret: set "
                    "BPSX_SECRET on all processes, or start the job with bpsx-run "
                    "--local, which makes one"
                ).encode()
            )
        body = pickle.dumps(obj)
        return _PICKLED + (_proof(where, call, adapter.session().rank, body) or b"") + body
    except Exception as e:  # methods such as __reduce__ may raise anything
        kind = type(obj).__name__
        text = f"{verb}: {kind} cannot be pickled: {type(e).__name__}: {e}"
        return _ERROR + text.encode(errors="replace")


def _unpack(
    message: bytes, verb: str, where: str, call: int, sender: int, ours: bool, tensors: Tensors
) -> Any:
    """Return the object in a message, or None if the message is this worker's own (``ours``).

    Raises :class:`ObjectError`.
    """
    kind, body = message[:1], message[1:]
    if kind == _ERROR:
        raise ObjectError(body.decode(errors="replace"))
    if ours:
        return None
    if kind == _PLAIN:
        try:
            return _decoded(body, tensors)
        except (ValueError, KeyError, IndexError, TypeError, RuntimeError, RecursionError) as e:
            raise ObjectError(
                f"{verb}: the bytes from worker {sender} are not an encoded object: "
                f"{type(e).__name__}: {e}"
            ) from e
    proof, pickled = body[:_PROOF_BYTES], body[_PROOF_BYTES:]
    expected = _proof(where, call, sender, pickled)
    if kind != _PICKLED or expected is None or not hmac.compare_digest(proof, expected):
        raise ObjectError(
            f"{verb}: the object from worker {sender} is not unpickled, because it has no proof "
            "that its sender knows the job secret and made it for this call"
        )
    try:
        return pickle.loads(pickled)
    except Exception as e:
        raise ObjectError(
            f"{verb}: worker {sender}'s object cannot be unpickled here: {type(e).__name__}: {e}"
        ) from e


class _Encoder(Encoder):
    """Encodes tensors as dtype, shape, and the place of their bytes among the blobs."""

    def __init__(self, verb: str, tensors: Tensors) -> None:
        super().__init__(verb, exact=True)
        self._taken = tensors.taken

    def _tensor(self, value: Any, where: str) -> list[Any] | None:
        taken = self._taken(value, f"{self._verb}: {where}")
        return None if taken is None else [*taken[:2], self._put_aside(taken[2], where)]


def _encoded(obj: Any, verb: str, tensors: Tensors) -> bytes:
    """Encode as a text's length, the text (JSON: the value, and each blob's length), the blobs."""
    encoder = _Encoder(verb, tensors)
    text = json.dumps([encoder.encode(obj, "the object"), list(map(len, encoder.blobs))]).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(encoder.blobs)


def _decoded(body: bytes, tensors: Tensors) -> Any:
    stream = io.BytesIO(body)
    encoded, lengths = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    blobs = [stream.read(length) for length in lengths]
    return decode(
        encoded, blobs.__getitem__, lambda told: tensors.made(told[0], told[1], blobs[told[2]])
    )


# ---- bytes of any length


def _begun(array: np.ndarray, name: str, root: int) -> Handle:
    """Begin a broadcast of ``array``, contiguous, of uint8 or int64, in place."""
    view = TensorView(array.ctypes.data, array.nbytes, array.dtype.name, array.shape, array)
    return adapter.session().broadcast(name, view, root)


def _room(length: int, text: bytes) -> np.ndarray:
    """Return an array for ``length`` bytes that begins with ``text``; few sizes are used."""
    body = np.zeros(padded_length(length), np.uint8)
    body[: len(text)] = np.frombuffer(text, np.uint8)
    return body


def broadcast_bytes(text: bytes, root: int, name: str) -> bytes:
    """Return the root's ``text``, of any length, on all workers; its length travels first."""
    own = adapter.session().rank == root
    length = np.array([len(text)], np.int64)
    _begun(length, f"{name}.length", root).wait()
    body = _room(int(length[0]), text if own else b"")
    if len(body):
        _begun(body, f"{name}.structure", root).wait()
    return body[: length[0]].tobytes()


def gather_bytes(text: bytes, name: str) -> list[bytes]:
    """Return all workers' ``text``, of any length, by rank.

    The lengths travel first, then the texts, in each case of all workers at once.
    """
    ours = adapter.session()
    ours.require_all("gathering objects")
    lengths = [np.array([len(text)], np.int64) for _ in range(ours.size)]
    for handle in [_begun(n, f"{name}.length.{root}", root) for root, n in enumerate(lengths)]:
        handle.wait()
    bodies = [
        _room(int(length[0]), text if root == ours.rank else b"")
        for root, length in enumerate(lengths)
    ]
    begun = [_begun(body, f"{name}.{root}", root) for root, body in enumerate(bodies) if len(body)]
    for handle in begun:
        handle.wait()
    return [body[: n[0]].tobytes() for body, n in zip(bodies, lengths, strict=True)]
