"""A collective under way, as ``torch.distributed`` wants to see it."""

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
# PyTorch's C++ side may hold a work whose Python half nobody else holds: DistributedDataParallel
# does, for Join. Without that half its wait() would never return. So works are kept until somebody
# has waited, and small ones a little longer, since Join asks for the result after that. Bounded,
# for scripts that never wait.
_MOST_HELD, _MOST_ENDED, _SMALL = 1024, 64, 4096
_held: dict[int, Work] = {}
_ended: deque[Work] = deque(maxlen=_MOST_ENDED)


class GroupTimeoutError(BpsxError, TimeoutError):
    """A collective has not ended within the process group's timeout.

    It is still under way: its tensors may be written to later.
    """


class Collective:
    """What a collective has begun: handles to wait for, and what is to be done when all have ended,
    in order.
    """

    def __init__(
        self, handles: Sequence[Handle] = (), finish: Callable[[], object] | None = None
    ) -> None:
        self.handles: list[Handle] = list(handles)
        self.finish: list[Callable[[], object]] = [] if finish is None else [finish]

    def add(self, other: Collective) -> None:
        """Make ``other`` a part of this one."""
        self.handles += other.handles
        self.finish += other.finish


@eager_methods
class Work(dist.Work):  # type: ignore[misc]    # PyTorch is not looked into
    """Returned by the collectives of the backend "bpsx". Thread-safe.

    ``what`` names the collective in errors; ``outputs`` is its result; ``timeout``: seconds that
    :meth:`wait` takes at most.
    """

    def __init__(self, what: str, begun: Collective, outputs: list[Any], timeout: float) -> None:
        super().__init__()
        self._what, self._begun, self._outputs, self._timeout = what, begun, outputs, timeout
        self._lock = threading.RLock()
        self._future: torch.futures.Future[list[Any]] | None = None
        self._failure: BpsxError | None = None  # in what comes after the transfer
        _held[id(self)] = self
        if len(_held) > _MOST_HELD:
            # another thread was faster
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):
                del _held[next(iter(_held))]

    def done(self) -> bool:
        """Whether everything has come, well or not. Does not block."""
        return all(h.done() for h in self._begun.handles)

    def wait(self, timeout: timedelta | float | None = _UNSET) -> bool:
        """Wait for the end, at most ``timeout`` or by default the group's timeout; True.

        Raises what made the collective fail (:class:`~bpsx.errors.PeerLostError` and its kin),
        :class:`GroupTimeoutError`.
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
                    f"{self._what} has not ended within the timeout of {limit:g} s"
                    " (init_process_group(timeout=…)); some worker has not called it, or is slow"
                ) from e
        try:
            self._finish()
        finally:
            self._let_go()
        return True

    def _finish(self) -> None:
        """Bring what has come to where it belongs, once.

        Raises what has gone wrong in that, every time.
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
        """Somebody knows how it ended."""
        if _held.pop(id(self), None) and all(
            isinstance(t, torch.Tensor) and t.nbytes <= _SMALL for t in self._outputs
        ):
            _ended.append(self)

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not; its outputs are complete then.

        Does not block.
        """
        if not self.done():
            return False
        self.exception()
        return True

    def is_success(self) -> bool:
        """Whether it has ended well. Does not block."""
        return self.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """What made it fail; None if nothing has, so far. Does not block."""
        try:
            if self.done():
                self.wait()
        except Exception as e:
            return e
        return None

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def result(self) -> list[Any]:
        """The output tensors, after :meth:`wait`."""
        return self._outputs

    def source_rank(self) -> int:
        """Refused: nothing is received from one worker only."""
        raise RuntimeError('source_rank: the backend "bpsx" has no recv')

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """A future of the output tensors. Its error is a RuntimeError with bpsx's text."""
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
    """A work as a :class:`~bpsx.torch.ops.Handle`; its timeout is its own."""

    def __init__(self, work: Work) -> None:
        self._work, self._end = work, time.monotonic() + work._timeout

    def done(self) -> bool:
        return self._work.done()

    def wait(self, timeout: float | None = None) -> Any:
        return self._work.wait(max(1e-3, self._end - time.monotonic()))
