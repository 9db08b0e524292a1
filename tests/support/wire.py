"""The wire format in Python, for tests that script a peer: written from ``core/wire.pxd``,
independently of the code under test.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC, VERSION = 0x58535042, 3
REGISTER, PUSH, ANSWER, ERROR, PING, PONG = 1, 2, 3, 4, 5, 6
HAVE, HAVES, WANT, GIVE, ACK, SETTLED, TOOK = 7, 8, 9, 10, 11, 12, 13
SNAP, FETCH, LOAD, LOG = 14, 15, 16, 17
YIELD, LEFT = 18, 19
APPLIED, VALUE = 20, 21
INLINE, BROADCAST, ASYNC, PACKED, STATE, WAITS, KEPT = 1, 2, 4, 16, 32, 64, 128
HAS_STATE, WAS_SET, SUMMED = 1, 2, 4  # flags of a Coded
_FORMAT = struct.Struct("<IBBBBQQIIIIIiQQ")


class Record(NamedTuple):
    """One record: header fields in wire order after the version, then the body."""

    kind: int
    flags: int = 0
    dtype: int = 3
    job: int = 7
    key: int = 0
    slot: int = 0
    sender: int = 0
    term: int = 0
    round: int = 0
    divisor: int = 1
    priority: int = 0
    cookie: int = 0
    length: int = 0
    body: bytes | None = None


def pack(r: Record, *, magic: int = MAGIC, version: int = VERSION) -> bytes:
    """Return a record as bytes; an inline body is padded to a multiple of 8."""
    head = _FORMAT.pack(
        magic,
        version,
        r.kind,
        r.flags,
        r.dtype,
        r.job,
        r.key,
        r.slot,
        r.sender,
        r.term,
        r.round,
        r.divisor,
        r.priority,
        r.cookie,
        r.length,
    )
    if not r.flags & INLINE:
        return head
    body = r.body or b""
    return head + body + bytes(-len(body) % 8)


def unpack(frame: bytes, second: bytes | None = None) -> list[Record]:
    """Return the records of a message."""
    found, at = [], 0
    while at < len(frame):
        magic, version, *fields = _FORMAT.unpack_from(frame, at)
        assert (magic, version) == (MAGIC, VERSION)
        at += 64
        r = Record(*fields)
        if r.flags & INLINE:
            r = r._replace(body=frame[at : at + r.length])
            at += r.length + -r.length % 8
        elif r.length:
            assert at == len(frame), "a body in the second frame belongs to the last record"
            r = r._replace(body=second)
        found.append(r)
    return found


class Coded(NamedTuple):
    """Body of a HAVE of a compressed key."""

    sum: int = 0
    flags: int = 0
    state: int = 0
    gap: int = 0
    counter: int = 0
    logged: int = 0

    def bytes(self) -> bytes:
        """Return it as on the wire."""
        return _CODED.pack(*self)


def coded(body: bytes) -> Coded:
    """Return the body of a HAVE of a compressed key."""
    return Coded(*_CODED.unpack(body))


_CODED = struct.Struct("<IIIIQQ")
_LOG_HEAD = struct.Struct("<IIQ")


def log_entry(number: int, divisor: int, push: bytes) -> bytes:
    """Return a push as it is in a LOG's body."""
    return _LOG_HEAD.pack(number, divisor, len(push)) + push + bytes(-len(push) % 8)


def log_entries(body: bytes) -> list[tuple[int, int, bytes]]:
    """Return (sum, divisor, push) of each push in a LOG's body."""
    found, at = [], 0
    while at < len(body):
        number, divisor, length = _LOG_HEAD.unpack_from(body, at)
        at += _LOG_HEAD.size
        found.append((number, divisor, body[at : at + length]))
        at += length + -length % 8
    return found
