"""A server's lane with scripted workers, for tests."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np

import core.wire as w
from bpsx.dtypes import BY_NAME
from bpsx.server._engine import Lane
from bpsx.transports.loopback import LoopbackEndpoint

BIG = 50_000


class Rig:
    """A lane with scripted workers."""

    def __init__(self, workers: int, **options) -> None:
        self.endpoint = LoopbackEndpoint()
        self.workers = [LoopbackEndpoint() for _ in range(workers)]
        for rank, worker in enumerate(self.workers):
            worker.connect(0, self.endpoint, rank)
            self.endpoint.connect(rank, worker, 0)
        self.log: list[str] = []
        self.lane = Lane(self.endpoint, job=7, workers=workers, log=self.log.append, **options)
        self.thread = threading.Thread(target=self.lane.run)
        self.thread.start()

    def register(self, slot: int, nbytes: int, dtype: str = "float32", key: int | None = None) -> None:
        for rank in range(len(self.workers)):
            self.send(rank, w.Record(w.REGISTER, w.INLINE, BY_NAME[dtype].code, 7, slot + 100 if key is None else key, slot, rank, cookie=nbytes,
                                     length=4, body=b"name"))

    def send(self, rank: int, *records: w.Record, body: bytes | None = None) -> None:
        self.endpoint.inject(rank, b"".join(w.pack(r) for r in records), body)

    def push(self, rank: int, at: int, data: bytes, *, dtype: str = "float32", round_: int = 0, divisor: int = 1, flags: int = 0, **changes) -> None:
        inline = len(data) <= 32768
        r = w.Record(w.PUSH, flags | (w.INLINE if inline else 0), BY_NAME[dtype].code, 7, at + 100, at, rank, 0, round_, divisor, 0, 1000 + rank,
                     len(data), data if inline else None)
        self.send(rank, r._replace(**changes), body=None if inline else data)

    def take(self, rank: int, timeout: float = 30) -> list[w.Record]:
        message = self.workers[rank].sent(timeout)
        assert message is not None, f"the lane has sent nothing to worker {rank}; log: {self.log}"
        return w.unpack(message[1], message[2])

    def nothing_for(self, rank: int) -> None:
        """After a round trip, the lane has sent nothing else to this worker."""
        self.send(rank, w.Record(w.PING, sender=rank))
        assert [r.kind for r in self.take(rank)] == [w.PONG]

    def close(self) -> None:
        self.lane.stop()
        self.thread.join()
        self.endpoint.close()
        for worker in self.workers:
            worker.close()


def values(dtype: str, n: int, seed: int) -> np.ndarray:
    """Arrays as they lie on the wire: bfloat16 as uint16."""
    rng = np.random.default_rng(seed)
    if "int" in dtype:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    if dtype == "bfloat16":
        return rng.normal(size=n).astype(ml_dtypes.bfloat16).view(np.uint16)
    return rng.normal(size=n).astype(dtype)
