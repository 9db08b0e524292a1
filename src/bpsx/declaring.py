"""What a name means to a worker: how it has declared it, and what can be declared at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bpsx._handle import Handle
from bpsx._tensor import Tensor
from bpsx.compression import Compression
from bpsx.errors import ConfigError
from bpsx.placement import PARTS_PER_TENSOR
from bpsx.rendezvous.messages import MAX_NAME


@dataclass
class Declared:
    """A name as this worker has declared it last."""

    generation: int
    shape: tuple[int, ...]
    dtype: int
    nbytes: int
    codec: Compression | None = None        # how it is compressed
    tensor: Tensor | None = None
    pending: list[Handle] = field(default_factory=list)     # prepared, waiting for the placement
    failed: bool = False

    def now(self, shape: tuple[int, ...], dtype: int, codec: Compression | None) -> Tensor | None:
        """What the core knows of it, if it is placed and still means that."""
        fits = self.shape == shape and self.dtype == dtype and self.codec is codec and not self.failed
        return self.tensor if fits else None


def check_name(name: Any, what: str) -> None:
    """Whether the scheduler can take ``name``. Raises :class:`~bpsx.errors.ConfigError`."""
    try:
        length = len(name.encode()) if isinstance(name, str) else 0
    except UnicodeEncodeError:      # half of a surrogate pair
        length = 0
    if not 0 < length <= MAX_NAME:
        raise ConfigError(f"{what}: name {repr(name)[:60]}: a name is a string of 1 to {MAX_NAME} bytes of UTF-8")


def check_new(name: str, nbytes: int, partition_bytes: int) -> None:
    """Whether a tensor can be declared. Raises :class:`~bpsx.errors.ConfigError`."""
    check_name(name, "a tensor to send")
    most = PARTS_PER_TENSOR * partition_bytes
    if nbytes > most:
        raise ConfigError(f"tensor {name!r} has {nbytes} bytes; with BYTEPS_PARTITION_BYTES={partition_bytes} at most {most} are possible")
