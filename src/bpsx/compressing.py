"""Which names of a session are compressed and how, and what the core needs for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bpsx._core import Core, Tensor
from bpsx.compression import FLOATS, NONE, Compression, Momentum, check_fits, effective, make, stream, warm
from bpsx.config import Config
from bpsx.dtypes import BY_CODE
from bpsx.errors import ConfigError
from bpsx.kernels.outside import import_compressors
from bpsx.neighbourhood import Neighbourhood
from bpsx.partitioner import whole_pages
from bpsx.pipeline import Place, stages_for


class Compressing:
    """Of one session, under whose lock :meth:`declare` is called; the rest may be called from any thread.

    Raises :class:`~bpsx.errors.ConfigError` on construction for compressors that cannot be imported.
    """

    def __init__(self, config: Config, near: Neighbourhood) -> None:
        import_compressors(config.compressors)
        self._config, self._near = config, near
        self._of: dict[str, Compression] = {}
        self._momenta: dict[tuple[str, int, int], Momentum] = {}

    def declare(self, name: str, compression: Compression) -> None:
        """Say how sums of ``name`` travel from now on. Raises :class:`~bpsx.errors.ConfigError` in asynchronous training."""
        if compression != NONE and self._config.asynchronous:
            raise ConfigError(f"{name!r}: compression={compression.text()} with BYTEPS_ENABLE_ASYNC=1: servers add to values of one shape")
        if compression != self._of.get(name, NONE):     # what is the same stays the same object
            self._of[name] = compression

    @property
    def any(self) -> bool:
        """Whether anything has been declared to be compressed."""
        return bool(self._of)

    def of(self, name: str, dtype: int, nbytes: int) -> Compression | None:
        """How a tensor of this name travels; always the same object until the name is declared anew. None: as it is."""
        given = self._of.get(name)
        return None if given is None else effective(given, BY_CODE[dtype].name, nbytes, self._config.min_compress_bytes)

    def with_momentum(
        self, name: str, dtype: int, nbytes: int, used: Compression | None, source: Any, owner: object,
    ) -> tuple[Any, object]:
        """What to push for ``source``, as :meth:`Core.prepare` takes it, and what keeps it alive.

        Something else only if nobody later adds momentum to it, which must have some: to what is not compressed, and to the shares of a machine whose
        sum is compressed.
        """
        given = self._of.get(name)
        kind = BY_CODE[dtype]
        later = self._config.distributed and self._near.place is Place.DIRECT and used is given
        if given is None or not given.momentum or later or kind.name not in FLOATS:
            return source, owner
        key = name, dtype, nbytes
        if key not in self._momenta:
            self._momenta[key] = Momentum(kind.name, nbytes // kind.itemsize)
        made = self._momenta[key].add(source[0] if isinstance(source, tuple) else np.asarray(source).ctypes.data, given.mu)
        return (made.ctypes.data, nbytes), (made, source, owner)

    def check(self, name: str, dtype: int, nbytes: int, used: Compression) -> None:
        """Raise :class:`~bpsx.errors.ConfigError` if such a tensor cannot be compressed like that; else see to it that the code is there.

        It is compiled here, in the caller's thread, and not in the one that hears the scheduler.
        """
        check_fits(used, BY_CODE[dtype].name, nbytes, repr(name), whole_pages(self._config.partition_bytes))
        if self._config.distributed and self._near.has_lanes:
            warm(used, BY_CODE[dtype].name)

    def tensor(
        self, core: Core, name: str, dtype: int, parts: list[tuple[int, int, int, int, int]], generation: int, used: Compression | None,
    ) -> Tensor:
        """What the core knows of a declared name. Only who speaks to servers compresses."""
        codec = used if self._near.has_lanes else None
        stages = stages_for("cpu", codec is not None, self._near.place)
        if codec is None:
            return Tensor(name, dtype, parts, stages, generation, "" if used is None else used.text())
        core.open_pool(self._config.compress_threads)
        if self._near.place is not Place.DIRECT:    # each process has added it to its own share
            codec = replace(codec, momentum="")
        made = [make(codec, BY_CODE[dtype].name, length, stream(name.encode(), i), self._near.sender) for i, (*_, length) in enumerate(parts)]
        return Tensor(name, dtype, parts, stages, generation, codec.text(), made)
