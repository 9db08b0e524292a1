"""Which names of a session are compressed and how, and what the core needs for that."""

from __future__ import annotations

from bpsx._core import Core, Tensor
from bpsx.compression import NONE, Compression, check_fits, effective, make, stream, warm
from bpsx.config import Config
from bpsx.dtypes import BY_CODE
from bpsx.errors import ConfigError
from bpsx.neighbourhood import Neighbourhood
from bpsx.pipeline import stages_for


class Compressing:
    """Of one session, under whose lock :meth:`declare` is called; the rest may be called from any thread."""

    def __init__(self, config: Config, near: Neighbourhood) -> None:
        self._config, self._near = config, near
        self._of: dict[str, Compression] = {}

    def declare(self, name: str, compression: Compression) -> None:
        """Say how sums of ``name`` travel from now on. Raises :class:`~bpsx.errors.ConfigError` in asynchronous training."""
        if compression != NONE and self._config.asynchronous:
            raise ConfigError(f"{name!r}: compression={compression.text()} with BYTEPS_ENABLE_ASYNC=1: servers add to values of one shape")
        if compression != self._of.get(name, NONE):     # what is the same stays the same object
            self._of[name] = compression

    def of(self, name: str, dtype: int, nbytes: int) -> Compression | None:
        """How a tensor of this name travels; always the same object until the name is declared anew. None: as it is."""
        given = self._of.get(name)
        return None if given is None else effective(given, BY_CODE[dtype].name, nbytes, self._config.min_compress_bytes)

    def check(self, name: str, dtype: int, nbytes: int, used: Compression) -> None:
        """Raise :class:`~bpsx.errors.ConfigError` if such a tensor cannot be compressed like that; else see to it that the code is there.

        It is compiled here, in the caller's thread, and not in the one that hears the scheduler.
        """
        check_fits(used, BY_CODE[dtype].name, nbytes, repr(name))
        if self._config.distributed and self._near.has_lanes:
            warm(used, BY_CODE[dtype].name)

    def tensor(
        self, core: Core, name: str, dtype: int, parts: list[tuple[int, int, int, int, int]], generation: int, used: Compression | None,
    ) -> Tensor:
        """What the core knows of a declared name. Only who speaks to servers compresses."""
        codec = used if self._near.has_lanes else None
        stages = stages_for("cpu", codec is not None, self._near.place)
        if codec is None:
            return Tensor(name, dtype, parts, stages, generation)
        core.open_pool(self._config.compress_threads)
        made = [make(codec, BY_CODE[dtype].name, length, stream(name.encode(), i), self._near.sender) for i, (*_, length) in enumerate(parts)]
        return Tensor(name, dtype, parts, stages, generation, codec.text(), made)
