"""Which names of a session are compressed and how, and what the core needs for that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bpsx._core import Core
from bpsx.compression.gpu_kernels import GpuKernels
from bpsx.compression.spec import (
    FLOATS,
    NONE,
    Compression,
    Made,
    Momentum,
    check_fits,
    effective,
    make,
    stream,
    warm,
)
from bpsx.compression.state import Saved, check_saved, clear, put, take, until_idle
from bpsx.config import Config
from bpsx.core._handle import Handle
from bpsx.core._tensor import Tensor
from bpsx.dtypes import BY_CODE, BY_NAME
from bpsx.errors import BpsxError, ConfigError
from bpsx.kernels.codecs import codec
from bpsx.kernels.plugins import import_compressors
from bpsx.local.group import Neighbourhood
from bpsx.planning.partitioner import most_bytes
from bpsx.planning.stages import Place, stages_for

if TYPE_CHECKING:
    from bpsx.compression.gpu_kernels import AnyMomentum
    from bpsx.local._cuda import Gpu
    from bpsx.local.devices import OnGpu

log = logging.getLogger("bpsx.compression.spec")


class Remembered(NamedTuple):
    """What a suspended session leaves to the next one: how names are compressed, and what has been
    kept of them.
    """

    compressions: Mapping[str, Compression]
    kept: Mapping[str, Saved]


class Compressing:
    """Of one session, under whose lock :meth:`declare` and :meth:`tensor` are called; the rest may
    be called from any thread.

    Raises :class:`~bpsx.errors.ConfigError` on construction for compressors that cannot be
    imported.
    """

    def __init__(
        self,
        config: Config,
        near: Neighbourhood,
        current: Callable[[str], Tensor | None],
        remembered: Remembered | None = None,
    ) -> None:
        """``current``: what a name was last used as."""
        import_compressors(config.compressors)
        self._current = current
        self._config, self._near = config, near
        self._of: dict[str, Compression] = dict(remembered.compressions) if remembered else {}
        # by name, dtype, bytes, and whether it is on the GPU
        self._momenta: dict[tuple[str, int, int, bool], AnyMomentum] = {}
        # what says of saved state whether it is that tensor's
        self._meanings: dict[Tensor, Saved] = {}
        self._kept: dict[str, tuple[Saved, bool]] = (
            {n: (s, True) for n, s in remembered.kept.items()} if remembered else {}
        )
        self._begun: set[str] = set()  # names that an optimizer has in charge
        self._gpu_kernels = GpuKernels()
        # what servers have been told to keep, and have not answered
        self._told: list[Handle] = []
        self.core: Core  # set by the session, which makes it later

    def declare(self, name: str, compression: Compression) -> None:
        """Say how sums of ``name`` travel from now on.

        Raises :class:`~bpsx.errors.ConfigError` in asynchronous training.
        """
        if compression != NONE and self._config.asynchronous:
            raise ConfigError(
                f"{name!r}: compression={compression.text()} with BYTEPS_ENABLE_ASYNC=1: servers"
                " add to values of one shape"
            )
        if compression != self._of.get(name, NONE):  # what is the same stays the same object
            self._warn_of(compression)
            self._of[name] = compression

    def begin(self, name: str, compression: Compression | None) -> None:
        """An optimizer takes charge of ``name``, which another one may have had: nothing is kept
        from that.

        On all workers, while no sum of it is under way. None: not compressed, unless the script has
        declared it to be. Raises as :meth:`declare`.
        """
        if compression is not None or name in self._begun:
            self.declare(name, compression or NONE)
            self.forget([name])
        self._begun.discard(name)
        if compression is not None:
            self._begun.add(name)

    def _warn_of(self, compression: Compression) -> None:
        """Once, of residuals that may grow."""
        if (
            not compression.ef
            or compression in self._of.values()
            or codec(compression.compressor).shrinks(dict(compression.options))
        ):
            return
        log.warning(
            "compression=%s: what this compressor leaves over may be more than what it was given,"
            " so the residual of ef=%r can grow from step to step without end: dithering needs"
            " normalize='max' and k of at least 2 for that, and without ef keeps the mean anyway",
            compression.text(),
            compression.ef,
        )

    @property
    def any(self) -> bool:
        """Whether anything has been declared to be compressed."""
        return bool(self._of)

    def of(self, name: str, dtype: int, nbytes: int) -> Compression | None:
        """How a tensor of this name travels; always the same object until the name is declared
        anew.

        None: as it is.
        """
        given = self._of.get(name)
        return (
            None
            if given is None
            else effective(given, BY_CODE[dtype].name, nbytes, self._config.min_compress_bytes)
        )

    def with_momentum(
        self,
        name: str,
        dtype: int,
        nbytes: int,
        used: Compression | None,
        source: Any,
        owner: object,
        on: OnGpu | None = None,
    ) -> tuple[Any, object, OnGpu | None]:
        """What to push for ``source``, as :meth:`Core.prepare` takes it, what keeps it alive, and
        where it is.

        Something else only if nobody later adds momentum to it, which must have some: to what is
        not compressed, and to the shares of a machine whose sum is compressed.
        """
        given = self._of.get(name)
        kind = BY_CODE[dtype]
        later = self._config.distributed and self._near.place is Place.DIRECT and used is given
        if given is None or not given.momentum or later or kind.name not in FLOATS:
            return source, owner, on
        key = name, dtype, nbytes, on is not None
        if key not in self._momenta:
            self._momenta[key] = self._gpu_kernels.momentum(name, kind.name, nbytes, on)
            self._put_momentum(name, self._momenta[key], {"dtype": kind.name, "nbytes": nbytes})
        momentum = self._momenta[key]
        if not isinstance(momentum, Momentum):
            assert on is not None
            address, on = momentum.add(source[0], given.mu, on)
            return (address, nbytes), owner, on
        made = momentum.add(
            source[0] if isinstance(source, tuple) else np.asarray(source).ctypes.data, given.mu
        )
        return (made.ctypes.data, nbytes), (made, source, owner), None

    def check(self, name: str, dtype: int, nbytes: int, used: Compression) -> None:
        """Raise :class:`~bpsx.errors.ConfigError` if such a tensor cannot be compressed like that;
        else see to it that the code is there.

        It is compiled here, in the caller's thread, and not in the one that hears the scheduler.
        """
        check_fits(
            used,
            BY_CODE[dtype].name,
            nbytes,
            repr(name),
            most_bytes(self._config.partition_bytes, compressed=True),
        )
        if self._config.distributed and self._near.has_lanes:
            warm(used, BY_CODE[dtype].name)

    def tensor(
        self,
        name: str,
        dtype: int,
        parts: list[tuple[int, int, int, int, int]],
        generation: int,
        used: Compression | None,
        gpu: Gpu | None = None,
    ) -> Tensor:
        """What the core knows of a declared name. Only who speaks to servers compresses.

        ``gpu``: where it is when it is first pushed.
        """
        given = used if self._near.has_lanes else None
        stages, on_gpu = (
            stages_for(device, given is not None, self._near.place) for device in ("cpu", "gpu")
        )
        if given is None:
            return Tensor(
                name,
                dtype,
                parts,
                stages,
                generation,
                "" if used is None else used.text(),
                on_gpu=on_gpu,
            )
        self.core.open_pool(self._config.compress_threads)
        if self._near.place is not Place.DIRECT:  # each process has added it to its own share
            given = replace(given, momentum="")
        made = [
            make(given, BY_CODE[dtype].name, length, stream(name.encode(), i), self._near.sender)
            for i, (*_, length) in enumerate(parts)
        ]
        tensor = Tensor(name, dtype, parts, stages, generation, given.text(), made, on_gpu)
        if gpu is not None:
            self._code_on(gpu, tensor, given, dtype, made)
        lengths = [length for *_, length in parts]
        self._meanings[tensor] = {
            "dtype": BY_CODE[dtype].name,
            "nbytes": sum(lengths),
            "codec": given.text(),
            "lengths": lengths,
        }
        self._put(tensor)
        return tensor

    def _code_on(
        self, gpu: Gpu, tensor: Tensor, given: Compression, dtype: int, made: list[Made]
    ) -> None:
        """Have a tensor compressed on the GPU; on the host, if its kernels cannot be had."""
        coders = self._gpu_kernels.coders(gpu, tensor.name, given, BY_CODE[dtype].name, made)
        if coders is not None:
            self.core.open_coders()
            tensor.code_on(gpu, coders)

    # ---- for checkpoints

    def save(self, names: Iterable[str]) -> dict[str, Saved]:
        """What is kept of those of ``names`` of which anything is: see
        :data:`bpsx.compression.state.Saved`.

        Call it while none of them is under way.

        Raises :class:`~bpsx.errors.BpsxError` if one does not end within ``BPSX_SHUTDOWN_TIMEOUT``.
        """
        wanted = list(dict.fromkeys(names))
        tensors = [tensor for tensor in map(self._tensor_of, wanted) if tensor is not None]
        for tensor in tensors:
            until_idle(self.core, tensor, self._config.shutdown_timeout)
        taken = take(self.core, tensors, self._near.sender == 0)
        found: dict[str, Saved] = {
            tensor.name: {**self._meanings[tensor], **taken[tensor.name]} for tensor in tensors
        }
        for name in wanted:
            if name in self._kept and name not in found:  # never pushed since
                found[name] = dict(self._kept[name][0])
            for (whose, dtype, nbytes, _), momentum in list(self._momenta.items()):
                if whose == name:
                    found[name] = {
                        "dtype": BY_CODE[dtype].name,
                        "nbytes": nbytes,
                        **found.get(name, {}),
                        "momentum": momentum.taken(),
                    }
            if name in found:
                found[name].setdefault("rank", self._config.rank)
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put back what :meth:`save` has made, now or when a name is first pushed.

        What another worker has saved gives its counters only.

        Waits for push_pulls of these names that are under way, and for the servers. Raises
        :class:`~bpsx.errors.ConfigError` for what is no such state, and whatever makes servers
        fail.
        """
        checked = {name: check_saved(name, state) for name, state in saved.items()}
        others = sorted(
            {
                s["rank"]
                for s in checked.values()
                if s.get("rank") != self._config.rank and "rank" in s
            }
        )
        if others:
            log.warning(
                "worker %d: residuals and momentum in the state given are those of worker %s, and"
                " begin anew here: each worker has to save and load a state of its own",
                self._config.rank,
                ", ".join(map(str, others)),
            )
        for name, state in checked.items():
            self._kept[name] = state, state.get("rank", self._config.rank) == self._config.rank
            for (whose, dtype, nbytes, _), momentum in list(self._momenta.items()):
                if whose == name:
                    momentum.put(0.0)
                    self._put_momentum(
                        name, momentum, {"dtype": BY_CODE[dtype].name, "nbytes": nbytes}
                    )
            tensor = self._tensor_of(name)
            if tensor is not None:
                until_idle(self.core, tensor, self._config.shutdown_timeout)
                self._put(tensor)
        self._wait_for_servers()

    def forget(self, names: Iterable[str]) -> None:
        """Let residuals, momentum and counters of ``names`` begin anew, at servers too if this is
        worker 0.

        On all workers.

        Raises as :meth:`restore`.
        """
        for name in names:
            self._kept.pop(name, None)
            for key in [key for key in self._momenta if key[0] == name]:
                del self._momenta[key]
            tensor = self._tensor_of(name)
            if tensor is not None:
                until_idle(self.core, tensor, self._config.shutdown_timeout)
                handle = clear(self.core, tensor, self._near.sender == 0)
                if handle is not None:
                    self._told.append(handle)
        self._wait_for_servers()

    def _wait_for_servers(self) -> None:
        """Until they keep what they have been told to. Raises what has made them fail."""
        told, self._told = self._told, []
        for handle in told:
            handle.wait()

    def _tensor_of(self, name: str) -> Tensor | None:
        """What a name is compressed as at present, if this process has anything of it."""
        tensor = self._current(name)
        return tensor if tensor in self._meanings else None

    def remembered(self) -> Remembered:
        """For the next session. Without what is kept, and a warning, if it cannot be had."""
        try:
            kept = self.save(self._of)
        except BpsxError as e:
            log.warning("residuals and momentum begin anew after suspend(): %s", e)
            kept = {}
        return Remembered(dict(self._of), kept)

    def check_told(self) -> None:
        """Once a second: whether servers keep what they have been told to."""
        for handle in [h for h in self._told if h.done()]:
            with suppress(ValueError):  # another thread waits for it
                self._told.remove(handle)
            try:
                handle.wait()
            except BpsxError as e:
                log.error(
                    "%r: the servers have not taken what was saved of it, and begin anew: %s",
                    handle.name,
                    e,
                )

    def _put(self, tensor: Tensor) -> None:
        """Put back what has been saved of a tensor, if it is that one's."""
        if "worker" not in self._kept.get(tensor.name, ({}, True))[0]:
            return
        saved, own = self._kept.pop(tensor.name)
        meaning = self._meanings[tensor]
        try:
            if any(saved.get(key) != value for key, value in meaning.items()):
                raise ValueError(
                    ", ".join(
                        f"{key} {saved.get(key)!r}, now {value!r}"
                        for key, value in meaning.items()
                        if saved.get(key) != value
                    )
                )
            handle = put(self.core, tensor, saved, own)
        except ValueError as e:
            log.warning(
                "%r: the saved state of its compression is that of something else, and is not"
                " used: %s",
                tensor.name,
                e,
            )
            return
        if handle is not None:
            self._told.append(handle)

    def _put_momentum(self, name: str, momentum: AnyMomentum, meaning: Saved) -> None:
        """Put back the momentum of what no encoder adds it to."""
        saved, own = self._kept.get(name, ({}, True))
        kept = saved.get("momentum")
        n = meaning["nbytes"] // BY_NAME[meaning["dtype"]].itemsize
        if (
            own
            and kept is not None
            and all(saved.get(k) == v for k, v in meaning.items())
            and kept.size == n
        ):
            momentum.put(kept)
