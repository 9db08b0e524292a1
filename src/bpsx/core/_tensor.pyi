from collections.abc import Collection, Sequence

from bpsx._core import Core
from bpsx.compression.spec import CompressionSpec
from bpsx.core._handle import Handle
from bpsx.core.declared_state import DeclaredEvent, DeclaredState
from bpsx.local._cuda import Gpu

def waiting(
    tensors: Collection[Tensor], age_s: float, everything_ns: int
) -> list[tuple[str, int, int, float, float]]: ...

class Tensor:
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
        matrix: object = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def code_on(self, gpu: Gpu, coders: Sequence[object]) -> None: ...
    def state(self, saved: list[bytes] | None = None) -> list[bytes]: ...
    @property
    def server_bytes(self) -> int: ...
    @property
    def common_bytes(self) -> int: ...

class CommitGroup:
    def __init__(self, core: Core) -> None: ...
    def seal(self) -> None: ...

class Declaration:
    #: The compression, or None.
    codec: CompressionSpec | None
    #: None: not placed yet.
    tensor: Tensor | None
    #: Prepared handles that wait for the placement.
    pending: list[Handle]
    #: push_pulls that have begun with this declaration.
    uses: int
    #: ... since all workers count from zero.
    count: int
    #: Most of these; -1: no bound.
    last: int

    def __init__(
        self,
        generation: int,
        shape: tuple[int, ...],
        dtype: int,
        nbytes: int,
        codec: CompressionSpec | None = None,
    ) -> None: ...
    @property
    def state(self) -> DeclaredState: ...
    def move(self, event: DeclaredEvent) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def take(
        self, shape: tuple[int, ...], dtype: int, codec: CompressionSpec | None
    ) -> Tensor | None: ...
    def count_use(self) -> bool: ...
    def bound(self, last: int) -> bool: ...
