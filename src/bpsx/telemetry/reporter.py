"""What a worker or server tells about itself: timelines into files, statistics to the scheduler.

One :class:`Reporter` per process.

The control thread drives it (:meth:`Reporter.handle`, :meth:`Reporter.tick`); the verbs may be
called from any thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from bpsx.config import Config
from bpsx.planning.stages import Stage
from bpsx.telemetry import timeline
from bpsx.telemetry._recorder import Watcher, monotonic_ns
from bpsx.telemetry.clock_sync import Clock, Estimate

log = logging.getLogger("bpsx.trace")
#: Round trips of one look at the scheduler's clock, and seconds between two looks while something
#: is recorded.
BURST, BURST_EVERY = 8, 10.0
#: Once a tensor has passed the last step, others get this long to follow before the file is written
#: without them.
PATIENCE = 10.0
Send = Callable[..., None]


class _Recording:
    """Records on their way into one file."""

    def __init__(self, flag: int, path: Path) -> None:
        self.flag, self.path = flag, path
        # what is here, if only the fact that there is nothing, is not in the file
        self.unwritten = True
        self.first_done = 0.0
        self._chunks: list[bytes] = []
        # tensor, or key on a server -> its last step that is over
        self._latest: dict[int | str, int] = {}

    def add(self, data: bytes, names: dict[int, str] | None = None) -> None:
        """Take those of ``data`` that belong here.

        ``names``: partitions count under their tensor's name, as on a worker.
        """
        found = np.frombuffer(data, timeline.LAYOUT)
        found = found[found["flags"] & self.flag != 0]
        if not len(found):
            return
        self._chunks.append(found.tobytes())
        self.unwritten = True
        # By arrays: this runs while the training script wants the interpreter.
        keys, where = np.unique(found["key"], return_inverse=True)
        steps = np.zeros(len(keys), np.uint32)
        whole = (found["what"] == timeline.TOTAL) | (found["what"] == timeline.ROUND)
        np.maximum.at(steps, where[whole], found["step"][whole])
        for key, step in zip(keys.tolist(), steps.tolist()):
            which = names.get(key, key) if names else key
            self._latest[which] = max(self._latest.get(which, 0), step)

    @property
    def data(self) -> bytes:
        """All records."""
        return b"".join(self._chunks)

    def over(self, now: float, last: int) -> bool:
        """Whether there is something to be written, and all tensors have passed step ``last``, or
        some have and the others had time to.
        """
        done = [step >= last for step in self._latest.values()]
        if not self.unwritten or not any(done):
            return False
        self.first_done = self.first_done or now
        return all(done) or now >= self.first_done + PATIENCE


class Reporter:
    """Owns the :class:`~bpsx.telemetry._recorder.Watcher` objects of a process and what becomes of
    their records.

    Thread-safe.
    """

    def __init__(
        self,
        config: Config,
        role: str,
        rank: int,
        host: str,
        *,
        writers: int = 1,
        workers: int = 0,
        processes: int = 1,
    ) -> None:
        """``writers``: cores or lanes of this process; ``workers``: who speaks to this server, each
        for ``processes`` of a machine.
        """
        self._config = config
        self._processes = processes
        self._about = {
            "role": role,
            "rank": rank,
            "host": host,
            "pid": os.getpid(),
            "job": f"{os.getpid()}-{time.time_ns():x}",
        }
        sub = str(config.local_rank) if role == "worker" else f"server-{rank}"
        self._path = Path(config.trace_dir or "traces").absolute() / sub / timeline.FILE
        sample = (
            config.sample_tensor
            if role == "worker"
            else config.server_debug_key
            if config.server_debug
            else None
        )
        self.watchers = [
            Watcher(
                f"{role} {rank}",
                workers=workers,
                show_time=not config.log_hide_time,
                messages=config.verbose >= 2,
                keys=config.key_log,
                sample=sample,
                window=(config.trace_start, config.trace_end) if config.trace_on else None,
                stages=[(s.value, s.name) for s in Stage],
            )
            for _ in range(writers)
        ]
        self.names: dict[int, str] = {}  # key -> tensor
        self._clock = Clock()
        self._lock = threading.RLock()
        self._window = _Recording(timeline.WINDOW, self._path) if config.trace_on else None
        self._live: _Recording | None = None
        # of one that was asked for from elsewhere; 0: until it is stopped
        self._live_until = 0.0
        self._live_files = 0
        self._steps: dict[str, int] = {}  # of a single worker, which has no core that counts
        self._writing: threading.Thread | None = None
        self._on_sigterm: Callable[[int, FrameType | None], None] | None = None
        self._watched_until = 0.0
        self._send: Send | None = None
        self._stats: Callable[[], dict[str, Any]] = dict
        self._next_burst = 0.0
        self._expected = 0  # answers of the present burst

    def attach(self, send: Send, stats: Callable[[], dict[str, Any]], job: int) -> None:
        """From now on there is a link to the scheduler of job ``job``.

        ``stats`` returns numbers by name.
        """
        # the number itself is nobody's business
        self._about["job"] = hashlib.sha256(f"timeline of {job}".encode()).hexdigest()[:12]
        self._send, self._stats = send, stats
        if self._window is not None:
            self._ask_burst(time.monotonic())  # now: the job may be over before the first tick

    def name(self, tensor: str, keys: Iterable[int]) -> None:
        """These keys are partitions of ``tensor``."""
        keys = list(keys)
        self.names.update(dict.fromkeys(keys, tensor))
        log.debug(
            "tensor %r has the keys %s",
            tensor,
            ", ".join(map(str, keys[:16])) + (", ..." if len(keys) > 16 else ""),
        )

    def copied(self, tensor: str, begin: int, nbytes: int) -> None:
        """A single worker's push_pull of ``tensor``, begun at
        :func:`~bpsx.telemetry._recorder.monotonic_ns` ``begin``, has ended.
        """
        with self._lock:
            step = self._steps[tensor] = self._steps.get(tensor, 0) + 1
            for recording in (self._window, self._live):
                if (
                    recording is self._live
                    or self._config.trace_start <= step <= self._config.trace_end
                ):
                    if recording is None:
                        continue
                    key = 2**64 - 1 - zlib.crc32(tensor.encode())  # none of a server's
                    self.names[key] = tensor
                    recording.add(
                        timeline.pack(
                            begin, monotonic_ns(), key, nbytes, step, timeline.TOTAL, recording.flag
                        )
                    )

    # ---- the control thread

    def handle(self, message: dict[str, Any]) -> bool:
        """A message from the scheduler; whether it was one for us."""
        kind = message["type"]
        if kind == "CLOCK":
            self._clock.exchange(int(message["at"]), int(message["wall"]), monotonic_ns())
            self._expected -= 1
            if self._expected > 0:
                self._ask_time()
            else:
                self._clock.settle()
        elif kind == "WATCH":
            self._watched_until = time.monotonic() + float(message["seconds"])
            self._report()
        elif kind == "TRACE":
            self._trace_for(float(message["seconds"]))
        else:
            return False
        return True

    def tick(self) -> None:
        """Once a second."""
        now = time.monotonic()
        if now < self._watched_until:
            self._report()
        with self._lock:
            self._drain()
            unfinished = self._live is not None or (
                self._window is not None and self._window.unwritten
            )
            if self._window is not None and self._window.over(now, self._config.trace_end):
                self._finish(self._window)
            if self._live_until and now >= self._live_until:
                self._end_live()
        if unfinished and now >= self._next_burst and self._send is not None:
            self._ask_burst(now)

    def _ask_burst(self, now: float) -> None:
        self._next_burst = now + BURST_EVERY
        self._expected = BURST
        self._ask_time()

    def _ask_time(self) -> None:
        assert self._send is not None
        self._send("CLOCK", at=monotonic_ns())

    def _report(self) -> None:
        if self._send is not None:
            self._send(
                "STATS",
                at=monotonic_ns(),
                values=self._stats(),
                late=[list(x) for x in self._late()],
            )

    def _late(self) -> list[tuple[int, int]]:
        """By rank, over all lanes: (rounds in which it pushed last, ns that they waited for it
        alone).
        """
        lanes = [w.late() for w in self.watchers]
        found = [(sum(x[0] for x in column), sum(x[1] for x in column)) for column in zip(*lanes)]
        # Whoever speaks for a machine is its last worker.
        return [each for late in found for each in [(0, 0)] * (self._processes - 1) + [late]]

    # ---- recording

    def start(self, seconds: float = 0.0) -> bool:
        """Record every push_pull (round, on a server) that begins from now on: for ``seconds``, or
        until :meth:`stop`.

        False if that is being done already.
        """
        with self._lock:
            if self._live is not None:
                return False
            self._live_files += 1
            number = self._live_files + (self._window is not None)
            self._live = _Recording(
                timeline.LIVE,
                self._path if number == 1 else self._path.with_name(f"comm.{number}.json"),
            )
            self._live_until = time.monotonic() + seconds if seconds else 0.0
            self._next_burst = 0.0
            for watcher in self.watchers:
                watcher.live(True)
            return True

    def _trace_for(self, seconds: float) -> None:
        """Somebody elsewhere wants a recording for ``seconds``; less than 0: it is enough."""
        if seconds < 0:
            with self._lock:
                if self._live_until:  # not one that this process's script has begun
                    self._end_live()
        elif not self.start(seconds) and self._send is not None:
            self._send("TRACED", path="", records=0)

    def stop(self) -> Path | None:
        """End what :meth:`start` began; the path of the file, which is complete then.

        None if nothing was being recorded, or it could not be written: see the log.
        """
        with self._lock:
            path = self._end_live()
            writing = self._writing
        if writing is not None:
            writing.join()
        return path if path is not None and path.exists() else None

    def _end_live(self) -> Path | None:
        recording = self._live
        if recording is None:
            return None
        for watcher in self.watchers:
            watcher.live(False)
        self._drain()
        self._live, self._live_until = None, 0.0
        self._finish(recording)
        return recording.path

    def close(self) -> None:
        """Write what is not written yet. Idempotent. Does not raise."""
        if (
            self._on_sigterm is not None
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is self._on_sigterm
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with self._lock:
            if self._writing is not None:
                self._writing.join()
                self._writing = None
            self._drain()
            for recording in (self._window, self._live):
                if recording is not None and recording.unwritten:
                    recording.unwritten = False
                    # Not by a thread: at the end of the interpreter none can be started.
                    self._write(recording, recording.data, None)
            self._live = None
            # They know the session, and it knows us: a ring that only the garbage collector would
            # break, late.
            self._send, self._stats = None, dict

    def close_on_sigterm(self) -> None:
        """Let SIGTERM, if nobody handles it, write the timelines before it ends the process.

        Only when one is asked for, and in the main thread.
        """
        if (
            self._window is None
            or threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return

        def end(number: int, _: FrameType | None) -> None:
            # a forked child has the handler, too, but not the timeline
            if os.getpid() == self._about["pid"]:
                self.close()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        self._on_sigterm = end
        signal.signal(signal.SIGTERM, end)

    def _drain(self) -> None:
        """Fetch what the writers have recorded. The lock is held."""
        for watcher in self.watchers:
            for key, name, _, _ in watcher.names():
                self.names[key] = name
            data = watcher.take()
            for recording in (self._window, self._live):
                if data and recording is not None:
                    recording.add(data, None if self._about["role"] == "server" else self.names)

    def _finish(self, recording: _Recording) -> None:
        """Have a recording written, by a thread of its own: it may be long. The lock is held."""
        recording.unwritten, recording.first_done = False, 0.0
        self._writing = threading.Thread(
            target=self._write, args=(recording, recording.data, self._writing), name="bpsx-trace"
        )
        self._writing.start()

    def _write(self, recording: _Recording, data: bytes, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        estimates = self._clock.estimates()
        aligned = bool(estimates)
        # a single worker, or the job ended before the scheduler could answer: the own wall clock
        if not aligned:
            now = monotonic_ns()
            estimates = [Estimate(now, time.time_ns() - now, 0)]
        about = {
            **self._about,
            "clock": "scheduler" if aligned else "own",
            "clock_error_us": self._clock.error_ns / 1000,
            "dropped": sum(w.lost for w in self.watchers),
        }
        path = recording.path
        try:
            made = timeline.events(list(timeline.unpack(data)), self.names, estimates)
            path = timeline.write_own(path, timeline.document(made, about), about)
        except OSError as e:
            log.error("cannot write the timeline %s (BYTEPS_TRACE_DIR): %s", path, e)
            return
        log.info("timeline: %d events in %s", len(made), path)
        if not made and recording.flag == timeline.WINDOW and self._about["role"] == "worker":
            log.warning(
                "the timeline %s has no events: no tensor has been through as many push_pulls as"
                " BYTEPS_TRACE_START_STEP=%d says (BYTEPS_TRACE_END_STEP=%d)",
                path,
                self._config.trace_start,
                self._config.trace_end,
            )
        if self._send is not None:
            self._send("TRACED", path=str(path), records=len(made))
