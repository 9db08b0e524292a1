"""A worker that takes part in a job correctly and sends mutated messages in between.

A server must survive these from the holder of a valid connection. A stranger's messages never reach
a lane: the handshake rejects the stranger. So the mutations come from a member that knows the
secret.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from bench import machine
from bench.child import serve
from bench.jobs import Job, progress
from bench.report import BenchError, Case
from bpsx.config import Config
from bpsx.scheduler.client import SchedulerLink
from bpsx.transports.zeromq.auth import token

NAME, ELEMENTS = "fuzzed", 16
MAGIC, VERSION, REGISTER, PUSH, ANSWER, PING, INLINE, BROADCAST, FLOAT32 = (
    0x58535042,
    3,
    1,
    2,
    3,
    5,
    1,
    2,
    3,
)
#: Layout of the wire's header, a copy of that in ``core/wire.pxd``.
HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("dtype", "u1"),
        ("job", "<u8"),
        ("key", "<u8"),
        ("slot", "<u4"),
        ("sender", "<u4"),
        ("term", "<u4"),
        ("round", "<u4"),
        ("divisor", "<u4"),
        ("priority", "<i4"),
        ("cookie", "<u8"),
        ("length", "<u8"),
    ]
)
KINDS = (
    "truncated",
    "length",
    "key",
    "round ahead",
    "round replayed",
    "term",
    "sender",
    "dtype",
    "slot",
    "job",
    "magic",
    "version",
    "kind",
    "random bytes",
    "register key",
    "register size",
    "register slot",
    "greeting",
    "broadcast root",
    "second frame",
    "frames",
    "all fields",
)
_FIELDS = {
    "key": ("key", 64),
    "term": ("term", 32),
    "job": ("job", 64),
    "magic": ("magic", 32),
    "version": ("version", 8),
}


@dataclass(frozen=True)
class Target:
    """The attacked key, and the rank of the attacking worker."""

    job: int
    key: int
    slot: int
    rank: int

    def push(self, round_: int, body: bytes) -> np.ndarray:
        """Return the header of this worker's valid push."""
        return np.array(
            [
                (
                    MAGIC,
                    VERSION,
                    PUSH,
                    INLINE,
                    FLOAT32,
                    self.job,
                    self.key,
                    self.slot,
                    self.rank,
                    0,
                    round_,
                    1,
                    0,
                    0,
                    len(body),
                )
            ],
            HEADER,
        )


def mutants(
    rng: np.random.Generator, n: int, target: Target, round_: int
) -> tuple[list[list[bytes]], int]:
    """Return ``n`` mutated messages as lists of frames, and how many of them a lane does not count.

    None is a valid push in this or the next round. A lane counts malformed and repeated messages.
    It does not count those that its transport drops, nor empty ones, which are not wrong.
    """
    body = rng.bytes(4 * ELEMENTS)
    heads = np.repeat(target.push(round_, body), n)
    kinds = rng.integers(0, len(KINDS), n)
    which = {name: kinds == i for i, name in enumerate(KINDS)}
    for name, (field, bits) in _FIELDS.items():  # any value but the right one
        heads[field][which[name]] ^= rng.integers(1, 2 ** (bits - 1), which[name].sum()).astype(
            HEADER[field]
        )
    heads["length"][which["length"]] += rng.integers(1, 2**63, which["length"].sum()).astype("<u8")
    heads["round"][which["round ahead"]] += rng.integers(
        2, 2**20, which["round ahead"].sum()
    ).astype("<u4")
    heads["round"][which["round replayed"]] = (round_ - 1) % 2**32
    heads["sender"][which["sender"]] = rng.integers(0, 2, which["sender"].sum())
    heads["dtype"][which["dtype"]] ^= rng.integers(1, 200, which["dtype"].sum()).astype("u1")
    heads["slot"][which["slot"]] += rng.integers(1, 2**31, which["slot"].sum()).astype("<u4")
    heads["kind"][which["kind"]] = rng.integers(6, 256, which["kind"].sum())
    registers = which["register key"] | which["register size"] | which["register slot"]
    heads["kind"][registers], heads["cookie"][registers] = REGISTER, len(body)
    heads["key"][which["register key"]] += 1
    heads["cookie"][which["register size"]] ^= rng.integers(
        1, 2**62, which["register size"].sum()
    ).astype("<u8")
    heads["slot"][which["register slot"]] = rng.integers(2**22, 2**32, which["register slot"].sum())
    heads["kind"][which["greeting"]] = PING
    wrong_root = which["broadcast root"]
    heads["flags"][wrong_root], heads["divisor"][wrong_root] = INLINE | BROADCAST, 2**31
    heads["flags"][which["second frame"]] = 0
    noise = rng.bytes(HEADER.itemsize * n)
    stored, made = heads.tobytes(), []
    cuts = rng.integers(0, HEADER.itemsize + len(body), n)
    for i, kind in enumerate(kinds):
        at = i * HEADER.itemsize
        made.append(
            _frames(
                KINDS[kind],
                stored[at : at + HEADER.itemsize],
                body,
                noise[at : at + HEADER.itemsize],
                int(cuts[i]),
                target,
            )
        )
    uncounted = which["frames"] | ((which["truncated"] | which["random bytes"]) & (cuts == 0))
    return made, int(uncounted.sum())


def _frames(
    kind: str, head: bytes, body: bytes, noise: bytes, cut: int, target: Target
) -> list[bytes]:
    if kind == "truncated":
        return [(head + body)[:cut]]
    if kind == "random bytes":
        return [(noise * 2)[:cut]]
    if kind == "all fields":  # valid magic, version and job, then random bytes
        start = struct.pack("<IBB", MAGIC, VERSION, 6 + noise[0] % 200)
        return [start + noise[6:8] + struct.pack("<Q", target.job) + noise[16:]]
    if kind == "second frame":
        return [head, (noise * 2)[: cut % len(body)]]
    return [head + body] if kind != "frames" else [head + body, body, body]


class Peer:
    """Worker ``config.rank`` of a job with one lane.

    Call :meth:`join`, then :meth:`round` as often as the others push, then :meth:`leave`.
    """

    def __init__(self, config: Config, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sent = self.uncounted = 0
        self._config = config
        self._link = SchedulerLink(config)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._places: list[Any] = []
        self._round = 0
        self._sum: np.ndarray | None = None  # sum of the present round, once it has come

    def join(self) -> None:
        """Join the job, connect to its lane and declare the tensor that all workers push."""
        rank, secret = self._config.rank, self._config.secret_bytes
        welcome = self._link.enter_job("worker", rank, "127.0.0.1", [])
        ((_, _, (address,)),) = welcome["servers"]
        s = self._socket
        s.setsockopt(zmq.ROUTING_ID, b"\x01" + struct.pack("<IQ", rank, welcome["job"]))
        s.setsockopt(zmq.PLAIN_USERNAME, str(rank).encode())
        s.setsockopt(zmq.PLAIN_PASSWORD, token(secret, welcome["job"], address, rank))
        s.setsockopt(zmq.RCVHWM, 0)
        s.setsockopt(zmq.RCVTIMEO, 60_000)
        s.setsockopt(zmq.SNDTIMEO, 60_000)
        s.connect(f"tcp://{address}")
        self._link.start(self._heard, lost=lambda _: None, tick=lambda: None)
        self._link.send(
            "DECLARE",
            name=NAME,
            generation=0,
            nbytes=4 * ELEMENTS,
            dtype=FLOAT32,
            shape=[ELEMENTS],
            codec="",
            epoch=0,
        )
        end = time.monotonic() + 60
        while not self._places and time.monotonic() < end:
            time.sleep(0.01)
        ((key, _, slot, _),) = self._places
        self.target = Target(welcome["job"], key, slot, rank)
        self._register()

    def _heard(self, message: dict[str, Any]) -> None:
        if message["type"] == "PLACED":
            self._places = message["places"]

    def _register(self) -> None:
        head = self.target.push(0, bytes(8))
        head["kind"], head["cookie"], head["length"] = REGISTER, 4 * ELEMENTS, 8
        self._socket.send(head.tobytes() + NAME.encode().ljust(8))

    def round(self, values: np.ndarray, garbage: int) -> np.ndarray:
        """Push ``values`` with ``garbage`` mutants around it, and return the sum.

        ``values``: float32, ``ELEMENTS`` of them.
        """
        made, uncounted = mutants(self.rng, garbage, self.target, self._round)
        for i, frames in enumerate(made):
            if i == garbage // 2:
                self._push(values)
            self._socket.send_multipart(frames)
            if i % 128 == 0:
                self._drain()
        if garbage < 2:
            self._push(values)
        self.sent += len(made)
        self.uncounted += uncounted
        return self._answer()

    def _push(self, values: np.ndarray) -> None:
        self._socket.send(
            self.target.push(self._round, values.tobytes()).tobytes() + values.tobytes()
        )

    def _answer(self) -> np.ndarray:
        while self._sum is None:
            self._read(self._socket.recv())
        found, self._sum = self._sum, None
        self._round += 1
        return found

    def _drain(self) -> None:
        """Read all replies that have come.

        Unread replies would fill the server's memory, which is a known limit.
        """
        while self._socket.poll(0):
            self._read(self._socket.recv())

    def _read(self, frame: bytes) -> None:
        at = 0
        while at < len(frame):
            head = np.frombuffer(frame, HEADER, 1, at)[0]
            if head["kind"] == ANSWER and head["round"] == self._round:
                self._sum = np.frombuffer(frame, np.float32, ELEMENTS, at + HEADER.itemsize)
            at += HEADER.itemsize + (int(head["length"]) + 7) // 8 * 8

    def leave(self) -> None:
        """Leave the job in good order."""
        self._link.leave("", 10)
        self._link.stop()
        self._context.destroy(0)


def attack(messages: int, rounds: int, seed: int) -> dict[str, float]:
    """Run the fuzzing worker from joining to leaving, with a worker's environment.

    The other workers push rank + round + 1 in each of ``rounds`` + 1 rounds. Returns counts and
    messages per second. Raises :class:`AssertionError` for a wrong sum.
    """
    peer = Peer(Config(role="worker"), seed)
    peer.join()
    found = garbage_rounds(peer, messages, rounds)
    peer.leave()
    return {**found, "seed": seed}


def garbage_rounds(peer: Peer, messages: int, rounds: int) -> dict[str, float]:
    """Run the part of :func:`attack` between joining and leaving."""
    config = Config(role="worker")
    begun = time.monotonic()
    # The last round is without garbage: its reply shows that the lane has read all before it.
    for i in range(rounds + 1):
        got = peer.round(
            np.full(ELEMENTS, config.rank + i + 1, np.float32),
            messages // rounds if i < rounds else 0,
        )
        want = sum(r + i + 1 for r in range(config.size))
        assert (got == want).all(), f"round {i}: {got}, not {want}"
    return {
        "sent": peer.sent,
        "uncounted": peer.uncounted,
        "per_second": peer.sent / (time.monotonic() - begun),
    }


def trust_cases(quick: bool) -> list[Case]:
    """Return the case for ``bench trust``: mutated messages per second that a server survives.

    A job runs meanwhile. Raises :class:`BenchError` if the server does not survive.
    """
    messages, rounds, workers = 100_000 if quick else 1_000_000, 50, 3
    progress(f"{messages} mutated messages")
    environment = {"BPSX_SECRET": "the fuzzer knows it, too", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    with Job(workers, environment=environment, modules={workers - 1: "bench.fuzz"}) as job:
        *right, fuzzer = job.workers
        before = machine.rss_bytes(job.servers[0].pid)
        for worker in right:
            worker.tell("count_up", name=NAME, elements=ELEMENTS, rounds=rounds + 1)
        found = fuzzer.ask("attack", messages=messages, rounds=rounds, timeout=600.0)
        if not all(worker.answer() for worker in right):
            raise BenchError("a sum was wrong")
        grown = (machine.rss_bytes(job.servers[0].pid) - before) / 2**20
    return [
        Case(
            "fuzz",
            found["per_second"],
            "messages/s",
            samples=(found["per_second"],),
            note=(
                f"{found['sent']:,} mutated messages from a member, all sums right; the server grew"
                f" by {grown:.1f} MiB"
            ),
        )
    ]


def _child() -> None:
    """Run the fuzzing worker of a benchmark's job."""
    peer = Peer(Config(role="worker"), int.from_bytes(os.urandom(4), "little"))
    serve(
        {
            "init": peer.join,
            "attack": lambda messages, rounds: garbage_rounds(peer, messages, rounds),
        }
    )
    peer.leave()


if __name__ == "__main__":
    _child()
