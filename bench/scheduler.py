"""``bench scheduler``: processor time of a message at the scheduler, by its type and by the number
of workers.

The scheduler's own code handles and replies to the messages of simulated workers; only sockets are
left out.

A message costs the same number of steps whatever the number of workers;
tests/unit/test_many_workers.py counts them. A ratio above 1 comes from memory: with few workers a
worker's reports are in the processor's cache, with 1,024 workers they may not be. When the same 63
of 1,024 workers report again and again, ``still-waiting`` takes 2.85 us, as with 64 workers (2.82
us). When all of them report, it takes 6.3 us.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from typing import Any

from bench.jobs import progress
from bench.report import Case
from bpsx.config import Config
from bpsx.config.fingerprint import fingerprint
from bpsx.scheduler import messages
from bpsx.scheduler.hub import Hub
from bpsx.scheduler.membership import Membership
from bpsx.scheduler.observers import Observers
from bpsx.scheduler.rejections import Refusals

SERVERS = 2
PHASES = ("gathering", "declaring", "waiting", "still-waiting", "answered", "joining", "leaving")
Message = tuple[bytes, dict[str, Any]]


class _NoSocket:
    """Socket that only counts what the scheduler sends."""

    def __init__(self) -> None:
        self.sent = 0

    def send_multipart(self, frames: list[bytes]) -> None:
        self.sent += 1


class Simulated:
    """A scheduler without sockets, and the messages of its simulated workers.

    ``workers`` workers push ``tensors`` tensors each. ``processes``: worker processes of a machine,
    which sum among themselves.
    """

    def __init__(self, workers: int, tensors: int, processes: int = 1) -> None:
        self.workers, self.tensors, self.processes = workers, tensors, processes
        self.hub: Any = object.__new__(Hub)
        self.hub._members = Membership(
            workers // processes, SERVERS, processes, 1, stall_warn=30.0, deadlock_after=60.0
        )
        self.hub._observers = Observers(self.hub._members, "127.0.0.1")
        self.hub._refusals, self.hub._gone, self.hub._broke = Refusals(), [], "its connection broke"
        self.hub._socket, self.hub._hint = _NoSocket(), ""

    def _hello(self, role: str, rank: int) -> dict[str, Any]:
        given = {
            "DMLC_NUM_WORKER": str(self.workers // self.processes),
            "DMLC_NUM_SERVER": str(SERVERS),
        }
        config = {
            **fingerprint(Config(given)),
            "BYTEPS_LOCAL_SIZE": self.processes,
            "BPSX_LOCAL_REDUCE": int(self.processes > 1),
        }
        return {
            "protocol": messages.PROTOCOL,
            "role": role,
            "rank": rank,
            "host": f"10.0.0.{rank}",
            "pid": 100 + rank,
            "lanes": [f"10.0.1.{rank}:9000"] if role == "server" else [],
            "config": config,
        }

    def phase(self, name: str) -> Iterator[Message]:
        """Return the messages of one of :data:`PHASES`; phases come in that order."""
        everybody = [(r, b"w%d" % r) for r in range(self.workers)]
        if name == "gathering":
            for s in range(SERVERS):
                yield b"s%d" % s, {"type": "HELLO", **self._hello("server", s)}
            for rank, ident in everybody:
                yield ident, {"type": "HELLO", **self._hello("worker", rank)}
        elif name == "declaring":
            for n in range(self.tensors):
                for _, ident in everybody:
                    yield (
                        ident,
                        {
                            "type": "DECLARE",
                            "name": f"t{n}",
                            "generation": 0,
                            "nbytes": 4096,
                            "dtype": 3,
                            "shape": [1024],
                            "codec": "",
                            "epoch": 0,
                        },
                    )
        elif name == "waiting":  # worker 0 saves a checkpoint; all others wait for all tensors
            for _, ident in everybody[1:]:
                yield (
                    ident,
                    self._report(
                        [[f"t{n}", 0, 0, 31.0, 31.0 if n == 0 else -1] for n in range(self.tensors)]
                    ),
                )
        elif name == "still-waiting":
            for _ in range(4):
                for _, ident in everybody[1:]:
                    yield ident, self._report([])
        elif name == "answered":
            for _, ident in everybody[1:]:
                yield ident, self._report([], [[f"t{n}", 0] for n in range(self.tensors)])
        elif name == "joining":
            for _, ident in everybody:
                yield ident, {"type": "JOIN", "generation": 0}
        elif name == "leaving":
            for _, ident in everybody:
                yield ident, {"type": "BYE", "failure": ""}

    @staticmethod
    def _report(new: list[Any], over: list[Any] | None = None) -> dict[str, Any]:
        return {
            "type": "WAITING",
            "new": new,
            "over": over or [],
            "busy": False,
            "epoch": 0,
            "calls": 1,
            "last": True,
        }

    def handle(self, ident: bytes, message: dict[str, Any]) -> None:
        """Handle a message as the scheduler does when one has arrived."""
        messages.check(message)
        if message["type"] == "HELLO":
            self.hub._members.would_refuse(ident, message)
        self.hub._handle(ident, message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        default="64,1024",
        help="numbers of workers, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--tensors", type=int, default=100, help="tensors of each worker (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> list[Case]:
    """Return microseconds per message; the peer is the cost with the smallest number of workers."""
    # The measured time includes making the warnings, but not printing them.
    logging.disable(logging.WARNING)
    cases = []
    peers: dict[str, float] = {}
    tensors = 30 if options.quick else options.tensors
    for workers in sorted(int(w) for w in options.workers.split(",")):
        progress(f"{workers} workers")
        simulated = Simulated(workers, tensors)
        for phase in PHASES:
            sent = list(simulated.phase(phase))
            begun = time.thread_time()  # excludes the time of other processes on the machine
            for message in sent:
                simulated.handle(*message)
            seconds = time.thread_time() - begun
            each = 1e6 * seconds / len(sent)
            cases.append(
                Case(
                    f"{phase}-{workers}",
                    each,
                    "us",
                    peer=peers.get(phase),
                    target="<= 3" if phase in peers else None,
                    note=f"per message; {len(sent)} messages in {seconds:.2f} s",
                )
            )
            peers.setdefault(phase, each)
    return cases
