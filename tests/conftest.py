"""What all tests share: the folder of compiled kernels, and the proof that a test leaves no process
behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("launching")
from support import apart, optional  # noqa: E402  (the folder is beside this file)
from support.forking import nurseries  # noqa: E402

#: Packages that tests need, by how the names of their files begin.
NEEDS = {"test_torch": "torch", "test_tensorflow": "tensorflow", "test_mxnet": "mxnet"}

# Compiled kernels stay in the checkout: a run leaves nothing elsewhere.
os.environ.setdefault("BPSX_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-cache"))


# A script's background jobs inherit an ignored SIGINT: pytest started by one would not hear Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# SIGHUP (ignored under nohup) and SIGQUIT stay ignored, by a handler: unlike SIG_IGN it is not
# inherited, so the processes of the tests begin with the defaults.
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz",
        type=int,
        default=1_000_000,
        metavar="N",
        help="mutated messages that a live server gets (1000000)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        start: reason for start, module in NEEDS.items() if (reason := optional.why_missing(module))
    }
    for item in items:
        for start, reason in missing.items():
            if item.path.name.startswith(start):
                item.add_marker(pytest.mark.skip(reason=reason))
    # One of these takes as long as all others of a folder: it shall not be the last one running.
    items.sort(key=lambda item: item.path.parent.name != "machine")


def pytest_collection_finish() -> None:
    apart.assert_only(apart.IN_PYTEST)


def process_ids() -> set[int]:
    """The processes of this machine; where the kernel lists children, only ours and those of the
    processes that fork for us. To read the state of all took 8 ms of each test.
    """
    ours = {os.getpid(), *nurseries()}
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    found: set[int] = set()
    for parent in ours:
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                found.update(map(int, listed.read_text().split()))
    return found


def children() -> set[int]:
    """Processes whose parent we are, or those that fork for us."""
    found, ours = set(), nurseries()
    for pid in process_ids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) in {os.getpid(), *ours} and fields[0] != "Z":
            found.add(pid)
    return found - ours


@pytest.fixture(autouse=True)
def loggers_stay() -> Iterator[None]:
    """A test that sets the logger up, as ``init()`` does, leaves it as it was: ``caplog`` hears
    nothing of a logger that does not propagate."""
    logger = logging.getLogger("bpsx")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A test leaves no process and no shared-memory name behind."""
    before, names = children(), {p for p in os.listdir("/dev/shm") if "bpsx" in p}
    yield
    assert not children() - before, "the test left processes behind"
    assert not {p for p in os.listdir("/dev/shm") if "bpsx" in p} - names, (
        "the test left names in /dev/shm"
    )
    apart.assert_only(apart.IN_PYTEST)
