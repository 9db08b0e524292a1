"""A core whose lanes are read and written by the test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from bpsx._core import Core
from bpsx.compression.factors import factor_bytes, make_matrix
from bpsx.compression.spec import compression
from bpsx.core._handle import Handle, Request
from bpsx.core._tensor import Tensor
from bpsx.kernels.low_rank import Steps
from bpsx.planning.stages import stages_for
from bpsx.transports.loopback.endpoint import LoopbackEndpoint
from support import wire as w

BIG = 40_000  # bytes: too large to travel inline
LONG = 300_000  # bytes: large enough for the core to measure the speed of a link


def push_pull(core: Core, tensor: Tensor, source: Any, target: Any, **more: Any) -> Handle:
    """Start a push_pull of ``tensor`` from ``source`` into ``target``.

    ``more``: options of Request.
    """
    return core.submit(tensor, Request(tensor.name, source, target, **more))


class Rig:
    """A core whose lanes are endpoints that the test reads and writes."""

    def __init__(
        self,
        lanes: int = 1,
        credit: int = 0,
        hold_done: bool = False,
        start: bool = True,
        ahead_ms: float = 0,
        servers: int = 1,
        beside: Collection[int] = (),
        elastic: bool = False,
        shrinks: bool = False,
        wrap: Callable[[LoopbackEndpoint], Any] = lambda endpoint: endpoint,
        trips: Mapping[int, float] | None = None,
    ) -> None:
        self.endpoint = LoopbackEndpoint()
        self.endpoint.hold_done = hold_done
        self.lanes = [LoopbackEndpoint() for _ in range(lanes)]
        for i, lane in enumerate(self.lanes):
            self.endpoint.link(i, lane, 0)
            lane.link(0, self.endpoint, i)
        self.core = Core(
            wrap(self.endpoint),
            rank=0,
            job=7,
            lanes=[i % servers for i in range(lanes)],
            credit=credit,
            spin_us=0,
            ahead_ms=ahead_ms,
            beside=beside,
            elastic=elastic or shrinks,
            shrinks=shrinks,
            senders=3,
            trips=dict(trips or {}),
        )
        if start:
            self.core.start()
        self._key = 0

    def tensor(self, name: str, *lengths: int, lane: int = 0) -> Tensor:
        parts, at = [], 0
        for length in lengths:
            self._key += 1
            parts.append((self._key, lane, self._key, at, length))
            at += length
        return Tensor(name, 3, parts, stages_for("cpu"))

    def matrix(
        self, name: str, rows: int, columns: int, rank: int = 2, steps: Steps | None = None
    ) -> Tensor:
        """Return a float32 tensor that is exchanged as factors: P in two partitions, Q in one."""
        used = compression({"compressor": "powersgd", "rank": rank, "ef": "vanilla"})
        p, q = factor_bytes(used, 3, (rows, columns))
        lengths = [p // 2 // 4 * 4, p - p // 2 // 4 * 4, q]
        made = make_matrix(used, name, 3, (rows, columns), lengths, 2)
        self.core.open_pool(2)
        parts = []
        for length, offset in zip(lengths, (0, lengths[0], made.q_offset), strict=True):
            self._key += 1
            parts.append((self._key, 0, self._key, offset, length))
        made = made if steps is None else made._replace(steps=steps)
        return Tensor(name, 3, parts, stages_for("cpu"), matrix=made)

    def take(self, lane: int = 0, timeout: float = 60) -> list[w.Record]:
        """Return the records of the next message that a lane receives."""
        message = self.lanes[lane].sent(timeout)
        assert message is not None, "the core has sent nothing"
        return w.unpack(message[1], message[2])

    def pushes(self, n: int, lane: int = 0) -> list[w.Record]:
        """Return the next ``n`` pushes, without registrations."""
        found: list[w.Record] = []
        while len(found) < n:
            found += [r for r in self.take(lane) if r.kind == w.PUSH]
        assert len(found) == n
        return found

    def answer(self, push: w.Record, content: bytes, lane: int = 0, **changes: object) -> None:
        r = w.Record(
            w.ANSWER,
            w.INLINE,
            push.dtype,
            7,
            push.key,
            0,
            0,
            0,
            push.round,
            0,
            0,
            push.cookie,
            len(content),
            content,
        )
        r = r._replace(**changes)
        if len(r.body or b"") <= 32768:
            self.endpoint.inject(lane, w.pack(r))
        else:
            self.endpoint.inject(lane, w.pack(r._replace(flags=r.flags & ~w.INLINE)), r.body)

    def close(self) -> None:
        self.core.close()
        self.endpoint.close()
        for lane in self.lanes:
            lane.close()
        self.core.reap()


def array(n: int, value: float = 1.0) -> np.ndarray:
    return np.full(n // 4, value, np.float32)
