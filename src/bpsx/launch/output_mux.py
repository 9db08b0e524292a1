"""The children's output on its way to ours: line by line, with the child's name in front, without
losing a byte or waiting for one.

Bytes throughout: nothing is decoded. Nothing here blocks, so that signals and deadlines are served
while a reader of ours stalls.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable, Mapping

_COLOURS = {"worker": 36, "server": 35, "scheduler": 33}
#: A pipe that polls as writable takes this much without blocking (PIPE_BUF). O_NONBLOCK would
#: change our caller's descriptor, too.
_PIECE = 4096
_READ = 65536
#: What may wait for a reader of ours before the children have to.
_BACKLOG = 1 << 20
#: A line longer than this is broken: a child that never ends its line must not fill our memory.
_LONGEST = 1 << 20
#: What the job's processes log about each other's end by Ctrl-C.
_INTERRUPTED = re.compile(
    rb"bpsx (worker \d+|server|scheduler) ERROR: .*ended by KeyboardInterrupt\s*$"
)


def is_live(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether ``descriptor`` is a terminal that moves its cursor."""
    return os.isatty(descriptor) and environment.get("TERM") != "dumb"


def label(name: str, role: str, colour: bool) -> bytes:
    """``[worker 0] ``, in the role's colour if asked."""
    text = f"[{name}] "
    return (f"\x1b[{_COLOURS[role]}m{text}\x1b[0m" if colour else text).encode()


class Prefixer:
    """Puts ``label`` before each line. Pure.

    With ``live`` a carriage return ends a line, too, so that progress bars move; else they would
    show up when they are done.
    """

    def __init__(self, label: bytes, live: bool = False) -> None:
        self._label = label
        self._live = live
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
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
        """The unfinished last line, finished."""
        rest, self._rest = self._rest, b""
        return self._label + rest + b"\n" if rest else b""


class Overheard(Prefixer):
    """A prefixer that also shows what it gets to ``listen``, as it comes."""

    def __init__(self, label: bytes, live: bool, listen: Callable[[bytes], None]) -> None:
        super().__init__(label, live)
        self._listen = listen

    def feed(self, data: bytes) -> bytes:
        """See :class:`Prefixer`."""
        self._listen(data)
        return super().feed(data)


class Announcer(Prefixer):
    """A prefixer that takes messages out: from ``marker`` to the end of that line, wherever it
    stands.

    ``heard`` is called with each.
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
        # The marker may be cut in two.
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
    """One of our outputs and what waits to be written to it. Broken, it takes nothing any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self._waiting = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def waiting(self) -> bool:
        """Whether something is still to be written."""
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
        except BlockingIOError:  # our caller made it non-blocking
            pass
        except OSError:
            self.broken = True
            self._waiting.clear()


class Source:
    """The reading end of a child's output. Owns ``descriptor``."""

    def __init__(
        self, descriptor: int, prefixer: Prefixer, sink: Sink, shown: Callable[[bytes], bytes]
    ) -> None:
        """``shown``: what is left of whole lines."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.sink = sink
        self.open = True
        self._prefixer, self._shown = prefixer, shown

    def read(self) -> bool:
        """Move what is there, at most 64 KiB, to the sink.

        Closes at the end. Returns whether there may be more.
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
        """Close; a child that goes on writing finds a broken pipe, as it would without us."""
        if self.open:
            self.open = False
            self.sink.write(self._shown(self._prefixer.finish()))
            os.close(self.descriptor)


class Pump:
    """Moves all children's output. ``wake`` is a descriptor that ends a wait. Not thread-safe."""

    def __init__(self, wake: int, environment: Mapping[str, str]) -> None:
        self.sources: list[Source] = []
        self._wake = wake
        self._environment = environment
        #: Whether Ctrl-C ends the job: then processes need not say of each other that it has.
        self.interrupted = False
        out = Sink(1)
        # One sink if both are the same terminal or file, or pieces of lines would mix.
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
        """Send what comes from ``descriptor`` to our output ``target`` (1 or 2) under the child's
        ``name``.

        Takes the descriptor over.

        ``messages``: marker and receiver of an :class:`Announcer`. ``listen``: of an
        :class:`Overheard`.
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
        """Queue a line of our own for standard error."""
        self._sinks[2].write(f"bpsx-run: {line}\n".encode(errors="surrogateescape"))

    @property
    def written(self) -> bool:
        """Whether everything that was queued has been written."""
        return not any(sink.waiting for sink in self._sinks.values())

    def step(self, timeout: float | None) -> None:
        """Wait for something to move, at most ``timeout`` seconds, and move it."""
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
        """Take what the pipes hold, for children that have ended, and close them."""
        for source in self.sources:
            # pipes hold less; a stray process that writes on would keep us here for ever
            for _ in range(64):
                if not source.read():
                    break
            source.close()
        self._flush()


def _empty(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while len(os.read(descriptor, _PIECE)) == _PIECE:
            pass
