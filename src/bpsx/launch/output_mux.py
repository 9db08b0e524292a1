"""Merges the children's output line by line, each line prefixed with the child's name.

It loses no byte and decodes none. Nothing here blocks, so that signals and deadlines are served
while the reader of bpsx-run's output stalls.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable, Mapping

_COLOURS = {"worker": 36, "server": 35, "scheduler": 33}
#: Bytes that a pipe that polls as writable takes without blocking (PIPE_BUF). O_NONBLOCK would
#: change the caller's descriptor, too.
_PIECE = 4096
_READ = 65536
#: Bytes that may wait for bpsx-run's reader before the children have to wait.
_BACKLOG = 1 << 20
#: A longer line is broken: a child that never ends its line must not fill bpsx-run's memory.
_LONGEST = 1 << 20
#: Messages that the job's processes log about each other's end by Ctrl-C.
_INTERRUPTED = re.compile(
    rb"bpsx (worker \d+|server|scheduler) ERROR: .*ended by KeyboardInterrupt\s*$"
)


def is_live(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether ``descriptor`` is a terminal that can move its cursor."""
    return os.isatty(descriptor) and environment.get("TERM") != "dumb"


def label(name: str, role: str, colour: bool) -> bytes:
    """Format the prefix ``[worker 0] ``, in the role's colour if ``colour``."""
    text = f"[{name}] "
    return (f"\x1b[{_COLOURS[role]}m{text}\x1b[0m" if colour else text).encode()


class Prefixer:
    """Puts ``label`` before each line. Pure.

    With ``live``, a carriage return ends a line, too, so that progress bars move. Otherwise they
    would show up only when they are done.
    """

    def __init__(self, label: bytes, live: bool = False) -> None:
        self._label = label
        self._live = live
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that ``data`` completes."""
        lines = (
            (self._rest + data).splitlines(keepends=True)
            if self._live
            else _lines(self._rest + data)
        )
        # A last "\r" may be half of a "\r\n".
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) >= _LONGEST:
            lines.append(self._rest + b"\n")
            self._rest = b""
        return b"".join([self._label + line for line in lines])

    def finish(self) -> bytes:
        """Return the unfinished last line with an end."""
        rest, self._rest = self._rest, b""
        return self._label + rest + b"\n" if rest else b""


class Overheard(Prefixer):
    """A prefixer that also passes its input to ``listen`` as it arrives."""

    def __init__(self, label: bytes, live: bool, listen: Callable[[bytes], None]) -> None:
        super().__init__(label, live)
        self._listen = listen

    def feed(self, data: bytes) -> bytes:
        """See :class:`Prefixer`."""
        self._listen(data)
        return super().feed(data)


class Announcer(Prefixer):
    """A prefixer that removes messages: from ``marker``, at any position, to the end of that line.

    It calls ``heard`` with each message.
    """

    def __init__(
        self, label: bytes, live: bool, marker: bytes, heard: Callable[[bytes], None]
    ) -> None:
        super().__init__(label, live)
        self._marker = marker
        self._heard = heard
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """See :class:`Prefixer`."""
        data, self._held = self._held + data, b""
        out = []
        while (at := data.find(self._marker)) >= 0:
            out.append(super().feed(data[:at]))
            message, end, rest = data[at + len(self._marker) :].partition(b"\n")
            if not end:
                self._held = data[at:]
                return b"".join(out)
            self._heard(message)
            data = rest
        # The marker may be split between two reads.
        kept = next(
            (n for n in range(len(self._marker) - 1, 0, -1) if data.endswith(self._marker[:n])), 0
        )
        self._held = data[len(data) - kept :]
        return b"".join([*out, super().feed(data[: len(data) - kept])])

    def finish(self) -> bytes:
        """See :class:`Prefixer`."""
        held, self._held = self._held, b""
        return super().feed(held) + super().finish()


def _lines(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    lines = [line + b"\n" for line in whole]
    return [*lines, rest] if rest else lines


class Sink:
    """One of bpsx-run's outputs, with the data queued for it. A broken sink drops its data."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self._waiting = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def waiting(self) -> bool:
        """Whether queued data is left."""
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        """Whether the children should wait."""
        return len(self._waiting) >= _BACKLOG

    def write(self, data: bytes) -> None:
        """Queue ``data``."""
        if not self.broken:
            self._waiting += data

    def flush(self) -> None:
        """Write what can be written without blocking."""
        try:
            while self._waiting and self._poll.poll(0):
                del self._waiting[: os.write(self.descriptor, bytes(self._waiting[:_PIECE]))]
        except BlockingIOError:  # the caller made the descriptor non-blocking
            pass
        except OSError:
            self.broken = True
            self._waiting.clear()


class Source:
    """The reading end of a child's output. Owns ``descriptor``."""

    def __init__(
        self, descriptor: int, prefixer: Prefixer, sink: Sink, shown: Callable[[bytes], bytes]
    ) -> None:
        """``shown``: filter for whole lines before they go to ``sink``."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.sink = sink
        self.open = True
        self._prefixer, self._shown = prefixer, shown

    def read(self) -> bool:
        """Move at most 64 KiB of available output to the sink.

        Closes at the end of input. Returns whether there may be more.
        """
        try:
            data = os.read(self.descriptor, _READ)
        except BlockingIOError:
            return False
        self.sink.write(self._shown(self._prefixer.feed(data)))
        if not data or self.sink.broken:
            self.close()
        return self.open

    def close(self) -> None:
        """Close the pipe.

        A child that continues to write gets a broken pipe, as it would without bpsx-run.
        """
        if self.open:
            self.open = False
            self.sink.write(self._shown(self._prefixer.finish()))
            os.close(self.descriptor)


class Pump:
    """Moves the output of all children. Not thread-safe.

    ``wake``: descriptor that ends a wait.
    """

    def __init__(self, wake: int, environment: Mapping[str, str]) -> None:
        self.sources: list[Source] = []
        self._wake = wake
        self._environment = environment
        #: Whether Ctrl-C ends the job. Messages in which processes report each other's end by it
        #: are then dropped.
        self.interrupted = False
        out = Sink(1)
        # One sink if both are the same terminal or file; otherwise pieces of lines would mix.
        self._sinks = {1: out, 2: out if os.path.sameopenfile(1, 2) else Sink(2)}

    def add(
        self,
        descriptor: int,
        target: int,
        name: str,
        role: str,
        messages: tuple[bytes, Callable[[bytes], None]] | None = None,
        listen: Callable[[bytes], None] | None = None,
    ) -> None:
        """Forward ``descriptor`` to output ``target`` (1 or 2), prefixed with the child's ``name``.

        Takes ownership of the descriptor. ``messages``: marker and receiver for an
        :class:`Announcer`. ``listen``: receiver for an :class:`Overheard`.
        """
        live = is_live(target, self._environment)
        mark = label(name, role, live and not self._environment.get("NO_COLOR"))
        prefixer = (
            Announcer(mark, live, *messages)
            if messages
            else Overheard(mark, live, listen)
            if listen
            else Prefixer(mark, live)
        )
        self.sources.append(Source(descriptor, prefixer, self._sinks[target], self._shown))

    def _shown(self, lines: bytes) -> bytes:
        if not self.interrupted or b"KeyboardInterrupt" not in lines:
            return lines
        return b"".join(
            line for line in lines.splitlines(keepends=True) if not _INTERRUPTED.search(line)
        )

    def say(self, line: str) -> None:
        """Queue a line of bpsx-run's own for standard error."""
        self._sinks[2].write(f"bpsx-run: {line}\n".encode(errors="surrogateescape"))

    @property
    def written(self) -> bool:
        """Whether all queued data has been written."""
        return not any(sink.waiting for sink in self._sinks.values())

    def step(self, timeout: float | None) -> None:
        """Wait at most ``timeout`` seconds for input, output or a wake-up, and handle it."""
        readable = {s.descriptor: s for s in self.sources if not s.sink.full}
        poll = select.poll()
        for descriptor in (self._wake, *readable):
            poll.register(descriptor, select.POLLIN)
        for sink in self._sinks.values():
            if sink.waiting:
                poll.register(sink.descriptor, select.POLLOUT)
        for descriptor, _ in poll.poll(
            None if timeout is None else max(0, int(timeout * 1000) + 1)
        ):
            if descriptor == self._wake:
                _empty(descriptor)
            elif descriptor in readable:
                readable[descriptor].read()
        self._flush()

    def _flush(self) -> None:
        for sink in self._sinks.values():
            sink.flush()
        for source in self.sources:
            if source.sink.broken:
                source.close()
        self.sources = [s for s in self.sources if s.open]

    def close(self) -> None:
        """Read what the pipes hold, for children that have ended, and close them."""
        for source in self.sources:
            # Pipes hold less than this. The bound stops a stray process that keeps writing from
            # blocking the loop for ever.
            for _ in range(64):
                if not source.read():
                    break
            source.close()
        self._flush()


def _empty(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while len(os.read(descriptor, _PIECE)) == _PIECE:
            pass
