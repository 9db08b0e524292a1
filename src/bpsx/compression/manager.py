"""Compression of a session's names: which are compressed, how, and what the core needs for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bpsx._core import Core
from bpsx.compression.factors import factor_bytes, is_factored, make_matrix, saves_bytes, wide_code
from bpsx.compression.gpu_kernels import GpuKernels
from bpsx.compression.spec import (
    FLOATS,
    NONE,
    CompressionSpec,
    Made,
    MomentumSpec,
    check_dtype,
    check_fits,
    effective,
    is_halved,
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
from bpsx.kernels.codecs import compressor
from bpsx.kernels.low_rank import load_steps
from bpsx.local.neighbourhood import Neighbourhood
from bpsx.planning.partitioner import most_bytes
from bpsx.planning.stages import MachineRole, stages_for

if TYPE_CHECKING:
    from bpsx.compression.gpu_kernels import AnyMomentum
    from bpsx.local._cuda import Gpu
    from bpsx.local.devices import OnGpu

log = logging.getLogger("bpsx.compression.spec")


class Remembered(NamedTuple):
    """Compressions and saved states that a suspended session leaves to the next one."""

    compressions: Mapping[str, CompressionSpec]
    kept: Mapping[str, Saved]


class Compressing:
    """Compression of one session's names.

    :meth:`declare` and :meth:`tensor` are called under the session's lock. Other methods may be
    called from any thread.
    """

    def __init__(
        self,
        config: Config,
        near: Neighbourhood,
        core: Core,
        current: Callable[[str], Tensor | None],
        remembered: Remembered | None = None,
        leads: Callable[[], bool] | None = None,
    ) -> None:
        """``current`` returns the core's tensor that a name currently stands for, or None.

        ``leads`` tells whether this worker reads and sets the servers' part of the state; None: the
        worker does whose sender is 0.
        """
        self._core, self._current = core, current
        self._config, self._near = config, near
        self._leads = leads or (lambda: near.sender == 0)
        self._of: dict[str, CompressionSpec] = dict(remembered.compressions) if remembered else {}
        # By name, dtype, bytes, and whether the tensor is on a GPU.
        self._momenta: dict[tuple[str, int, int, bool], AnyMomentum] = {}
        # Description that a saved state must have to belong to the tensor.
        self._meanings: dict[Tensor, Saved] = {}
        # Saved states not restored yet, each with whether this worker saved it.
        self._kept: dict[str, tuple[Saved, bool]] = (
            {n: (s, True) for n, s in remembered.kept.items()} if remembered else {}
        )
        self._begun: set[str] = set()  # names that an optimizer has taken charge of
        self._gpu_kernels = GpuKernels()
        # Requests to servers to keep a state, without a reply so far.
        self._told: list[Handle] = []

    def declare(self, name: str, compression: CompressionSpec) -> None:
        """Set how sums of ``name`` are compressed from now on.

        Raises :class:`~bpsx.errors.ConfigError` in asynchronous training.
        """
        if compression != NONE and self._config.asynchronous:
            raise ConfigError(
                f"{name!r}: compression={compression.text()} cannot be used with"
                " BYTEPS_ENABLE_ASYNC=1, because servers add each push to a value of a fixed shape"
            )
        if compression != self._of.get(name, NONE):  # an equal compression stays the same object
            self._warn_of(compression)
            self._of[name] = compression

    def begin(self, name: str, compression: CompressionSpec | None) -> None:
        """Let an optimizer take charge of ``name``; drops all state of an earlier optimizer.

        All workers must call this, while no push_pull of the name is under way. ``compression``
        None: not compressed, unless the script has declared a compression. Raises as
        :meth:`declare`.
        """
        if compression is not None or name in self._begun:
            self.declare(name, compression or NONE)
            self.forget([name])
        self._begun.discard(name)
        if compression is not None:
            self._begun.add(name)

    def _warn_of(self, compression: CompressionSpec) -> None:
        """Warn once of a residual that may grow without bound."""
        if (
            not compression.ef
            or compression in self._of.values()
            or compressor(compression.compressor).shrinks(dict(compression.options))
        ):
            return
        log.warning(
            "compression=%s: the error of this compressor may be larger than its input, so with"
            " ef=%r the residual can grow from step to step without bound. dithering needs"
            " normalize='max' and k of at least 2 to avoid that; without ef it keeps the mean"
            " anyway",
            compression.text(),
            compression.ef,
        )

    @property
    def any(self) -> bool:
        """Whether any compression has been declared."""
        return bool(self._of)

    def of(
        self, name: str, dtype: int, nbytes: int, shape: tuple[int, ...]
    ) -> CompressionSpec | None:
        """Return the compression of a tensor, or None if it is sent as it is.

        The result is the same object until the name is declared anew.
        """
        given = self._of.get(name)
        if given is None:
            return None
        pays = not is_factored(given) or saves_bytes(given, dtype, shape)
        least = self._config.min_compress_bytes
        return effective(given, BY_CODE[dtype].name, nbytes, least, pays)

    def pieces(self, used: CompressionSpec | None, dtype: int, shape: tuple[int, ...]) -> list[int]:
        """Return the bytes of what is cut into partitions as an uncompressed tensor is.

        These are factors, which servers sum in place of a tensor, and a tensor that is sent in
        halves: no state belongs to its partitions. No numbers: the tensor is cut by what it is.
        """
        if used is None or not self._near.has_servers:
            return []
        nbytes = math.prod(shape) * BY_CODE[dtype].itemsize
        return [nbytes] if is_halved(used) and nbytes else factor_bytes(used, dtype, shape)

    def with_momentum(
        self,
        name: str,
        dtype: int,
        nbytes: int,
        used: CompressionSpec | None,
        source: Any,
        owner: object,
        on: OnGpu | None = None,
    ) -> tuple[Any, object, OnGpu | None]:
        """Return source, owner and GPU location of what to push, with momentum added where needed.

        MomentumSpec is added here only if no encoder adds it later: for tensors that are not
        compressed, and for a process's share of a machine's compressed sum. Otherwise the arguments
        are returned as they are. ``source`` is in the form of :meth:`Core.prepare`; ``owner`` keeps
        it alive.
        """
        given = self._of.get(name)
        kind = BY_CODE[dtype]
        later = (
            self._config.distributed
            and self._near.place is MachineRole.DIRECT
            and used is given
            and not is_factored(used)
        )
        if given is None or not given.momentum or later or kind.name not in FLOATS:
            return source, owner, on
        key = name, dtype, nbytes, on is not None
        if key not in self._momenta:
            self._momenta[key] = self._gpu_kernels.momentum(name, kind.name, nbytes, on)
            self._put_momentum(name, self._momenta[key], {"dtype": kind.name, "nbytes": nbytes})
        momentum = self._momenta[key]
        if not isinstance(momentum, MomentumSpec):
            assert on is not None
            address, on = momentum.add(source[0], given.mu, on)
            return (address, nbytes), owner, on
        made = momentum.add(
            source[0] if isinstance(source, tuple) else np.asarray(source).ctypes.data, given.mu
        )
        return (made.ctypes.data, nbytes), (made, source, owner), None

    def check(
        self, name: str, dtype: int, nbytes: int, used: CompressionSpec, gpu: Gpu | None = None
    ) -> None:
        """Check that a tensor can be compressed as ``used`` says, and compile the code for it.

        Compiles here, in the caller's thread, to spare the thread that listens to the scheduler.
        ``gpu``: where the tensor is; None: host memory. Raises
        :class:`~bpsx.errors.ConfigError` if the tensor cannot be compressed.
        """
        if is_factored(used):
            check_dtype(used, BY_CODE[dtype].name, repr(name))
            if self._config.distributed and self._near.has_servers:
                load_steps(BY_CODE[dtype].name)
                if gpu is not None:
                    self._gpu_kernels.warm_factors(gpu, BY_CODE[dtype].name, bool(used.ef))
            return
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
        used: CompressionSpec | None,
        shape: tuple[int, ...],
        gpu: Gpu | None = None,
    ) -> Tensor:
        """Return the core's tensor for a declared name.

        It is compressed only if this process speaks to servers. But factors are made by each
        process, and summed as any tensors. ``gpu``: the tensor's GPU at its first push; None: host
        memory.
        """
        if used is not None and is_factored(used) and self._near.has_servers:
            return self._factored(name, dtype, parts, generation, used, shape)
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
        self._core.open_pool(self._config.compress_threads)
        if self._near.place is not MachineRole.DIRECT:  # each process has added it to its own share
            given = replace(given, momentum="")
        made = [
            make(given, BY_CODE[dtype].name, length, stream(name.encode(), i), self._near.sender)
            for i, (*_, length) in enumerate(parts)
        ]
        tensor = Tensor(name, dtype, parts, stages, generation, given.text(), made, on_gpu)
        if gpu is not None:
            self._code_on(gpu, tensor, given, dtype, made)
        if is_halved(given):  # it has no state
            self._kept.pop(name, None)  # of a version that saved the rounds' numbers
            return tensor
        lengths = [length for *_, length in parts]
        self._meanings[tensor] = {
            "dtype": BY_CODE[dtype].name,
            "nbytes": sum(lengths),
            "codec": given.text(),
            "lengths": lengths,
        }
        self._put(tensor)
        return tensor

    def _factored(
        self,
        name: str,
        dtype: int,
        parts: list[tuple[int, int, int, int, int]],
        generation: int,
        used: CompressionSpec,
        shape: tuple[int, ...],
    ) -> Tensor:
        """Return the core's tensor for a name whose factors have the places ``parts``."""
        self._core.open_pool(self._config.compress_threads)
        lengths = [length for *_, length in parts]
        made = make_matrix(used, name, dtype, shape, lengths, self._config.compress_threads)
        kind = BY_CODE[dtype].name
        made = made._replace(on_gpu=partial(self._gpu_kernels.factors, name, kind, made))
        p_bytes, _ = factor_bytes(used, dtype, shape)
        aside = made.q_offset - p_bytes  # Q begins with a page
        placed = [
            (key, lane, slot, offset + (aside if i >= made.n_first else 0), length)
            for i, (key, lane, slot, offset, length) in enumerate(parts)
        ]
        stages = stages_for("cpu", False, self._near.place)
        tensor = Tensor(
            name, wide_code(dtype), placed, stages, generation, used.text(), matrix=made
        )
        self._meanings[tensor] = {
            "dtype": BY_CODE[dtype].name,
            "nbytes": made.nbytes,
            "codec": used.text(),
            "shape": [made.rows, made.columns],
        }
        self._put(tensor)
        return tensor

    def _code_on(
        self, gpu: Gpu, tensor: Tensor, given: CompressionSpec, dtype: int, made: list[Made]
    ) -> None:
        """Compress a tensor on the GPU, or on the host if its GPU kernels are unavailable."""
        coders = self._gpu_kernels.coders(gpu, tensor.name, given, BY_CODE[dtype].name, made)
        if coders is not None:
            self._core.open_coders()
            tensor.code_on(gpu, coders)

    # ---- for checkpoints

    def save(self, names: Iterable[str]) -> dict[str, Saved]:
        """Return the saved states of those ``names`` that have any.

        See :data:`bpsx.compression.state.Saved`.

        Call it while no push_pull of the names is under way.

        Raises :class:`~bpsx.errors.BpsxError` if one does not end within ``BPSX_SHUTDOWN_TIMEOUT``.
        """
        wanted = list(dict.fromkeys(names))
        tensors = [tensor for tensor in map(self._tensor_of, wanted) if tensor is not None]
        for tensor in tensors:
            until_idle(self._core, tensor, self._config.shutdown_timeout)
        taken = take(self._core, tensors, self._leads())
        found: dict[str, Saved] = {
            tensor.name: {**self._meanings[tensor], **taken[tensor.name]} for tensor in tensors
        }
        for name in wanted:
            if name in self._kept and name not in found:  # not pushed since the state was given
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
        """Restore states from :meth:`save`, at once or when a name is first pushed.

        Of a state that another worker saved, only the counters are used.

        Waits for push_pulls of these names that are under way, and for the servers. Raises
        :class:`~bpsx.errors.ConfigError` for malformed states, and any error of the servers.
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
                "worker %d: the given state was saved by worker %s, so residuals and momentum"
                " start from zero here; each worker has to save and load its own state",
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
                until_idle(self._core, tensor, self._config.shutdown_timeout)
                self._put(tensor)
        self._wait_for_servers()

    def forget(self, names: Iterable[str]) -> None:
        """Reset residuals, momentum and counters of ``names``; one worker also resets the servers'.

        All workers must call this. Raises as :meth:`restore`.
        """
        for name in names:
            self._kept.pop(name, None)
            for key in [key for key in self._momenta if key[0] == name]:
                del self._momenta[key]
            tensor = self._tensor_of(name)
            if tensor is not None:
                until_idle(self._core, tensor, self._config.shutdown_timeout)
                handle = clear(self._core, tensor, self._leads())
                if handle is not None:
                    self._told.append(handle)
        self._wait_for_servers()

    def _wait_for_servers(self) -> None:
        """Wait until the servers have taken the states sent to them; raise their error."""
        told, self._told = self._told, []
        for handle in told:
            handle.wait()

    def _tensor_of(self, name: str) -> Tensor | None:
        """Return the current tensor of ``name`` if this process compresses it, else None."""
        tensor = self._current(name)
        return tensor if tensor in self._meanings else None

    def remembered(self) -> Remembered:
        """Return the state for the next session.

        If the saved states are unavailable, logs a warning and leaves them out.
        """
        try:
            kept = self.save(self._of)
        except BpsxError as e:
            log.warning("residuals and momentum start from zero after suspend(): %s", e)
            kept = {}
        return Remembered(dict(self._of), kept)

    def check_told(self) -> None:
        """Check whether the servers have taken the states sent to them; called once a second."""
        for handle in [h for h in self._told if h.done()]:
            with suppress(ValueError):  # another thread has taken it and waits
                self._told.remove(handle)
            try:
                handle.wait()
            except BpsxError as e:
                log.error(
                    "%r: the servers did not accept the saved state of its compression and start"
                    " from zero: %s",
                    handle.name,
                    e,
                )

    def _put(self, tensor: Tensor) -> None:
        """Restore a tensor's saved state, if there is one and it is this tensor's."""
        if "worker" not in self._kept.get(tensor.name, ({}, True))[0]:
            return
        saved, own = self._kept.pop(tensor.name)
        meaning = self._meanings[tensor]
        try:
            if any(saved.get(key) != value for key, value in meaning.items()):
                raise ValueError(
                    ", ".join(
                        f"{key} was {saved.get(key)!r}, is now {value!r}"
                        for key, value in meaning.items()
                        if saved.get(key) != value
                    )
                )
            handle = put(self._core, tensor, saved, own)
        except ValueError as e:
            log.warning(
                "%r: the saved state of its compression belongs to another tensor or another"
                " compression, and is not used: %s",
                tensor.name,
                e,
            )
            return
        if handle is not None:
            self._told.append(handle)

    def _put_momentum(self, name: str, momentum: AnyMomentum, meaning: Saved) -> None:
        """Restore saved momentum of a tensor that has no encoder to add it."""
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
