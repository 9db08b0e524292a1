"""A GPU and NCCL for the core; see ``_cuda.pyx``."""

from types import TracebackType
from typing import Any

#: The name or path by which :meth:`Gpu.open_nccl` looks for NCCL among the loaded libraries.
NCCL: str

class Moment:
    """See :meth:`Gpu.moment`. Its event is its own as long as anybody has it."""

    @property
    def event(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def number(self) -> int:
        """The how many-th of its GPU's it is, from 1."""

class Gpu:
    """One GPU of this process. ``with`` makes its context the thread's. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError` where there is no driver or no such GPU,
    :class:`~bpsx.errors.DeviceError` when the driver fails.
    """

    def __init__(self, ordinal: int) -> None: ...
    def __enter__(self) -> Gpu: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def bus(self) -> str:
        """Its PCI address."""
    @property
    def failure(self) -> str:
        """What has failed first while the core was at it, or an empty string."""
    @property
    def usable(self) -> bool:
        """Whether it has not been closed, and this is not a forked child."""
    def abi(self) -> Any:
        """The table for the core: a capsule, valid as long as this object."""
    def moment(self, stream: int, what: str) -> Moment:
        """When ``stream`` has made the inputs that it has been asked for so far; ``what`` is the
        first of them.

        Raises :class:`~bpsx.errors.ConfigError` if the stream is being captured into a CUDA graph.
        """
    def number_of(self, stream: int) -> int:
        """A number that no other stream has or will have, from 1; 0 if that cannot be known."""
    def event(self) -> int:
        """An event that nobody else has; :meth:`give` takes it back."""
    def events(self, n: int) -> list[int]:
        """So many of them."""
    def give(self, event: int) -> None:
        """Take an event back for the next who asks."""
    def record(self, event: int, stream: int) -> None:
        """The event comes when all that ``stream`` has queued so far is over."""
    def wait(self, stream: int, event: int) -> None:
        """What ``stream`` queues from now on comes after the event.

        The caller does not wait. Raises :class:`~bpsx.errors.ConfigError` if it is being captured
        into a CUDA graph.
        """
    def come(self, event: int) -> bool:
        """Whether an event has come."""
    @property
    def aside(self) -> int:
        """A stream of our own for kernels that come before the core's work."""
    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy on ``stream``."""
    def settle(self, stream: int) -> None:
        """Wait until ``stream`` has done all that was queued on it.

        Raises :class:`~bpsx.errors.DeviceError`.
        """
    def memory(self, nbytes: int) -> int:
        """The address of so many bytes on the GPU, all zero; they stay until :meth:`close`."""
    def move(self, to: int, source: int, nbytes: int) -> None:
        """Copy from the host or to it, and wait for that."""
    def open_nccl(self) -> int:
        """Find NCCL, which somebody has loaded; its version.

        Raises :class:`~bpsx.errors.ConfigError`.
        """
    def unique_id(self) -> bytes:
        """What the processes of a communicator have to share. After :meth:`open_nccl`."""
    def join(self, unique_id: bytes, rank: int, size: int, most: int, rings: int = 0) -> None:
        """Become one of the ``size`` processes of the communicator; waits for the others.

        ``most``: bytes of a partition; ``rings``: channels.
        """
    def divides(self, dtype: int) -> bool:
        """Whether there is a kernel for integers of that code."""
    def take_divider(self, dtype: int, kernel: int, threads: int) -> None:
        """A kernel, CUDA's handle, of (address, elements, divisor), that works with any number of
        blocks of so many threads.
        """
    def made_ready(self) -> None:
        """All have joined: the core may begin."""
    def spoil(self, places: list[tuple[int, int]]) -> None:
        """Fill memory, (address, bytes) each, with ones, which are NaN in floats, and see that
        done, for a second at most.
        """
    def abort(self) -> None:
        """End what waits on the GPU for another process. Any thread. Idempotent."""
    def close(self) -> None:
        """Give everything back, after the core has been closed. Idempotent."""

def where(address: int) -> int:
    """The GPU that has the memory at ``address``, or -1 if it is not a GPU's."""
