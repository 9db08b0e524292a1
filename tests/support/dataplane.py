"""The C function table of an endpoint, called through ctypes, so that one test suite in Python
covers every transport.
"""

from __future__ import annotations

import ctypes as C
from typing import Any

DONE = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p)


class Landing(C.Structure):
    """``Landing`` of ``transports/abi.pxd``."""

    _fields_ = [("at", C.c_uint64), ("room", C.c_uint64), ("key", C.c_uint32), ("remote", C.c_int)]


class Message(C.Structure):
    """``Message`` of ``transports/abi.pxd``."""

    _fields_ = [
        ("peer", C.c_uint32),
        ("has_body", C.c_int),
        ("head", C.c_void_p),
        ("head_size", C.c_size_t),
        ("body", C.c_void_p),
        ("body_size", C.c_size_t),
        ("opaque", C.c_uint64 * 24),
        ("wrapper", C.c_uint64),
        ("landing", Landing),
    ]


class Table(C.Structure):
    """``Endpoint`` of ``transports/abi.pxd``."""

    _fields_ = [
        ("self", C.c_void_p),
        (
            "send",
            C.CFUNCTYPE(
                C.c_int,
                C.c_void_p,
                C.c_uint32,
                C.c_void_p,
                C.c_size_t,
                C.c_void_p,
                C.c_void_p,
                C.c_void_p,
                C.c_size_t,
                C.c_void_p,
                C.c_void_p,
                C.POINTER(Landing),
            ),
        ),
        ("recv", C.CFUNCTYPE(C.c_int, C.c_void_p, C.POINTER(Message))),
        ("release", C.CFUNCTYPE(None, C.c_void_p, C.POINTER(Message))),
        ("wait", C.CFUNCTYPE(None, C.c_void_p, C.c_int)),
        ("wake", C.CFUNCTYPE(None, C.c_void_p)),
        ("lend", C.CFUNCTYPE(None, C.c_void_p, C.c_uint32, C.c_void_p, C.c_uint64)),
        ("drop", C.CFUNCTYPE(None, C.c_void_p, C.c_uint32)),
        ("keeps", C.c_int),
    ]


#: An endpoint reads the memory of sent messages, and runs done callbacks, until it is closed. So
#: these objects must stay alive until then.
_alive: list[DataPlane] = []
_lent: list[Any] = []


def forget_all() -> None:
    """Free what has been sent and lent. All endpoints have been closed."""
    _alive.clear()
    _lent.clear()


class DataPlane:
    """An endpoint's data plane; keeps sent memory alive and records the done callbacks that ran."""

    def __init__(self, endpoint: Any) -> None:
        get = C.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = C.c_void_p, [C.py_object, C.c_char_p]
        self.capsule = endpoint.abi()
        self.table = Table.from_address(get(self.capsule, b"bpsx.Endpoint"))
        self.done: list[int] = []
        self.dropped: set[int] = set()
        self._kept: list[Any] = []
        self.other: DataPlane | None = None  # the other end, if only this object drives it
        _alive.append(self)
        self._callback = DONE(lambda data, hint: self.done.append(hint or 0))

    def send(
        self,
        peer: int,
        head: bytes,
        body: bytes | None = None,
        token: int = 1,
        own_head: bool = False,
        landing: Landing | None = None,
    ) -> int:
        """Send a message.

        ``body`` (and ``head``, if ``own_head``) belongs to the transport until :attr:`done` has
        ``token`` (for the head: ``token`` + 1000). ``landing``: address for the reply, or for this
        body.
        """
        h = C.create_string_buffer(head, len(head))
        b = C.create_string_buffer(body, len(body)) if body is not None else None
        self._kept += [h, b]
        call = C.cast(self._callback, C.c_void_p)
        return self.table.send(
            self.table.self,
            peer,
            C.addressof(h),
            len(head),
            call if own_head else None,
            1000 + token if own_head else None,
            C.addressof(b) if b is not None else None,
            len(body) if body is not None else 0,
            call if b is not None else None,
            token,
            landing,
        )

    def receive(self, timeout: float = 60) -> tuple[int, bytes, bytes | None] | None:
        """Wait for the next message; return (peer, head, body)."""
        m = self.take(timeout)
        if m is None:
            return None
        found = (
            m.peer,
            C.string_at(m.head, m.head_size),
            C.string_at(m.body, m.body_size) if m.has_body else None,
        )
        self.release(m)
        return found

    def take(self, timeout: float = 60) -> Message | None:
        """Wait for the next message; return it without a copy. The caller must release it."""
        m = Message()
        for _ in range(int(timeout * (10 if self.other is None else 1000))):
            if self.table.recv(self.table.self, C.byref(m)) == 1:
                return m
            if self.other is None:
                self.table.wait(self.table.self, 100)
            else:
                self.other.wait(0)
                self.table.wait(self.table.self, 1)
        return None

    def release(self, m: Message) -> None:
        self.table.release(self.table.self, C.byref(m))

    def push(self, peer: int, head: bytes, body: C.Array[C.c_char], landing: Landing) -> int:
        """Send ``body`` without a copy, from memory that keeps its address."""
        return self._send_from(peer, head, C.addressof(body), len(body), landing)

    def answer(self, peer: int, head: bytes, m: Message) -> int:
        """Send a message's body back without a copy, and release the message when that is done."""
        released = DONE(lambda data, hint: self.release(m))
        self._kept.append(released)
        return self._send_from(
            peer, head, m.body, m.body_size, m.landing, C.cast(released, C.c_void_p)
        )

    def _send_from(
        self, peer: int, head: bytes, at: int, n: int, landing: Landing, done: Any = None
    ) -> int:
        h = C.create_string_buffer(head, len(head))
        return self.table.send(
            self.table.self,
            peer,
            C.addressof(h),
            len(head),
            None,
            None,
            at,
            n,
            done,
            None,
            C.byref(landing),
        )

    def lend(self, memory: C.Array[C.c_char]) -> Landing:
        """Lend memory that keeps its address; return it as a landing for a reply.

        A transport without support for lent memory treats it like any other memory.
        """
        _lent.append(memory)
        if self.table.lend:
            self.table.lend(self.table.self, 0, C.addressof(memory), len(memory))
        return Landing(C.addressof(memory), len(memory), 0, 0)

    def drop(self, peer: int) -> None:
        """End the connection to ``peer``."""
        self.dropped.add(peer)
        self.table.drop(self.table.self, peer)

    def forget(self) -> None:
        """Free the memory of sent messages; all done callbacks have run."""
        self._kept.clear()

    def wait(self, timeout_ms: int) -> None:
        self.table.wait(self.table.self, timeout_ms)

    def wake(self) -> None:
        self.table.wake(self.table.self)
