"""The wire format in Python, for tests that script a peer: written from ``core/wire.pxd``,
independently of the code under test.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC, VERSION = 0x58535042, 3
REGISTER, PUSH, ANSWER, ERROR, PING, PONG = 1, 2, 3, 4, 5, 6
HAVE, HAVES, WANT, GIVE, ACK, SETTLED, TOOK = 7, 8, 9, 10, 11, 12, 13
INLINE, BROADCAST, ASYNC, WAITS, KEPT = 1, 2, 4, 64, 128
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
