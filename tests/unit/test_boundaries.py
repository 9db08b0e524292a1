"""A worker's boundaries: what its script meets there, without a scheduler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bpsx.session.boundaries import Boundaries, Change
from bpsx.session.states import Event, Life, Lifetime


class Interrupted(Exception):
    """Raised by the signal's handler."""


@pytest.fixture
def struck() -> Iterator[threading.Event]:
    """An event that the first SIGUSR1 sets, whose handler raises :class:`Interrupted`."""
    found = threading.Event()

    def interrupt(*_: Any) -> None:
        if not found.is_set():
            found.set()
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield found
    signal.signal(signal.SIGUSR1, before)


class Worker:
    """A worker that is to stop at its next boundary."""

    def __init__(self) -> None:
        self.life, self.sent = Lifetime(), list[str]()
        self.life.move(Event.BEGUN)
        self.boundaries = Boundaries(self.life)
        self.call_meeting(0)
        self.said = threading.Event()  # HERE

    def send(self, kind: str, **more: Any) -> None:
        self.sent.append(f"{kind} {more['boundary']}" if kind == "AT" else kind)
        if kind == "HERE":
            self.said.set()

    def call_meeting(self, passed: int) -> None:
        self.boundaries.hear({"type": "SOON", "meeting": passed}, self.send)
        meet = {"type": "MEET", "boundary": passed + 1, "tells": False}
        self.boundaries.hear(meet, self.send)

    def pass_one(self) -> Change:
        return self.boundaries.pass_one(lambda: None, self.send, lambda: "")

    def interrupt_here(self, struck: threading.Event) -> None:
        """Pass a boundary; a signal comes when this worker has stopped there."""
        main = threading.get_ident()

        def strike() -> None:
            self.said.wait()
            with self.life.lock:  # the main thread has let go of it, so it waits
                pass
            # A signal that comes just before a thread blocks does not wake it.
            while not struck.wait(0.02):
                signal.pthread_kill(main, signal.SIGUSR1)

        thread = threading.Thread(target=strike)
        thread.start()
        with pytest.raises(Interrupted):
            self.pass_one()
        thread.join()


@pytest.mark.parametrize("ends_before", [False, True])
def test_a_call_after_an_interrupt_goes_on_with_the_same_boundary(struck, ends_before) -> None:
    worker = Worker()
    worker.interrupt_here(struck)
    worker.boundaries.lose([3])
    end = threading.Thread(target=lambda: worker.boundaries.meet([], False))
    if ends_before:
        end.run()
    else:
        threading.Timer(0.2, end.start).start()
    assert worker.pass_one() == Change(lost=(3,))
    assert worker.life.state is Life.RUNNING
    assert worker.pass_one() == Change()
    worker.call_meeting(2)
    assert worker.sent == ["AT 0", "HERE", "AT 2"]


def test_a_worker_whose_job_has_failed_does_not_stop() -> None:
    worker = Worker()
    worker.life.move(Event.JOB_FAILS)
    assert worker.pass_one() == Change()
    assert worker.life.state is Life.FAILED
