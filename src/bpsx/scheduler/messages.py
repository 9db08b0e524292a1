"""The control link's messages: JSON objects with a type, checked field by field. Pure.

A node sends HELLO (or CANNOT instead), RATE, DECLARE, WAITING, HEARD, DOUBT, JOIN, CLEARED, MOVED,
CONNECTED, BROKEN, DEPART, AT, HERE, READY, SYNCED, PEAK, COUNTS, TAKEN, BYE. The hub sends STATUS,
WELCOME, REFUSED, PLACED, FAILED, RESET, WARN, JOINED, CLEAR, ADOPT, ALL_JOINED, UNJOINED, TERM,
LANES, GONE, STAY, SOON, MEET, OFF, COUNT, CHANGE, HOLD, DROP, LEFT, LOST, END, GOODBYE. To a
scheduler that was started again, a node sends AGAIN, KNOWN and ENDED, and gets RESUMED:
docs/internals/elastic-scheduler.md.

For observers, a node sends CLOCK, STATS, TRACED and an observer sends OBSERVE; the hub sends CLOCK,
WATCH, TRACE, and VIEW to the observer.

TERM goes to all live workers and servers when a server is lost and the job goes on: ``term``, its
number, from 1; ``moves``, ``[lost lane, [[target lane, first slot], ...]]`` for each lane of the
lost server (:data:`bpsx.planning.placement.Moves`); ``text``, which server was lost, why, and where
its keys go; ``missed``, whether a sender had left before, so that no lane can take keys. Or it
goes to them when living lanes yield keys: ``yields`` then has ``[lane, number of slots, targets]``
for each such lane (:data:`bpsx.planning.placement.Yields`). Each worker that speaks to servers
answers MOVED once its driver has moved.

BROKEN names a server that others reach, but this worker no longer: docs/internals/elastic.md.

LANES, CONNECTED and GONE are about servers that join a running job, DEPART and STAY about nodes
that leave it. docs/internals/elastic-servers.md, elastic-departures.md and
elastic-departures-workers.md have their fields. AT, HERE, READY, SYNCED, SOON, MEET and OFF are
about workers that join: docs/internals/elastic-joins.md. PEAK, COUNT, COUNTS, CHANGE, TAKEN, HOLD
and DROP change the size of partitions: docs/internals/retuning.md.

The places in PLACED and ADOPT are those that were given out first, in any term. Workers apply the
moves of all terms themselves, also to tensors that they declare later.
"""

from __future__ import annotations

import json
from typing import Any

PROTOCOL = 17
MAX_BYTES = 64 << 20  # enough for the places of a tensor with the most partitions
#: Limit for a message to the scheduler. ZeroMQ buffers an unauthenticated peer's handshake up to
#: this size, on each connection.
MAX_BYTES_TO_HUB = 8 << 20
MAX_NAME = 4096
#: Bytes at which a node begins another KNOWN.
KNOWN_BYTES = 2 << 20
#: Most partitions in one item of KNOWN.
MOST_PLACES = 1 << 15
#: Most tensors in one WAITING. A report may take several messages; "last" marks the last one.
MOST_ITEMS = 4096

#: Fields of TERM, in the order of AGAIN's ``terms``.
TERM_FIELDS = (
    *("term", "moves", "text", "missed", "yields", "dropped", "living", "entered", "met"),
    "leaving",
)

_POSITION = (int, 0, 2**32)
_TEXT = (str, 0, 1 << 16)
#: Field -> (type, least, most). For strings and lists, the bounds are on the length.
_HELLO: dict[str, tuple[type[Any], int, int]] = {
    "protocol": _POSITION,
    "role": (str, 1, 16),
    "rank": (int, -1, 2**31),
    "host": _TEXT,
    "pid": _POSITION,
    "lanes": (list, 0, 4096),
    "config": (dict, 0, 64),
    "token": (str, 0, 64),
}
#: Fields that may be absent. A node of another version may lack a token: it hears that its version
#: is another. Only tensors in factors or halves have pieces.
_ABSENT: dict[str, Any] = {"token": "", "pieces": []}
#: Message type -> its fields.
_FIELDS: dict[str, dict[str, tuple[type[Any], int, int]]] = {
    "HELLO": _HELLO,
    "AGAIN": {
        **_HELLO,
        "job": (int, 0, 2**63),
        "size": (int, 1, 2**31),
        "parts": (int, 0, 1 << 20),
        "cleared": _POSITION,
        "state": (dict, 0, 64),
    },
    "KNOWN": {"items": (list, 0, 1 << 20)},
    #: A server's connections to further workers have ended since its AGAIN: these fields, anew.
    "ENDED": {"broken": (list, 0, 1 << 16), "slots": (list, 0, 1 << 16), "key": (int, -1, 2**63)},
    "CANNOT": {
        "role": (str, 1, 16),
        "rank": (int, -1, 2**31),
        "host": _TEXT,
        "pid": _POSITION,
        "reason": _TEXT,
        "config": (dict, 0, 64),
    },
    #: Bytes of a tensor per second that a worker has exchanged with the servers, and microseconds
    #: of a round trip to the farthest of them.
    "RATE": {"rate": (int, 0, 2**62), "round_trip": (int, 0, 2**62)},
    #: Bytes per second of the answers that have reached a worker in its best moment.
    "PEAK": {"rate": (int, 1, 2**62)},
    #: Push_pulls that a worker has begun: name, generation and number of each tensor.
    "COUNTS": {"number": _POSITION, "epoch": _POSITION, "items": (list, 0, 1 << 16)},
    #: A worker has noted the last counts, or some count has passed its last one.
    "TAKEN": {"number": _POSITION, "fits": (bool, 0, 1)},
    "DECLARE": {
        "name": (str, 1, MAX_NAME),
        "generation": _POSITION,
        "nbytes": (int, 0, 2**62),
        "dtype": (int, 0, 255),
        "shape": (list, 0, 64),
        "codec": (str, 0, 1024),
        #: Bytes of what is summed in the tensor's place, if that is not itself.
        "pieces": (list, 0, 2),
        "epoch": _POSITION,
    },
    "WAITING": {
        "new": (list, 0, MOST_ITEMS),
        "over": (list, 0, MOST_ITEMS),
        "busy": (bool, 0, 1),
        "epoch": _POSITION,
        "calls": (int, 0, 2**62),
        "last": (bool, 0, 1),
    },
    "HEARD": {},
    "DOUBT": {"text": _TEXT, "status": (int, -64, -1)},
    "JOIN": {"generation": _POSITION},
    "CLEARED": {"generation": _POSITION},
    #: A sender has moved to a term. ``partitions``: moved ones that it had used. ``again``: bytes
    #: of the rounds that it pushes again.
    "MOVED": {"term": _POSITION, "partitions": (int, 0, 2**40), "again": (int, 0, 2**62)},
    #: A sender has connected to all lanes of a server that joins the running job, or ``failure``.
    "CONNECTED": {"server": _POSITION, "failure": _TEXT},
    #: A worker's connection to a server has ended, and the hub has not said why.
    #: ``alone``: this worker reaches no other server.
    "BROKEN": {"server": _POSITION, "alone": (bool, 0, 1)},
    #: A worker has passed so many boundaries; it has stopped; a newcomer has connected.
    "AT": {"meeting": _POSITION, "boundary": (int, 0, 2**62)},
    #: ``names``: the declared names, for newcomers, if MEET has asked for them.
    "HERE": {"meeting": _POSITION, "names": (str, 0, MAX_BYTES_TO_HUB)},
    "READY": {"meeting": _POSITION},
    #: A worker that has joined has got the model: it has passed its first boundary.
    "SYNCED": {},
    #: A node has to end and asks to leave the running job: the reply is GOODBYE or STAY. ``needs``:
    #: a call of the worker's that cannot go on without all workers.
    "DEPART": {"why": _TEXT, "needs": _TEXT},
    "BYE": {"failure": _TEXT},
    "CLOCK": {"at": (int, 0, 2**63)},
    "STATS": {"at": (int, 0, 2**63), "values": (dict, 0, 64), "late": (list, 0, 65536)},
    "TRACED": {"path": _TEXT, "records": (int, 0, 2**40)},
    "OBSERVE": {"protocol": _POSITION, "trace": (int, -1, 3600)},
}


class BadMessage(ValueError):
    """Raised for bytes on the control link that are no valid message."""


def encode(kind: str, **fields: Any) -> bytes:
    """Encode a message."""
    return json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Decode a message: an object with a string ``type``.

    Raises :class:`BadMessage`.
    """
    if len(data) > MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise BadMessage(f"not JSON: {e}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadMessage("not an object with a type")
    return message


def check(message: dict[str, Any]) -> None:
    """Check that a node's message has the fields of its type, each in range.

    Raises :class:`BadMessage` naming the field.
    """
    fields = _FIELDS.get(message["type"])
    if fields is None:
        raise BadMessage(f"unknown type {message['type'][:40]!r}")
    for name, (kind, least, most) in fields.items():
        value: Any = message.get(name, _ABSENT.get(name))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BadMessage(f"{message['type']}: field {name!r} is not {kind.__name__}")
        size = value if isinstance(value, int) else len(value)
        if not least <= size <= most:
            raise BadMessage(f"{message['type']}: field {name!r} is out of range")
    if message["type"] in ("HELLO", "AGAIN") and not all(
        isinstance(a, str) and len(a) < 300 for a in message["lanes"]
    ):
        raise BadMessage(f"{message['type']}: an entry of 'lanes' is not an address")
    if message["type"] == "DECLARE" and not all(
        isinstance(d, int) and not isinstance(d, bool) and 0 <= d < 2**62 for d in message["shape"]
    ):
        raise BadMessage("DECLARE: shape is not a list of sizes")
    if message["type"] == "DECLARE" and not _are_pieces(
        message.get("pieces", []), message["nbytes"]
    ):
        raise BadMessage("DECLARE: pieces are not sizes that are at most the tensor's together")
    if message["type"] == "STATS":
        _check_stats(message["values"], message["late"])
    if message["type"] == "WAITING":
        _check_waiting(message["new"], message["over"])
    if message["type"] == "COUNTS" and not all(map(_is_count, message["items"])):
        raise BadMessage("COUNTS: an item is not a name and two numbers")


def _is_count(item: Any) -> bool:
    return (
        isinstance(item, list)
        and len(item) == 3
        and isinstance(item[0], str)
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in item[1:])
    )


def _are_pieces(pieces: list[Any], nbytes: int) -> bool:
    fit = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pieces)
    return fit and (not pieces or sum(pieces) <= nbytes)


def _check_stats(values: dict[str, Any], late: list[Any]) -> None:
    if not all(
        len(k) < 64 and isinstance(v, int) and not isinstance(v, bool) and -(2**63) <= v < 2**64
        for k, v in values.items()
    ):
        raise BadMessage("STATS: a value is not a number with a short name")
    for item in late:
        if (
            not isinstance(item, list)
            or len(item) != 2
            or not all(isinstance(x, int) and 0 <= x < 2**63 for x in item)
        ):
            raise BadMessage("STATS: an item of 'late' is not [rounds, nanoseconds]")


def _check_waiting(new: list[Any], over: list[Any]) -> None:
    for item in new:
        fits = (
            isinstance(item, list) and len(item) == 5 and _is_key(item) and isinstance(item[2], int)
        )
        if not fits or not all(isinstance(x, (int, float)) and -1 <= x < 1e12 for x in item[3:]):
            raise BadMessage(
                "WAITING: an item is not [name, generation, round, seconds, seconds waited for]"
            )
    for item in over:
        if not isinstance(item, list) or len(item) != 2 or not _is_key(item):
            raise BadMessage("WAITING: an item is not [name, generation]")


def _is_key(item: list[Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], int)
