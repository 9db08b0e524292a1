"""What a name was declared as, for the core; see ``_tensor.pyx``."""

from collections.abc import Collection, Sequence

from bpsx.compression.spec import Compression
from bpsx.core._handle import Handle
from bpsx.local._cuda import Gpu

def waiting(
    tensors: Collection[Tensor], age_s: float, everything_ns: int
) -> list[tuple[str, int, int, float, float]]:
    """(name, generation, round, seconds, seconds waited for or -1) of push_pulls that need other
    workers and are older than ``age_s`` seconds, the oldest first.

    ``everything_ns``: since when all are waited for; 0: not.
    """

class Tensor:
    """A declared tensor: its partitions with key, lane and slot. Immutable; any thread."""

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
        """``parts``: (key, lane, slot, offset, length) each, a list; offset and length in bytes.

        ``codec``: how it is compressed, for servers; ``made``: a
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
        """How many of its push_pulls have ended, well or not."""
    @property
    def busy(self) -> bool:
        """Whether a push_pull of it is under way, as far as the driver knows."""
    def code_on(self, gpu: Gpu, coders: Sequence[object]) -> None:
        """From now on it is compressed on the GPU, by a :class:`bpsx.compression.gpu.Coder` for
        each partition.

        Before its first push_pull there.
        """
    def state(self, saved: list[bytes] | None = None) -> list[bytes]:
        """What is kept of each compressed partition, once it is what ``saved`` says, if that is
        given.

        Not while it is :attr:`busy`.
        """
    @property
    def server_bytes(self) -> int:
        """How many bytes say what the servers keep of it."""

class Declared:
    """A name as a worker has declared it last."""

    #: How it is compressed.
    codec: Compression | None
    #: None: not placed yet.
    tensor: Tensor | None
    #: Prepared, waiting for the placement.
    pending: list[Handle]
    failed: bool
    #: push_pulls that have begun with it.
    uses: int

    def __init__(
        self,
        generation: int,
        shape: tuple[int, ...],
        dtype: int,
        nbytes: int,
        codec: Compression | None = None,
    ) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def now(self, shape: tuple[int, ...], dtype: int, codec: Compression | None) -> Tensor | None:
        """What the core knows of it, if it is placed and still means that."""
