"""A bpsx worker that enters stages of a job on command, and reports when and how the stage's call
ended.

``bench trust`` and ``bench soak`` use it.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import bpsx
from bench.child import serve
from bench.machine import rss_bytes
from bpsx.api.verbs import session

_LARGE = 8_000_000
_staged = threading.Event()
_ended: list[tuple[float, str, str]] = []
_thread: threading.Thread | None = None


class _Heard(logging.Handler):
    """Log handler that sets the event when the scheduler has replied.

    From then on this process waits for the others.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if "known to the" in record.getMessage():
            _staged.set()


def init(port: int | None = None) -> float:
    """Join a job. Returns the seconds it took."""
    if port is not None:
        os.environ["DMLC_PS_ROOT_PORT"] = str(port)
    before = time.perf_counter()
    bpsx.init()
    return time.perf_counter() - before


def leave() -> float:
    """Leave the job. Returns the seconds it took."""
    before = time.perf_counter()
    bpsx.shutdown()
    return time.perf_counter() - before


def exchange(rounds: int = 1) -> None:
    """Make a few sums, and check them."""
    whole = bpsx.size() * (bpsx.size() + 1) // 2
    for i in range(rounds):
        for size in (1, 1000, 100_000):
            found = bpsx.push_pull(
                np.full(size, bpsx.rank() + 1, np.float32), name=f"x{size}", average=False
            )
            if not (found == whole).all():
                raise ValueError(f"round {i}: a wrong sum of {size} elements")


def begin(stage: str) -> None:
    """Enter the call of ``stage`` in a new thread; returns once the call is in progress."""
    global _thread
    _staged.clear()
    _ended.clear()
    if stage == "init":
        logger = logging.getLogger("bpsx.link")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(_Heard())
    _thread = threading.Thread(target=_run, args=(stage,), name="bench-stage", daemon=True)
    _thread.start()
    if not _staged.wait(60):
        raise TimeoutError(f"stage {stage} was not reached")


def _run(stage: str) -> None:
    try:
        _STAGES[stage]()
        _ended.append((time.monotonic(), "", "ended well"))
    except Exception as e:
        _ended.append((time.monotonic(), type(e).__name__, str(e)))


def _push() -> None:
    while True:
        _begun(_LARGE).wait()


def _shutdown() -> None:
    handle = _begun(1000)
    bpsx.shutdown()
    handle.wait()


def _idle() -> None:
    _staged.set()
    while not session().failure:
        time.sleep(0.001)
    bpsx.push_pull(np.ones(1, np.float32), name="after")


def _begun(size: int) -> Any:
    """Return a push_pull in progress, of which some message has been sent."""
    before = session().counters()["messages_sent"]
    handle = bpsx.push_pull_async(np.ones(size, np.float32), name="stage")
    while session().counters()["messages_sent"] == before and not bpsx.poll(handle):
        time.sleep(0.001)
    _staged.set()
    return handle


_STAGES = {
    "init": bpsx.init,
    "push": _push,
    "pull": lambda: _begun(1000).wait(),
    "idle": _idle,
    "shutdown": _shutdown,
}


def ended(timeout_s: float) -> tuple[float, str, str]:
    """Return when the stage's call ended, and its exception's type and text.

    The time is of the monotonic clock, which all processes of a machine share.
    """
    assert _thread is not None
    _thread.join(timeout_s)
    if not _ended:
        raise TimeoutError(f"the call has not ended after {timeout_s:g} s")
    return _ended[0]


def resources() -> dict[str, int]:
    """Return the amounts that a leak would increase.

    They are descriptors, threads, resident bytes, child processes, and objects of the garbage
    collector.
    """
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss": rss_bytes(os.getpid()),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "objects": len(gc.get_objects()),
    }


if __name__ == "__main__":
    serve(
        {
            "init": init,
            "leave": leave,
            "exchange": exchange,
            "begin": begin,
            "ended": ended,
            "resources": resources,
        }
    )
    bpsx.shutdown()
