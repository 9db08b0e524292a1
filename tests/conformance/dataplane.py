"""The C function table of an endpoint, called through ctypes: so that one suite tests every transport from Python."""

from __future__ import annotations

import ctypes as C
from typing import Any

DONE = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p)


class Message(C.Structure):
    """``transports/abi.pxd``: Message."""

    _fields_ = [("peer", C.c_uint32), ("has_body", C.c_int), ("head", C.c_void_p), ("head_size", C.c_size_t), ("body", C.c_void_p),
                ("body_size", C.c_size_t), ("opaque", C.c_uint64 * 24), ("wrapper", C.c_uint64)]


class Table(C.Structure):
    """``transports/abi.pxd``: Endpoint."""

    _fields_ = [
        ("self", C.c_void_p),
        ("send", C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint32, C.c_void_p, C.c_size_t, C.c_void_p, C.c_void_p, C.c_void_p, C.c_size_t,
                             C.c_void_p, C.c_void_p)),
        ("recv", C.CFUNCTYPE(C.c_int, C.c_void_p, C.POINTER(Message))),
        ("release", C.CFUNCTYPE(None, C.c_void_p, C.POINTER(Message))),
        ("wait", C.CFUNCTYPE(None, C.c_void_p, C.c_int)),
        ("wake", C.CFUNCTYPE(None, C.c_void_p)),
    ]


#: An endpoint runs the last done callbacks when it is closed, and reads what it was handed until then: none of this may go before.
_alive: list[DataPlane] = []


class DataPlane:
    """An endpoint's data plane; keeps what it sends alive and records which done callbacks have run."""

    def __init__(self, endpoint: Any) -> None:
        get = C.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = C.c_void_p, [C.py_object, C.c_char_p]
        self.capsule = endpoint.abi()
        self.table = Table.from_address(get(self.capsule, b"bpsx.Endpoint"))
        self.done: list[int] = []
        self._kept: list[Any] = []
        self.other: DataPlane | None = None     # the other end, which nobody else drives
        _alive.append(self)
        self._callback = DONE(lambda data, hint: self.done.append(hint or 0))

    def send(self, peer: int, head: bytes, body: bytes | None = None, token: int = 1, own_head: bool = False) -> int:
        """Send; ``body`` (and ``head``, if ``own_head``) is handed over and reported in :attr:`done` as ``token`` (head: -token)."""
        h = C.create_string_buffer(head, len(head))
        b = C.create_string_buffer(body, len(body)) if body is not None else None
        self._kept += [h, b]
        call = C.cast(self._callback, C.c_void_p)
        return self.table.send(
            self.table.self, peer, C.addressof(h), len(head), call if own_head else None, 1000 + token if own_head else None,
            C.addressof(b) if b is not None else None, len(body) if body is not None else 0, call if b is not None else None, token)

    def receive(self, timeout: float = 20) -> tuple[int, bytes, bytes | None] | None:
        """The next message, waiting for it: (peer, head, body)."""
        m = Message()
        for _ in range(int(timeout * (10 if self.other is None else 1000))):
            if self.table.recv(self.table.self, C.byref(m)) == 1:
                found = (m.peer, C.string_at(m.head, m.head_size), C.string_at(m.body, m.body_size) if m.has_body else None)
                self.table.release(self.table.self, C.byref(m))
                return found
            if self.other is None:
                self.table.wait(self.table.self, 100)
            else:
                self.other.wait(0)
                self.table.wait(self.table.self, 1)
        return None

    def wait(self, timeout_ms: int) -> None:
        self.table.wait(self.table.self, timeout_ms)

    def wake(self) -> None:
        self.table.wake(self.table.self)
