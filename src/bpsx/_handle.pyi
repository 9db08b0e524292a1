"""One push_pull under way; see ``_handle.pyx``."""

from typing import Any

from bpsx.local._cuda import Gpu

class Handle:
    """One push_pull under way. Thread-safe."""

    result: Any
    #: On a GPU: its memory is freed in the order of the stream that made it, as PyTorch's is, and can be let go when that has met the end.
    by_stream: bool
    @property
    def name(self) -> str: ...
    @property
    def gpu(self) -> Gpu | None: ...
    def done(self) -> bool:
        """Whether the operation has ended, well or not. Does not block."""
    def wait(self, timeout: float | None = None) -> Any:
        """The result. Raises :class:`~bpsx.errors.BpsxError`, or :class:`TimeoutError` after ``timeout`` seconds."""
