"""A GPU and NCCL for the core; see ``_cuda.pyx``."""

from types import TracebackType
from typing import Any

#: The name or path by which :meth:`Gpu.open_nccl` looks for NCCL among the loaded libraries.
NCCL: str

class Moment:
    """An event recorded by :meth:`Gpu.moment`, which belongs to this object as long as it lives."""

    @property
    def event(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def number(self) -> int:
        """Sequence number of this moment on its GPU, from 1."""

class Gpu:
    """One GPU of this process. ``with`` makes its context the thread's. Thread-safe.

    Raises :class:`~bpsx.errors.ConfigError` without a CUDA driver or for a GPU that does not exist,
    :class:`~bpsx.errors.DeviceError` when the CUDA driver fails.
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
        """Text of the core's first failure with the GPU, or an empty string."""
    @property
    def usable(self) -> bool:
        """Whether it is not closed and this is not a forked child."""
    def abi(self) -> Any:
        """Return the core's function table as a capsule, valid as long as this object."""
    def moment(self, stream: int, what: str) -> Moment:
        """Record the point at which ``stream`` will have finished its queued work.

        ``what``: name of the first input that the stream makes, for errors. Raises
        :class:`~bpsx.errors.ConfigError` if the stream is being captured into a CUDA graph.
        """
    def number_of(self, stream: int) -> int:
        """Return a number from 1 that no other stream ever has; 0 if CUDA does not provide one."""
    def event(self) -> int:
        """Return an unused event; :meth:`give` returns it to the pool."""
    def events(self, n: int) -> list[int]:
        """Return ``n`` unused events."""
    def give(self, event: int) -> None:
        """Return an event to the pool."""
    def record(self, event: int, stream: int) -> None:
        """Record the event after the work that ``stream`` has queued so far."""
    def wait(self, stream: int, event: int) -> None:
        """Make later work of ``stream`` wait for the event.

        The caller does not wait. Raises :class:`~bpsx.errors.ConfigError` if the stream is being
        captured into a CUDA graph.
        """
    def come(self, event: int) -> bool:
        """Return whether an event has fired."""
    @property
    def aside(self) -> int:
        """A stream of our own for kernels that precede the core's work."""
    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy on ``stream``."""
    def settle(self, stream: int) -> None:
        """Wait until ``stream`` has finished all queued work.

        Raises :class:`~bpsx.errors.DeviceError`.
        """
    def memory(self, nbytes: int) -> int:
        """Allocate zeroed memory on the GPU until :meth:`close`; return its address."""
    def move(self, to: int, source: int, nbytes: int) -> None:
        """Copy from or to the host, and wait for the end."""
    def open_nccl(self) -> int:
        """Find NCCL among the loaded libraries; return its version.

        Raises :class:`~bpsx.errors.ConfigError`.
        """
    def unique_id(self) -> bytes:
        """Return an id for a communicator's processes to share. Call :meth:`open_nccl` first."""
    def join(self, unique_id: bytes, rank: int, size: int, most: int, rings: int = 0) -> None:
        """Join the communicator as one of ``size`` processes; waits for the others.

        ``most``: bytes of a partition. ``rings``: minimum number of channels; 0 lets NCCL decide.
        """
    def divides(self, dtype: int) -> bool:
        """Return whether there is a division kernel for integers of that dtype code."""
    def take_divider(self, dtype: int, kernel: int, threads: int) -> None:
        """Set the division kernel of a dtype code.

        ``kernel``: CUDA's handle of a kernel with the arguments (address, elements, divisor), for
        any number of blocks. ``threads``: threads of a block.
        """
    def made_ready(self) -> None:
        """Mark the communicator as ready, after all processes have joined: the core may start."""
    def spoil(self, places: list[tuple[int, int]]) -> None:
        """Overwrite memory, (address, bytes) each, with one bits, which are NaN in floats.

        Waits for the end, for a second at most.
        """
    def abort(self) -> None:
        """Abort work on the GPU that waits for another process. Any thread. Idempotent."""
    def close(self) -> None:
        """Release everything, after the core has been closed. Idempotent."""

def where(address: int) -> int:
    """Return the GPU that has the memory at ``address``, or -1 if it is not a GPU's."""
