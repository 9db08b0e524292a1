"""Throughput of tensors, and of bytes on the wire."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Speed(tuple[float, float]):
    """(milliseconds since the epoch, MB/s of tensors whose results have arrived), as in BytePS.

    MB are 10^6 bytes. ``sent`` and ``received``: MB/s on the wire in the same time, headers
    included. They are less than the tensors' rate where tensors are compressed.
    """

    sent: float
    received: float

    def __new__(cls, ms: float, home: float, sent: float = 0.0, received: float = 0.0) -> Speed:
        """All values become attributes, and the first two the tuple's items."""
        made = super().__new__(cls, (ms, home))
        made.sent, made.received = sent, received
        return made

    def __repr__(self) -> str:
        """Include the attributes that the tuple does not show."""
        return (
            f"Speed(ms={self[0]!r}, home={self[1]!r}, sent={self.sent!r},"
            f" received={self.received!r})"
        )

    def __getnewargs__(self) -> tuple[float, float, float, float]:
        """Arguments for copies."""
        return *self, self.sent, self.received


class Speedometer:
    """Speeds since the last call of :meth:`read`.

    If no push_pull has been under way since, they are those of that call.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, int] = {}
        self._rates = (0.0, 0.0, 0.0)

    def read(self, counters: Mapping[str, int]) -> Speed:
        """Return the speeds. ``counters``: from :meth:`bpsx._core.Core.counters`."""
        before, self._last = self._last, dict(counters)
        grown = {
            key: counters[key] - before.get(key, 0)
            for key in ("tensor_bytes", "bytes_sent", "bytes_received", "busy_ns")
        }
        spent = grown["busy_ns"]
        if spent:
            home, sent, received = (
                grown[key] * 1e3 / spent for key in ("tensor_bytes", "bytes_sent", "bytes_received")
            )
            self._rates = home, sent, received
        return Speed(time.time() * 1000, *self._rates)
