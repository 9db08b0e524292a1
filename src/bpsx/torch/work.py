"""Work objects of collectives in flight, as ``torch.distributed`` expects them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bpsx.errors import BpsxError
from bpsx.torch.dynamo import eager_methods
from bpsx.torch.futures import COMPLETER
from bpsx.torch.ops import Handle

_UNSET = timedelta(0)
# PyTorch's C++ side may hold a work whose Python object has no other reference, as
# DistributedDataParallel does for Join. Without the Python object its wait() would never return. So
# each work is kept until it has been waited for. Small ones are kept a little longer, since Join
# asks for the result afterwards. The number is bounded, for scripts that never wait.
_MOST_HELD, _MOST_ENDED, _SMALL = 1024, 64, 4096
_held: dict[int, Work] = {}
_ended: deque[Work] = deque(maxlen=_MOST_ENDED)


class GroupTimeoutError(BpsxError, TimeoutError):
    """A collective has not ended within the process group's timeout.

    It is still in flight: its tensors may be written to later.
    """


class Collective:
    """Handles that a collective has started, and actions to run in order when all have ended."""

    def __init__(
        self, handles: Sequence[Handle] = (), finish: Callable[[], object] | None = None
    ) -> None:
        self.handles: list[Handle] = list(handles)
        self.finish: list[Callable[[], object]] = [] if finish is None else [finish]

    def add(self, other: Collective) -> None:
        """Make ``other`` a part of this collective."""
        self.handles += other.handles
        self.finish += other.finish


@eager_methods
class Work(dist.Work):  # type: ignore[misc]    # mypy does not follow torch
    """Work object returned by the collectives of the backend "bpsx". Thread-safe.

    ``what``: name of the collective in errors. ``outputs``: its result. ``timeout``: limit of
    :meth:`wait`, in seconds.
    """

    def __init__(self, what: str, begun: Collective, outputs: list[Any], timeout: float) -> None:
        super().__init__()
        self._what, self._begun, self._outputs, self._timeout = what, begun, outputs, timeout
        self._lock = threading.RLock()
        self._future: torch.futures.Future[list[Any]] | None = None
        self._failure: BpsxError | None = None  # in the actions after the transfer
        _held[id(self)] = self
        if len(_held) > _MOST_HELD:
            # Another thread removed it first.
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):
                del _held[next(iter(_held))]

    def done(self) -> bool:
        """Return whether all handles have ended, successfully or not, without blocking."""
        return all(h.done() for h in self._begun.handles)

    def wait(self, timeout: timedelta | float | None = _UNSET) -> bool:
        """Wait for the end, at most ``timeout`` or by default the group's timeout. Returns True.

        Raises the error that made the collective fail (such as
        :class:`~bpsx.errors.PeerLostError`), :class:`GroupTimeoutError`.
        """
        given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or 0.0
        limit = given if given > 0 else self._timeout
        end = time.monotonic() + limit
        for handle in self._begun.handles:
            try:
                handle.wait(max(0.0, end - time.monotonic()))
            except BpsxError:
                self._let_go()
                raise
            except TimeoutError as e:
                raise GroupTimeoutError(
                    f"{self._what} did not end within the timeout of {limit:g} s"
                    " (init_process_group(timeout=…)); some worker has not called it, or is slow"
                ) from e
        try:
            self._finish()
        finally:
            self._let_go()
        return True

    def _finish(self) -> None:
        """Run the actions that complete the outputs, once.

        Raises their failure, on every call.
        """
        with self._lock:
            finish, self._begun.finish = self._begun.finish, []
            try:
                with torch.no_grad():
                    for act in finish:
                        act()
            except BpsxError as e:
                self._failure = e
            if self._failure is not None:
                raise self._failure

    def _let_go(self) -> None:
        """Release the work: its outcome is known to a caller."""
        if _held.pop(id(self), None) and all(
            isinstance(t, torch.Tensor) and t.nbytes <= _SMALL for t in self._outputs
        ):
            _ended.append(self)

    def is_completed(self) -> bool:
        """Return whether the collective has ended, successfully or not, without blocking.

        Its outputs are complete then.
        """
        if not self.done():
            return False
        self.exception()
        return True

    def is_success(self) -> bool:
        """Return whether it has ended successfully, without blocking."""
        return self.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error that made it fail; None if there is none so far. Does not block."""
        try:
            if self.done():
                self.wait()
        except Exception as e:
            return e
        return None

    def synchronize(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def result(self) -> list[Any]:
        """Return the output tensors, which are valid after :meth:`wait`."""
        return self._outputs

    def source_rank(self) -> int:
        """Raise :class:`RuntimeError`: there is no receive from one worker."""
        raise RuntimeError('source_rank: the backend "bpsx" does not support recv')

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a future of the output tensors. Its error is a RuntimeError with bpsx's text."""
        with self._lock:
            if self._future is None:
                self._future = COMPLETER.future_of(
                    Waiting(self),
                    lambda _: self._outputs,
                    at_once=not self._begun.finish and self.done(),
                    device=next(
                        (t.device for t in self._outputs if isinstance(t, torch.Tensor)), None
                    ),
                )
            return self._future


class Waiting:
    """A work as a :class:`~bpsx.torch.ops.Handle`, with the work's own timeout."""

    def __init__(self, work: Work) -> None:
        self._work, self._end = work, time.monotonic() + work._timeout

    def done(self) -> bool:
        return self._work.done()

    def wait(self, timeout: float | None = None) -> Any:
        return self._work.wait(max(1e-3, self._end - time.monotonic()))
