"""A declared tensor in the core; see ``_tensor.pyx``."""

from collections.abc import Collection, Sequence

from bpsx.compression.spec import CompressionSpec
from bpsx.core._handle import Handle
from bpsx.local._cuda import Gpu

def waiting(
    tensors: Collection[Tensor], age_s: float, everything_ns: int
) -> list[tuple[str, int, int, float, float]]:
    """Return (name, generation, round, seconds under way, seconds waited for or -1) of push_pulls
    that need other workers and are older than ``age_s`` seconds, the oldest first.

    ``everything_ns``: time from which all are waited for, in ns of the monotonic clock; 0: not.
    """

class Tensor:
    """A declared tensor: its partitions with key, lane and slot. Immutable and thread-safe."""

    def __init__(
        self,
        name: str,
        dtype: int,
        parts: Sequence[tuple[int, int, int, int, int]],
        stages: bytes,
        generation: int = 0,
        codec: str = "",
        made: Sequence[object] = (),
        on_gpu: bytes = b"",
    ) -> None:
        """``parts``: a list of (key, lane, slot, offset, length); offset and length in bytes.

        ``codec``: description of the compression for the servers; ``made``: a
        :class:`bpsx.compression.spec.Made` for each partition. ``on_gpu``: the stages of a
        push_pull on a GPU.
        """
    @property
    def name(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rounds(self) -> int:
        """Number of its push_pulls that have ended, well or not."""
    @property
    def busy(self) -> bool:
        """Whether a push_pull of it is under way, as far as the driver knows."""
    def code_on(self, gpu: Gpu, coders: Sequence[object]) -> None:
        """Compress this tensor on the GPU from now on.

        ``coders``: a :class:`bpsx.compression.gpu.Coder` for each partition. Call before the first
        push_pull there.
        """
    def state(self, saved: list[bytes] | None = None) -> list[bytes]:
        """Return the compression state of each partition, after setting it to ``saved``, if given.

        Not while it is :attr:`busy`.
        """
    @property
    def server_bytes(self) -> int:
        """Bytes of the servers' compression state."""

class Declared:
    """A worker's latest declaration of a name."""

    #: The compression, or None.
    codec: CompressionSpec | None
    #: None: not placed yet.
    tensor: Tensor | None
    #: Prepared handles that wait for the placement.
    pending: list[Handle]
    failed: bool
    #: push_pulls that have begun with this declaration.
    uses: int

    def __init__(
        self,
        generation: int,
        shape: tuple[int, ...],
        dtype: int,
        nbytes: int,
        codec: CompressionSpec | None = None,
    ) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def now(
        self, shape: tuple[int, ...], dtype: int, codec: CompressionSpec | None
    ) -> Tensor | None:
        """Return the tensor, if it is placed and the arguments are unchanged; or None."""
