"""Reports of a worker or server: timelines into files, statistics to the scheduler.

There is one :class:`Reporter` per process. The control thread drives it (:meth:`Reporter.handle`,
:meth:`Reporter.tick`); the verbs may be called from any thread.
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
from bpsx.system.threads import NamedThread
from bpsx.telemetry import timeline
from bpsx.telemetry._recorder import Watcher, monotonic_ns
from bpsx.telemetry.clock_sync import Clock, Estimate

log = logging.getLogger("bpsx.trace")
#: Round trips per burst of clock queries, and seconds between bursts during a recording.
BURST, BURST_EVERY = 8, 10.0
#: Once a tensor has passed the last step, the others have this many seconds to follow before the
#: file is written without them.
PATIENCE = 10.0
#: Marks of one recording.
_MOST_MARKS = 4096
Send = Callable[..., None]


class _Recording:
    """Trace records of one recording, to be written to one file."""

    def __init__(self, flag: int, path: Path) -> None:
        self.flag, self.path = flag, path
        # Whether the file lacks data; also true of an empty recording that has no file yet.
        self.unwritten = True
        self.first_done = 0.0
        self._chunks: list[bytes] = []
        self.marks: list[timeline.Mark] = []
        # Tensor, or key on a server -> its last finished step.
        self._latest: dict[int | str, int] = {}

    def add(self, data: bytes, names: dict[int, str] | None = None) -> None:
        """Add the records of ``data`` that belong to this recording.

        ``names``: key -> tensor, so that partitions count under their tensor's name, as on a
        worker.
        """
        found = np.frombuffer(data, timeline.LAYOUT)
        found = found[found["flags"] & self.flag != 0]
        if not len(found):
            return
        self._chunks.append(found.tobytes())
        self.unwritten = True
        # NumPy arrays, as this runs while the training script needs the GIL.
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
        """Whether there are unwritten records and the recording is complete.

        It is complete when all tensors have passed step ``last``, or :data:`PATIENCE` seconds after
        the first has.
        """
        done = [step >= last for step in self._latest.values()]
        if not self.unwritten or not any(done):
            return False
        self.first_done = self.first_done or now
        return all(done) or now >= self.first_done + PATIENCE


class Reporter:
    """Owns the :class:`~bpsx.telemetry._recorder.Watcher` objects of a process and their records.

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
        """``writers``: number of cores or lanes in this process.

        ``workers``: number of workers that speak to this server, each for ``processes`` of its
        machine.
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
        # Tensor -> what readers of the timeline may want to know of it.
        self._tensors: dict[str, dict[str, Any]] = {}
        self._clock = Clock()
        self._lock = threading.RLock()
        self._window = _Recording(timeline.WINDOW, self._path) if config.trace_on else None
        self._live: _Recording | None = None
        # End of a recording that another process requested; 0 if it runs until it is stopped.
        self._live_until = 0.0
        self._live_files = 0
        # Tensor -> push_pulls of a single worker, which has no core that counts them.
        self._steps: dict[str, int] = {}
        self._writing: threading.Thread | None = None
        #: This reporter's handler of SIGTERM, if it has one.
        self.on_sigterm: Callable[[int, FrameType | None], None] | None = None
        self._watched_until = 0.0
        self._send: Send | None = None
        self._stats: Callable[[], dict[str, Any]] = dict
        self._next_burst = 0.0
        self._expected = 0  # outstanding replies of the present burst

    def attach(self, send: Send, stats: Callable[[], dict[str, Any]], job: int) -> None:
        """Attach the link to the scheduler of job ``job``.

        ``send`` sends a message; ``stats`` returns numbers by name.
        """
        # Only a hash of the job's number is published.
        self._about["job"] = hashlib.sha256(f"timeline of {job}".encode()).hexdigest()[:12]
        self._send, self._stats = send, stats
        if self._window is not None:
            # Not at the first tick, as the job may be over by then.
            self._ask_burst(time.monotonic())

    def name(self, tensor: str, keys: Iterable[int], **about: Any) -> None:
        """Register ``keys`` as partitions of ``tensor``.

        ``about``: what the timeline says of the tensor; values that JSON has.
        """
        keys = list(keys)
        self._tensors[tensor] = about
        self.names.update(dict.fromkeys(keys, tensor))
        log.debug(
            "tensor %r has the keys %s",
            tensor,
            ", ".join(map(str, keys[:16])) + (", ..." if len(keys) > 16 else ""),
        )

    def copied(self, tensor: str, begin: int, nbytes: int) -> None:
        """Record that a single worker's push_pull of ``tensor`` has ended.

        ``begin``: its start, from :func:`~bpsx.telemetry._recorder.monotonic_ns`.
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
                    key = 2**64 - 1 - zlib.crc32(tensor.encode())  # no server's key
                    self.names[key] = tensor
                    recording.add(
                        timeline.pack(
                            begin, monotonic_ns(), key, nbytes, step, timeline.TOTAL, recording.flag
                        )
                    )

    def mark(self, name: str, begin: int, **args: Any) -> None:
        """Record that something has happened to the job, from ``begin`` until now.

        ``begin``: as in :meth:`copied`. ``args``: what a viewer shows besides ``name``.
        """
        made = timeline.Mark(begin, monotonic_ns(), name, args)
        with self._lock:
            for recording in (self._window, self._live):
                if recording is not None and len(recording.marks) < _MOST_MARKS:
                    recording.marks.append(made)

    # ---- the control thread

    def handle(self, message: dict[str, Any]) -> bool:
        """Handle a message from the scheduler; returns whether it was for the reporter."""
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
        """Do the periodic work; called once a second."""
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
        """By rank, summed over all lanes: (rounds in which it pushed last, ns of waiting for it).

        The time counts only while it alone was awaited.
        """
        lanes = [w.late() for w in self.watchers]
        found = [(sum(x[0] for x in column), sum(x[1] for x in column)) for column in zip(*lanes)]
        # A machine's last worker, its root, speaks to the servers for all of the machine.
        return [each for late in found for each in [(0, 0)] * (self._processes - 1) + [late]]

    # ---- recording

    def start(self, seconds: float = 0.0) -> bool:
        """Record every push_pull (round, on a server) that begins from now on.

        ``seconds``: duration; 0 records until :meth:`stop`.

        Returns False if such a recording runs already.
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
        """Handle a request for a recording of ``seconds`` from an observer; less than 0 ends it."""
        if seconds < 0:
            with self._lock:
                if self._live_until:  # not a recording that this process's script has started
                    self._end_live()
        elif not self.start(seconds) and self._send is not None:
            self._send("TRACED", path="", records=0)

    def stop(self) -> Path | None:
        """End the recording of :meth:`start`; returns the path of its complete file.

        Returns None if nothing was being recorded, or the file could not be written (see the log).
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
        """Write all unwritten recordings. Idempotent. Does not raise."""
        if (
            self.on_sigterm is not None
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is self.on_sigterm
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
                    # Not on a thread, as none can be started while the interpreter finalizes.
                    self._write(recording, recording.data, None)
            self._live = None
            # They refer to the session, and the session to this reporter: a cycle that the garbage
            # collector would break only late.
            self._send, self._stats = None, dict

    def close_on_sigterm(self) -> None:
        """Make SIGTERM, if it has no handler, write the timelines before it ends the process.

        It does so only if a timeline is configured, and only in the main thread.
        """
        if (
            self._window is None
            or threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return

        def end(number: int, _: FrameType | None) -> None:
            # A forked child inherits the handler, but not the timeline.
            if os.getpid() == self._about["pid"]:
                self.close()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        self.on_sigterm = end
        signal.signal(signal.SIGTERM, end)

    def _drain(self) -> None:
        """Fetch what the writers have recorded. The caller holds the lock."""
        for watcher in self.watchers:
            for key, name, _, _ in watcher.names():
                self.names[key] = name
            data = watcher.take()
            for recording in (self._window, self._live):
                if data and recording is not None:
                    recording.add(data, None if self._about["role"] == "server" else self.names)

    def _finish(self, recording: _Recording) -> None:
        """Write a recording, which may be long, on its own thread. The caller holds the lock."""
        recording.unwritten, recording.first_done = False, 0.0
        self._writing = NamedThread(
            target=self._write, args=(recording, recording.data, self._writing), name="bpsx-trace"
        )
        self._writing.start()

    def _write(self, recording: _Recording, data: bytes, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        estimates = self._clock.estimates()
        aligned = bool(estimates)
        # A single worker, or the job ended before the scheduler replied: use the own wall clock.
        if not aligned:
            now = monotonic_ns()
            estimates = [Estimate(now, time.time_ns() - now, 0)]
        about = {
            **self._about,
            "clock": "scheduler" if aligned else "own",
            "clock_error_us": self._clock.error_ns / 1000,
            "dropped": sum(w.lost for w in self.watchers),
            "tensors": dict(self._tensors),
        }
        path = recording.path
        try:
            made = timeline.events(list(timeline.unpack(data)), self.names, estimates)
            made += timeline.mark_events(recording.marks, estimates, made)
            path = timeline.write_own(path, timeline.document(made, about), about)
        except OSError as e:
            log.error("cannot write the timeline %s (BYTEPS_TRACE_DIR): %s", path, e)
            return
        log.info("timeline: %d events in %s", len(made), path)
        if not made and recording.flag == timeline.WINDOW and self._about["role"] == "worker":
            log.warning(
                "the timeline %s has no events: no tensor has had as many push_pulls as"
                " BYTEPS_TRACE_START_STEP=%d requires (BYTEPS_TRACE_END_STEP=%d)",
                path,
                self._config.trace_start,
                self._config.trace_end,
            )
        if self._send is not None:
            self._send("TRACED", path=str(path), records=len(made))
