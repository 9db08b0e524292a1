"""How fast tensors come home, and how many bytes that takes on the wire."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Speed(tuple[float, float]):
    """(milliseconds since the epoch, MB/s of tensors that came home), as BytePS has it.

    MB are 10^6 bytes.

    ``sent`` and ``received``: MB/s on the wire in the same time, headers included: less than the
    tensors' where those are compressed.
    """

    sent: float
    received: float

    def __new__(cls, ms: float, home: float, sent: float = 0.0, received: float = 0.0) -> Speed:
        """All as attributes and the first two as the tuple's."""
        made = super().__new__(cls, (ms, home))
        made.sent, made.received = sent, received
        return made

    def __repr__(self) -> str:
        """With what the tuple does not show."""
        return (
            f"Speed(ms={self[0]!r}, home={self[1]!r}, sent={self.sent!r},"
            f" received={self.received!r})"
        )

    def __getnewargs__(self) -> tuple[float, float, float, float]:
        """For copies."""
        return *self, self.sent, self.received


class Speedometer:
    """Speeds since the last look; those of the look before, while nothing has been under way
    since.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, int] = {}
        self._rates = (0.0, 0.0, 0.0)

    def read(self, counters: Mapping[str, int]) -> Speed:
        """``counters``: of :meth:`bpsx._core.Core.counters`."""
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
